"""Blows against a training while it runs, and what must be true of it at its end whatever they were.

    python -m tests.swe_env.chaos --minutes 20 [--sandbox docker] [--blows daemon ...] [--seed N]

strikes for that long, the Docker daemon too where the sandboxes are Docker's (it ends containers of others).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from sandboxes.engine import ensure_engine
from sandboxes.oci_place import RUN
from sandboxes.reaper import OWNER_LABEL, dead
from swe_env.train_dir import StepRow, TrainDir
from tests.sandboxes.conftest import REPOSITORY
from tests.swe_env.trainings import untaught


class Victims:
    """The processes of a training, by what they are for. Each blow is at one of them, at random."""

    def __init__(self, training: int, draw: random.Random) -> None:
        self._training = training
        self._draw = draw

    def worker(self) -> None:
        self._kill("swe_env.rollout_worker")

    def stopped_worker(self) -> None:
        """Watches the clocks of its episodes, and does not run while they go on."""
        if found := self._find("swe_env.rollout_worker"):
            pid = self._draw.choice(found)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(4)
                os.kill(pid, signal.SIGCONT)

    def trainer(self) -> None:
        self._kill("trainer.rl")

    def server(self) -> None:
        self._kill("swe_env.vllm_launcher")

    def engine_of_the_server(self) -> None:
        self._kill("VLLM::EngineCore")

    def sandbox(self) -> None:
        workers = self._find("swe_env.rollout_worker")
        within = [process.pid for worker in workers for process in descendants(worker)]
        if within:
            kill(self._draw.choice(within))

    def supervisor(self) -> None:
        """The command that was typed: somebody types it again."""
        kill(self._training)

    def daemon(self) -> None:
        """Docker's."""
        for pid in [pid for pid, line in processes() if line.split(" ")[0].endswith("dockerd")]:
            kill(pid)
        time.sleep(3)
        ensure_engine(print)

    def _find(self, what: str) -> list[int]:
        return running(what, self._training)

    def _kill(self, what: str) -> None:
        if found := self._find(what):
            kill(self._draw.choice(found))


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def processes() -> Iterator[tuple[int, str]]:
    """Ids and command lines."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield int(file.parent.name), file.read_bytes().replace(b"\0", b" ").decode(errors="replace")


class Process(NamedTuple):
    pid: int
    parent: int
    line: str


def descendants(of: int) -> list[Process]:
    """Its children, theirs, and so on."""
    parents: dict[int, int] = {}
    lines = dict(processes())
    for pid in lines:
        with suppress(OSError):
            parents[pid] = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(") ", 1)[1].split()[1])
    found, new = set[int](), {of}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return [Process(pid, parents[pid], lines[pid]) for pid in sorted(found)]


def running(what: str, below: int) -> list[int]:
    """Ids of the processes below that one whose command lines hold this.

    One that is about to become another program still has its parent's line: it is not counted.
    """
    there = descendants(below)
    lines = {process.pid: process.line for process in there}
    found = [process for process in there if what in process.line]
    return [process.pid for process in found if process.line != lines.get(process.parent)]


class Training:
    """`swe-env train`, which is typed again whenever it is killed."""

    def __init__(self, config: Path, out: Path) -> None:
        self._argv = [sys.executable, "-m", "swe_env", "train", str(config), "--out", str(out)]
        self._log = out.with_suffix(".log")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._argv, stdout=log, stderr=log, cwd=REPOSITORY)

    def is_over(self) -> bool:
        """Whether it has ended well; starts it again if it was killed. Raises what it said if it failed."""
        code = self.process.poll()
        if code == -signal.SIGKILL:
            self.process = self._start()
        elif code:
            raise AssertionError(self.said())
        return code == 0

    def said(self) -> str:
        return self._log.read_text(errors="replace")


def unowned() -> list[str]:
    """Containers, and directories of sandboxes, whose owner is dead; those of other tests as well."""
    argv = ["docker", "ps", "-a", "--format", f'{{{{.Names}}}} {{{{.Label "{OWNER_LABEL}"}}}}']
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    left = [name for name, _, owner in (line.partition(" ") for line in lines) if dead(owner)]
    for lock in RUN.glob("*.lock"):
        with lock.open() as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left += [str(home) for home in lock.with_suffix("").glob("*-*")]
    return left


@contextmanager
def training(config: Path, out: Path) -> Iterator[Training]:
    running = Training(config, out)
    try:
        yield running
    finally:
        kill(running.process.pid)
        running.process.wait()


def assert_is_whole(where: TrainDir, steps: int) -> None:
    """What must be true at the end of a training, whatever happened to it."""
    # each metric row once, each step taken
    assert [row.step for row in where.rows() if isinstance(row, StepRow)] == list(range(steps))
    assert where.versions()[-1] == steps
    # the ledger balances: what was begun was trained on, dropped for a reason, or is left for later, once
    batches = [where.read_batch(step) for step in range(steps)]
    trained = [group for batch in batches for group in batch.groups]
    dropped = [group for batch in batches for group in batch.dropped]
    assert sorted([*trained, *dropped, *where.groups().begun]) == list(range(where.groups().next))
    names: list[str] = []
    for batch in batches:
        for group in batch.groups:
            for episode in where.group(group).episodes():
                names.append(episode.id)
                assert (episode.reward is None) == episode.end.is_infrastructure, episode.error
                versions = [
                    version
                    for segment in episode.segments
                    for version in segment.policy_versions
                    if version is not None
                ]
                assert all(batch.step - 2 <= version <= batch.step for version in versions)
    assert len(set(names)) == len(names)  # each episode is trained on once
    began = time.monotonic()
    while left := [line for _, line in processes() if str(where.path) in line]:  # they notice
        assert time.monotonic() - began < 20, left
        time.sleep(0.1)


def strike(where: TrainDir, running: Training, blows: Iterator[str], draw: random.Random) -> None:
    """A blow a moment after every second step; when there are no more, wait until the training is over."""
    wanted = 0
    for blow in blows:
        wanted = max(wanted, len(where.rows())) + 2
        while len(where.rows()) < wanted and not running.is_over():
            time.sleep(0.2)
        if running.is_over():
            return
        time.sleep(draw.uniform(0, 3))
        print(f"{len(where.rows())} steps; {blow}", flush=True)
        getattr(Victims(running.process.pid, draw), blow)()
    while not running.is_over():
        time.sleep(0.2)


BLOWS = ["worker", "stopped_worker", "sandbox", "trainer", "server", "engine_of_the_server", "supervisor"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--sandbox", choices=("oci", "docker"), default="oci")
    parser.add_argument("--blows", nargs="*", choices=[*BLOWS, "daemon"], help="these and no others")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    chosen = asked.blows or [*BLOWS, *(["daemon"] if asked.sandbox == "docker" else [])]
    draw, steps = random.Random(asked.seed), max(8, round(3 * asked.minutes))
    print(f"seed {asked.seed}, {steps} steps")
    end = time.monotonic() + 60 * asked.minutes

    def blows() -> Iterator[str]:
        while time.monotonic() < end:
            yield draw.choice(chosen)

    with tempfile.TemporaryDirectory() as scratch:
        config, out = Path(scratch) / "chaos.toml", Path(scratch) / "run"
        config.write_text(untaught(steps=steps, sandbox=asked.sandbox, servers=2))
        with training(config, out) as running:
            try:
                strike(TrainDir(out), running, blows(), draw)
            finally:
                print(running.said())
        assert_is_whole(TrainDir(out), steps)
    assert not (left := unowned()), left
    print("the training is whole")


if __name__ == "__main__":
    main()
