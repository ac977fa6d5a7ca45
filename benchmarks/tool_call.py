"""What one tool call costs: our stream to the supervisor, in both backends, against two ways of `exec`.

    python benchmarks/tool_call.py [CALLS]

The ways take turns, call by call, so that a busy machine slows all of them alike; those of Docker share one
container. Compare the ratios; the milliseconds are the machine's. Exit code 1 if ours, in Docker, is not 25
times as fast for `true` as both. For everything else that sandboxes cost see `sandbox_costs.py`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import docker
import trio
from rich.console import Console
from rich.table import Table

from sandboxes.docker import DockerEngine
from sandboxes.engine import ensure_base_image, ensure_engine
from sandboxes.oci import OciEngine
from sandboxes.protocol import Limits, Sandbox

COMMANDS = {"true": "true", "cat 20 KB": "cat /tmp/20k"}
OURS, PEERS = "swe-env, docker", ("docker exec", "SDK exec")
GOAL = 25.0

Ways = dict[str, Callable[[str], Awaitable[object]]]
Times = defaultdict[str, defaultdict[str, list[float]]]
"""Milliseconds of each call, by command and way."""


def ways(of_docker: Sandbox, of_oci: Sandbox) -> Ways:
    api: Any = docker.APIClient()

    def sdk_exec(command: str) -> None:
        made = api.exec_create(of_docker.id, ["bash", "-c", command])
        api.exec_start(made["Id"])
        if api.exec_inspect(made["Id"])["ExitCode"] != 0:
            raise RuntimeError(f"{command} failed")

    async def sdk(command: str) -> None:
        sdk_exec(command)  # nothing else runs meanwhile: no thread is paid for

    async def program(command: str) -> None:
        argv = ["docker", "exec", of_docker.id, "bash", "-c", command]
        subprocess.run(argv, capture_output=True, check=True)  # noqa: ASYNC221

    return {"swe-env, oci": of_oci.run, OURS: of_docker.run, PEERS[0]: program, PEERS[1]: sdk}


async def measure(calls: int, contestants: Ways) -> Times:
    times: Times = defaultdict(lambda: defaultdict(list))
    for _ in range(calls):
        for name, command in COMMANDS.items():
            for way, call in contestants.items():
                begin = time.perf_counter()
                await call(command)
                times[name][way].append((time.perf_counter() - begin) * 1e3)
    return times


def table(times: Times) -> Table:
    result = Table("command", "way", "median ms", "p99 ms", "x ours", title="one tool call")
    for command, by_way in times.items():
        ours = statistics.median(by_way[OURS])
        for way, values in by_way.items():
            median = statistics.median(values)
            p99 = sorted(values)[int(len(values) * 0.99)]
            result.add_row(command, way, f"{median:.2f}", f"{p99:.2f}", f"{median / ours:.1f}")
    return result


async def main(calls: int) -> None:
    await trio.to_thread.run_sync(ensure_engine, print)
    image = await trio.to_thread.run_sync(ensure_base_image, print)
    async with (
        DockerEngine.connect(run_id="bench-tool-call") as engine,
        OciEngine.connect() as oci,
        engine.sandbox(image, workdir="/work", limits=Limits()) as of_docker,
        oci.sandbox(image, workdir="/work", limits=Limits()) as of_oci,
    ):
        for sandbox in (of_docker, of_oci):
            await sandbox.write("/tmp/20k", b"0123456789abcde\n" * 1280)
        contestants = ways(of_docker, of_oci)
        await measure(3, contestants)  # warm up
        times = await measure(calls, contestants)
    Console().print(table(times))
    for peer in PEERS:
        ratio = statistics.median(times["true"][peer]) / statistics.median(times["true"][OURS])
        if ratio < GOAL:
            sys.exit(f"goal missed: {peer} takes {ratio:.1f} times as long as ours, not {GOAL:.0f}")


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 100)
