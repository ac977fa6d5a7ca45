"""What one tool call costs: our stream to the supervisor against `docker exec` and the SDK's exec.

    python benchmarks/tool_call.py [calls]

The ways take turns on one container, call by call, so that a busy machine slows all of them alike.
Compare the ratios; the milliseconds are the machine's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

import docker
import trio
from rich.console import Console
from rich.table import Table

from sandboxes.docker import DockerEngine, Sandbox
from sandboxes.engine import ensure_base_image, ensure_engine
from sandboxes.protocol import Limits

COMMANDS = {"true": "true", "cat 20 KB": "cat /tmp/20k"}
WAYS = ("swe-env run()", "docker exec", "SDK exec")


def docker_exec(container: str, command: str) -> None:
    subprocess.run(["docker", "exec", container, "bash", "-c", command], capture_output=True, check=True)


def sdk_exec(api: Any, container: str, command: str) -> None:
    made = api.exec_create(container, ["bash", "-c", command])
    api.exec_start(made["Id"])
    if api.exec_inspect(made["Id"])["ExitCode"] != 0:
        raise RuntimeError(f"{command} failed")


async def measure(sandbox: Sandbox, api: Any, calls: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each call, by command and way."""
    times: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in COMMANDS}
    for _ in range(calls):
        for name, command in COMMANDS.items():
            for way in WAYS:
                begin = time.perf_counter()
                if way == "swe-env run()":
                    await sandbox.run(command)
                elif way == "docker exec":
                    docker_exec(sandbox.id, command)
                else:
                    sdk_exec(api, sandbox.id, command)
                times[name][way].append((time.perf_counter() - begin) * 1e3)
    return times


def table(times: dict[str, dict[str, list[float]]]) -> Table:
    result = Table("command", "way", "median ms", "p99 ms", "x ours", title="one tool call")
    for command, ways in times.items():
        ours = statistics.median(ways[WAYS[0]])
        for way, values in ways.items():
            median = statistics.median(values)
            p99 = sorted(values)[int(len(values) * 0.99)]
            result.add_row(command, way, f"{median:.2f}", f"{p99:.2f}", f"{median / ours:.1f}")
    return result


async def main(calls: int) -> None:
    await trio.to_thread.run_sync(ensure_engine, print)
    image = await trio.to_thread.run_sync(ensure_base_image, print)
    api: Any = docker.APIClient()
    async with (
        DockerEngine.connect(run_id="bench-tool-call") as engine,
        engine.sandbox(image, workdir="/work", limits=Limits()) as sandbox,
    ):
        await sandbox.write("/tmp/20k", b"0123456789abcde\n" * 1280)
        await measure(sandbox, api, 3)  # warm up
        Console().print(table(await measure(sandbox, api, calls)))


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 100)
