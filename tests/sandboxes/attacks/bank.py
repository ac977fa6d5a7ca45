"""All probes, and running them: few sandboxes of one backend, one probe after the other."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio

from sandboxes.protocol import Limits, Sandbox
from tests.sandboxes.attacks.backends import BACKENDS, HOST_DECIDES, KNOWN_OPEN, Opener
from tests.sandboxes.attacks.escapes import ESCAPES
from tests.sandboxes.attacks.information import INFORMATION
from tests.sandboxes.attacks.probe import Outcome, Probe, attack
from tests.sandboxes.attacks.resources import RESOURCES
from tests.sandboxes.attacks.sessions import SESSIONS
from tests.sandboxes.attacks.supervisor import SUPERVISOR

# What looks for traces of others comes first, before there are any of our own.
BANK: tuple[Probe, ...] = (*INFORMATION, *SUPERVISOR, *ESCAPES, *RESOURCES, *SESSIONS)

LIMITS = Limits(memory=256 << 20, cpus=1.0, pids=96, file_size=32 << 20)
PROBE_SECONDS = 60
"""Longest that one probe and the look afterwards may take [s]."""

CLEAN = "rm -rf /tmp/* /dev/shm/* /dev/mqueue/* /root/* 2>/dev/null; ipcrm --all 2>/dev/null; true"


async def run_bank(
    backend: str, image: str, probes: Sequence[Probe], say: Callable[[str], object] = lambda line: None
) -> dict[str, Outcome]:
    """What each probe did, by its name."""
    outcomes: dict[str, Outcome] = {}
    with Host() as host:
        async with BACKENDS[backend]() as opener, opener(image, LIMITS) as neighbour:
            left = list(probes)
            while left:
                async with _sandbox(opener, image) as sandbox:
                    while left:
                        probe = left.pop(0)
                        begin = time.monotonic()
                        outcome = Outcome(False, f"nothing came back within {PROBE_SECONDS} s")
                        with trio.move_on_after(PROBE_SECONDS):
                            outcome = await attack(probe, sandbox, neighbour, host.environment(neighbour))
                        if wrong := host.is_unwell():
                            outcome = Outcome(False, f"the host is not well: {wrong}")
                        outcomes[probe.name] = outcome
                        seconds = time.monotonic() - begin
                        say(f"{_word(outcome):6} {seconds:5.1f} s  {probe.name}  {outcome.why}")
                        if probe.ruins or not outcome.held:
                            break
                        await sandbox.run(CLEAN, session=False)
    return outcomes


def surprise(backend: str, probe: str, outcome: Outcome) -> str:
    """How an outcome differs from what is known; "" when it does not."""
    if outcome.held is None:
        return f"the probe is broken: {outcome.why}"
    if probe not in KNOWN_OPEN[backend]:
        return outcome.why
    stale = outcome.held and probe not in HOST_DECIDES
    return f"it held: take it out of KNOWN_OPEN[{backend!r}]" if stale else ""


@asynccontextmanager
async def _sandbox(opener: Opener, image: str) -> AsyncGenerator[Sandbox]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(opener(image, LIMITS))


def _word(outcome: Outcome) -> str:
    return {True: "held", False: "OPEN", None: "BROKEN"}[outcome.held]


class Host:
    """Things on this machine for the probes to find, and what must not change on it."""

    def __enter__(self) -> Host:
        mark = f"swe-env-probe-{secrets.token_hex(8)}"
        self._secret = secrets.token_hex(16)
        os.environ["SWE_ENV_PROBE_SECRET"] = self._secret
        self._file = Path.home() / f".{mark}"
        self._file.touch()
        self._abstract = socket.socket(socket.AF_UNIX)
        self._abstract.bind(f"\0{mark}")
        self._abstract.listen()
        self._listener = socket.create_server(("0.0.0.0", 0))
        self._mark = mark
        self._disks = [os.statvfs(path) for path in _mounts()]
        self._was = _state()
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ["SWE_ENV_PROBE_SECRET"]
        self._file.unlink()
        self._abstract.close()
        self._listener.close()

    def environment(self, neighbour: Sandbox) -> Mapping[str, str]:
        """What a probe needs to know in order to look for it."""
        return {
            "HOST_FILE": str(self._file),
            "HOST_SOCKET": self._mark,
            "HOST_PORT": str(self._listener.getsockname()[1]),
            "HOST_ADDRESS": _address(),
            "HOST_NAME": socket.gethostname(),
            "HOST_SECRET_REVERSED": self._secret[::-1],
            "NEIGHBOUR_REVERSED": neighbour.id[::-1],
            "MEMORY": str(LIMITS.memory),
            "FILE_SIZE": str(LIMITS.file_size),
            "HOST_DISKS": " ".join(str(disk.f_blocks * disk.f_frsize) for disk in self._disks),
            "HOST_INODES": " ".join(str(disk.f_files) for disk in self._disks),
        }

    def is_unwell(self) -> str:
        """What an attack has changed here; "" for nothing."""
        for name, value in _state().items():
            if value != self._was[name]:
                return f"{name} was {self._was[name]!r} and is {value!r}"
        memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(memory[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
        return "memory is nearly used up" if free < total / 20 else ""


def _state() -> dict[str, str]:
    names = ("core_pattern", "hostname", "modprobe", "sysrq", "panic")
    paths = [Path("/proc/swaps"), *(Path("/proc/sys/kernel", name) for name in names)]
    return {str(path): path.read_text() for path in paths if path.exists()}


def _address() -> str:
    """An address of this machine that is not loopback, or one that leads nowhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "192.0.2.1"
        return str(probe.getsockname()[0])


def _mounts() -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [path for path in (line.split()[1] for line in lines) if os.access(path, os.R_OK)]
