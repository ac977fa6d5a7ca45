"""What sandboxes cost: both of our backends beside three ways that others use, in one run.

    python benchmarks/sandbox_costs.py [--repeats N] [--quick] [--swerex PYTHON]

Every contestant does everything once a round, in an order that moves on by one each round, so that a busy
machine slows all of them alike. Compare the ratios; the milliseconds are the machine's.

- start: until the first command has answered; teardown: until what was started is gone.
- whole episode: start, three commands, the patch, teardown; of an image that has the repository. Ours goes
  through `swe_env.workspace` and captures the patch in a second sandbox where the backend can; the others
  ask the sandbox's own git for it.
- grading: a fresh sandbox, the patch, the hidden tests. Ours also puts protected files back and checks the
  runner with a test that must fail; the others apply the patch and run pytest.
- episodes/s: start, one command, teardown, over and over.

SWE-ReX takes part where `--swerex` names an interpreter that has it, or this one does; its server counts as
part of the image (`swerex_client.py`). Needs Docker, and what the oci backend needs.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import docker
import trio
from rich.console import Console
from rich.table import Table

from sandboxes.docker import DockerEngine
from sandboxes.engine import ensure_base_image, ensure_engine
from sandboxes.oci import OciEngine, OciSandbox
from sandboxes.protocol import Engine, Limits, SandboxError
from swe_env.grading import grade
from swe_env.workspace import ENVIRONMENT, Workspaces
from tasks.model import InlineRepo, PytestTests, Task

PATCH = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def total(numbers):
-    return sum(numbers) - 1
+    return sum(numbers)
"""
TESTS = "from calc import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n"
TASK = Task(
    id="benchmark",
    source="benchmark",
    problem_statement="total([1, 2]) is 2, and should be 3.",
    image=InlineRepo(files={"calc.py": "def total(numbers):\n    return sum(numbers) - 1\n"}),
    workdir="/work",
    tests=PytestTests(files={"tests/test_calc.py": TESTS}),
    fail_to_pass=["tests/test_calc.py::test_total"],
    gold_patch=PATCH,
)
PLAIN_IMAGE = "swe-env/benchmark:1"
COMMANDS = {"call: true": "true", "call: cat 20 KB": "cat /tmp/20k"}
MAKE_20K = "yes 0123456789abcde | head -n 1280 > /tmp/20k"
EPISODE = ("cat calc.py", "sed -i 's/ - 1$//' calc.py", "git status --short")
CAPTURE = "git add -A && git diff --cached"
FORK = "fork, 50 files"
CHANGE_FILES = "for i in $(seq 50); do head -c 4096 /dev/urandom > file$i; done"
LEVELS = (1, 4, 16, 64)
WINDOW = 2.0
"""How long new episodes are begun to measure a rate [s]; those begun are waited for."""

Call = Callable[[str], Awaitable[bytes]]
"""Runs a command in a sandbox. Returns its output; raises where it fails."""
Times = defaultdict[str, defaultdict[str, list[float]]]
"""Milliseconds, by measurement and contestant."""


class Contestant(Protocol):
    """One way to have sandboxes."""

    name: str
    most: int
    """Sandboxes at once that it is asked for: more take it too long."""

    def start(self) -> AbstractAsyncContextManager[Call]:
        """A sandbox, gone on exit."""
        ...

    async def episode(self) -> None: ...

    async def grade(self) -> None: ...


class Ours:
    """A backend of swe-env."""

    most = max(LEVELS)

    def __init__(self, name: str, engine: Engine, base_image: str, image: str) -> None:
        self.name, self.engine, self.image = name, engine, image
        self.workspaces = Workspaces(engine, base_image, setup_once=True)

    @asynccontextmanager
    async def start(self) -> AsyncGenerator[Call]:
        where = self.engine.sandbox(self.image, workdir=TASK.workdir, limits=Limits(), env=ENVIRONMENT)
        async with where as sandbox:

            async def call(command: str) -> bytes:
                result = await sandbox.run(command)
                if result.exit_code != 0:
                    raise RuntimeError(f"{self.name}: {command} failed: {result.text}")
                return result.output

            yield call

    async def episode(self) -> None:
        async with self.workspaces.open(TASK.view()) as workspace:
            for command in EPISODE:
                await workspace.sandbox.run(command)
            patch = await workspace.capture()
        if patch.paths != ["calc.py"]:
            raise RuntimeError(f"{self.name}: the patch is {patch}")

    async def grade(self) -> None:
        result = await grade(TASK, PATCH.encode(), self.workspaces)
        if not result.resolved:
            raise RuntimeError(f"{self.name}: not resolved: {result.reason}")


class _Peer(ABC):
    """What a way of others makes of an episode and of grading, with nothing but calls."""

    name: str

    @abstractmethod
    def start(self) -> AbstractAsyncContextManager[Call]: ...

    async def episode(self) -> None:
        async with self.start() as call:
            for command in EPISODE:
                await call(command)
            patch = await call(CAPTURE)
        if b"+    return sum(numbers)" not in patch:
            raise RuntimeError(f"{self.name}: the patch is {patch!r}")

    async def grade(self) -> None:
        script = f"set -e\ngit apply <<'END'\n{PATCH}END\nmkdir tests\n"
        script += f"cat > tests/test_calc.py <<'END'\n{TESTS}END\npython -m pytest -q tests\n"
        encoded = base64.b64encode(script.encode()).decode()  # one line, which every shell session takes
        async with self.start() as call:
            await call(f"echo {encoded} | base64 -d | bash")


class Sdk(_Peer):
    """The Docker SDK, as most harnesses use it."""

    name, most = "docker SDK", 16

    def __init__(self, image: str) -> None:
        self.image = image
        self.client: Any = docker.from_env(max_pool_size=self.most)

    @asynccontextmanager
    async def start(self) -> AsyncGenerator[Call]:
        container = await trio.to_thread.run_sync(
            lambda: self.client.containers.run(self.image, "sleep 2h", detach=True)
        )

        async def call(command: str) -> bytes:
            code, output = await trio.to_thread.run_sync(container.exec_run, ["bash", "-c", command])
            if code != 0:
                raise RuntimeError(f"{self.name}: {command} failed: {output!r}")
            return output

        try:
            yield call
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(lambda: container.remove(force=True))


class Exec(_Peer):
    """The `docker` program for every step, as mini-swe-agent does."""

    name, most = "docker exec", 16

    def __init__(self, image: str) -> None:
        self.image = image

    @asynccontextmanager
    async def start(self) -> AsyncGenerator[Call]:
        name = f"bench-{secrets.token_hex(6)}"
        try:
            await self._docker("run", "-d", "--name", name, "--rm", self.image, "sleep", "2h")
            yield lambda command: self._docker("exec", name, "bash", "-lc", command)
        finally:
            with trio.CancelScope(shield=True):
                await self._docker("rm", "-f", name)

    async def _docker(self, *words: str) -> bytes:
        def work() -> bytes:
            done = subprocess.run(["docker", *words], capture_output=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"docker {' '.join(words)} failed: {done.stderr.decode(errors='replace')}")
            return done.stdout

        return await trio.to_thread.run_sync(work)


class SweRex(_Peer):
    """SWE-ReX with its Docker deployment: a client process for each sandbox alive, kept for the next one."""

    name, most = "SWE-ReX", 4

    def __init__(self, python: str, image: str, errors: Path) -> None:
        self.python, self.image, self.errors = python, image, errors
        self.clients = [self._client() for _ in range(self.most)]
        self.idle = list(self.clients)

    @asynccontextmanager
    async def start(self) -> AsyncGenerator[Call]:
        client = self.idle.pop()
        try:
            await self._ask(client, "start", self.image)

            async def call(command: str) -> bytes:
                return await self._ask(client, "call", command)

            yield call
        finally:
            with trio.CancelScope(shield=True):
                await self._ask(client, "stop")
            self.idle.append(client)

    def close(self) -> None:
        for client in self.clients:
            client.communicate()

    def _client(self) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("swerex_client.py"))
        pipe = subprocess.PIPE
        with self.errors.open("ab") as errors:
            return subprocess.Popen([self.python, script], stdin=pipe, stdout=pipe, stderr=errors)

    async def _ask(self, client: subprocess.Popen[bytes], *words: str) -> bytes:
        def work() -> bytes:
            assert client.stdin is not None
            assert client.stdout is not None
            with suppress(BrokenPipeError):
                client.stdin.write(json.dumps(words).encode() + b"\n")
                client.stdin.flush()
            line = client.stdout.readline()
            if not line:
                raise RuntimeError(self.errors.read_text(errors="replace").strip().rpartition("\n")[2])
            reply = json.loads(line)
            if "error" in reply:
                raise RuntimeError(reply["error"])
            return str(reply["output"]).encode()

        return await trio.to_thread.run_sync(work)


async def measure(contestants: list[Contestant], parent: OciSandbox, rounds: int, calls: int) -> Times:
    """Everything but rates, in turns; `parent` is forked."""
    times: Times = defaultdict(lambda: defaultdict(list))

    async def timed(what: str, who: str, work: Callable[[], Awaitable[object]]) -> None:
        begin = time.perf_counter()
        await work()
        times[what][who].append((time.perf_counter() - begin) * 1e3)

    async def life(who: Contestant) -> None:
        async with AsyncExitStack() as stack:

            async def start() -> None:
                call = await stack.enter_async_context(who.start())
                await call("true")

            await timed("start", who.name, start)
            await timed("teardown", who.name, stack.aclose)

    async with AsyncExitStack() as stack:
        alive = {who.name: await stack.enter_async_context(who.start()) for who in contestants}
        for call in alive.values():
            await call(MAKE_20K)
        for turn in range(rounds):
            first = turn % len(contestants)
            order = contestants[first:] + contestants[:first]
            for what, command in COMMANDS.items():
                for _ in range(calls):
                    for who in order:
                        call = alive[who.name]
                        await timed(what, who.name, lambda call=call, command=command: call(command))
            for who in order:
                await life(who)
            for who in order:
                await timed("whole episode", who.name, who.episode)
            for who in order:
                await timed("grading a small task", who.name, who.grade)
            for _ in range(2):
                async with AsyncExitStack() as fork:
                    await timed(FORK, "oci", lambda fork=fork: fork.enter_async_context(parent.fork()))
    return times


async def measure_rates(contestants: list[Contestant], rounds: int) -> dict[str, dict[int, float]]:
    """Episodes a second, by contestant and how many run at once."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    seconds: dict[tuple[str, int], float] = defaultdict(float)

    async def work(who: Contestant, level: int, until: float) -> None:
        while time.perf_counter() < until:
            async with who.start() as call:
                await call("true")
            counts[who.name, level] += 1

    for _ in range(rounds):
        for level in LEVELS:
            for who in contestants:
                if level > who.most:
                    continue
                begin = time.perf_counter()
                async with trio.open_nursery() as nursery:
                    for _ in range(level):
                        nursery.start_soon(work, who, level, begin + WINDOW)
                seconds[who.name, level] += time.perf_counter() - begin
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, level), count in counts.items():
        rates[name][level] = count / seconds[name, level]
    return rates


def tables(times: Times, rates: dict[str, dict[int, float]]) -> list[Table]:
    costs = Table("what", "contestant", "n", "median ms", "p99 ms", "x oci", title="what one costs")
    for what, ways in times.items():
        ours = statistics.median(ways["oci"])
        for who, values in ways.items():
            median, p99 = statistics.median(values), sorted(values)[int(len(values) * 0.99)]
            ratio = f"{median / ours:.1f}"
            costs.add_row(what, who, str(len(values)), f"{median:.2f}", f"{p99:.2f}", ratio)
        costs.add_section()
    pace = Table("contestant", *(f"{level} at once" for level in LEVELS), title="episodes/s")
    pace.caption = "start, one command, teardown; -: not asked for, it takes too long"
    for who, by_level in rates.items():
        pace.add_row(who, *(f"{by_level[level]:.1f}" if level in by_level else "-" for level in LEVELS))
    return [costs, pace]


def goals(times: Times, rates: dict[str, dict[int, float]]) -> Table:
    """What the oci backend is to reach on 2 cores, and whether it did in this run."""

    def median(what: str, who: str = "oci") -> float:
        return statistics.median(times[what][who])

    episode = median("whole episode") / median("whole episode", "docker SDK")
    call = median("call: true")
    faster = median("call: true", "docker exec") / call
    fork = median(FORK)
    pace = rates["oci"][16]
    table = Table("goal", "this run", "", title=f"goals of the oci backend ({os.cpu_count()} cores here)")
    for goal, value, met in (
        ("whole episode at most 1/5 of the Docker SDK's", f"1/{1 / episode:.1f}", episode <= 1 / 5),
        ("at least 40 episodes/s, 16 at once", f"{pace:.1f}", pace >= 40),
        ("tool call at most 2 ms", f"{call:.2f} ms", call <= 2),
        ("tool call at least 50 times faster than docker exec", f"{faster:.0f} times", faster >= 50),
        ("fork at most 40 ms at 50 changed files", f"{fork:.1f} ms", fork <= 40),
    ):
        table.add_row(goal, value, "met" if met else "not met")
    return table


async def swerex(python: str | None, image: str, stack: AsyncExitStack) -> list[Contestant]:
    """SWE-ReX, if it is here and starts; else says why not."""
    if python is None and importlib.util.find_spec("swerex") is None:
        print("SWE-ReX is left out: `pip install swe-rex aiohttp` somewhere and give --swerex PYTHON")
        return []
    folder = await trio.to_thread.run_sync(lambda: stack.enter_context(tempfile.TemporaryDirectory()))
    try:
        rex = SweRex(python or sys.executable, image, Path(folder) / "errors")
        stack.callback(rex.close)
        async with rex.start() as call:
            await call("true")
    except (RuntimeError, OSError) as error:
        print(f"SWE-ReX is left out, it does not run here: {error}")
        return []
    return [rex]


async def main(rounds: int, calls: int, paces: int, swerex_python: str | None) -> None:
    began = time.monotonic()
    await trio.to_thread.run_sync(ensure_engine, print)
    base = await trio.to_thread.run_sync(ensure_base_image, print)
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(DockerEngine.connect(run_id="bench-sandboxes"))
        oci = await stack.enter_async_context(OciEngine.connect())
        client: Any = docker.from_env()
        async with Workspaces(ours, base, setup_once=True).open(TASK.view()) as workspace:
            image = client.images.get(workspace.sandbox.image_id).tags[0]
        # The same files, without the entry point that our sandboxes have.
        plain = io.BytesIO(f"FROM {image}\nENTRYPOINT []\n".encode())
        client.images.build(fileobj=plain, tag=PLAIN_IMAGE, rm=True, forcerm=True)
        stack.callback(client.images.remove, PLAIN_IMAGE)
        contestants: list[Contestant] = [
            Ours("oci", oci, base, image),
            Ours("docker", ours, base, image),
            Sdk(PLAIN_IMAGE),
            Exec(PLAIN_IMAGE),
            *await swerex(swerex_python, PLAIN_IMAGE, stack),
        ]
        parent = await stack.enter_async_context(
            oci.sandbox(image, workdir=TASK.workdir, limits=Limits(), env=ENVIRONMENT)
        )
        await parent.run(CHANGE_FILES)
        await measure(contestants, parent, 1, 2)  # warm up
        times = await measure(contestants, parent, rounds, calls)
        rates = await measure_rates(contestants, paces)
    console = Console()
    for table in (*tables(times, rates), goals(times, rates)):
        console.print(table)
    console.print(f"{rounds} rounds in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=12, help="rounds (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that it works")
    parser.add_argument("--swerex", metavar="PYTHON", help="an interpreter that has swe-rex")
    options = parser.parse_args()
    try:
        if options.quick:
            trio.run(main, 2, 3, 1, options.swerex)
        else:
            trio.run(main, options.repeats, 10, 2, options.swerex)
    except* SandboxError as errors:
        sys.exit("\n".join(str(error) for error in errors.exceptions))
