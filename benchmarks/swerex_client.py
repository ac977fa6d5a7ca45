"""SWE-ReX for `sandbox_costs.py`, at the other end of two pipes: run by an interpreter that has `swe-rex`.

A line of JSON comes in, `["start", IMAGE]`, `["call", COMMAND]` or `["stop"]`, and one goes out:
`{"output": TEXT}` or `{"error": REASON}`. Its server is not installed into each container, which takes it
most of a minute: this interpreter is mounted there, so that `start` costs what it does in a prepared image.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

COMMAND_SECONDS = 60


def deployment(image: str) -> DockerDeployment:
    mounts = {sys.prefix, sys.base_prefix} - {"/usr"}
    arguments = [word for path in sorted(mounts) for word in ("-v", f"{path}:{path}:ro")]
    arguments += ["-v", f"{sys.prefix}/bin/swerex-remote:/usr/local/bin/swerex-remote:ro"]
    return DockerDeployment(image=image, docker_args=arguments, pull="never", startup_timeout=60)


async def main(replies: int) -> None:
    current: DockerDeployment | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            output = ""
            if request[0] == "start":
                current = deployment(request[1])
                await current.start()
                await current.runtime.create_session(CreateBashSessionRequest())
            elif request[0] == "call":
                assert current is not None
                action = BashAction(command=request[1], timeout=COMMAND_SECONDS)
                output = (await current.runtime.run_in_session(action)).output
            elif current is not None:
                await current.stop()
                current = None
            reply = {"output": output}
        except Exception as error:  # whatever it is, it is what the benchmark has to say of it
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        os.write(replies, json.dumps(reply).encode() + b"\n")
    if current is not None:
        await current.stop()


if __name__ == "__main__":
    pipe = os.dup(1)
    os.dup2(2, 1)  # what the library prints must not come between replies
    asyncio.run(main(pipe))
