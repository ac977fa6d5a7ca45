"""The backends that the bank is run against, and what each is known to let through."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from sandboxes.docker import DockerEngine
from sandboxes.oci import OciEngine
from sandboxes.protocol import Limits, Sandbox

WORKDIR = "/work"

Opener = Callable[[str, Limits], AbstractAsyncContextManager[Sandbox]]
"""`opener(image, limits)`: a sandbox for as long as the block lasts."""
Backend = Callable[[], AbstractAsyncContextManager[Opener]]


@asynccontextmanager
async def docker() -> AsyncGenerator[Opener]:
    async with DockerEngine.connect(run_id="test-attacks") as engine:
        yield lambda image, limits: engine.sandbox(image, workdir=WORKDIR, limits=limits)


@asynccontextmanager
async def oci() -> AsyncGenerator[Opener]:
    async with OciEngine.connect() as engine:
        yield lambda image, limits: engine.sandbox(image, workdir=WORKDIR, limits=limits)


BACKENDS: dict[str, Backend] = {"docker": docker, "oci": oci}
"""A backend is added here, with a line in KNOWN_OPEN."""

KNOWN_OPEN: dict[str, dict[str, str]] = {
    "docker": {
        "fill the disk": "on ext4 the engine caps no layer: give its data a disk of its own",
        "fill /tmp": "the same: /tmp is part of the layer",
        "use up the disk's files (inodes)": "the same",
        "use up the buffers of everybody's pipes": "all sandboxes are uid 0 of one user namespace, which is "
        "counted: pipes become smaller. `fs.pipe-user-pages-soft = 0` on the host lifts the count",
        "use up everybody's file watches (inotify)": "the same uid: raise `fs.inotify.max_user_instances` "
        "on the host",
        "use up everybody's message queues": "the same uid, and the engine may not raise RLIMIT_MSGQUEUE",
        "use up everybody's timers and queued signals": "the same uid; the limit bounds what they take",
    },
    "oci": {},
}
"""Attacks that succeed, and why that cannot be helped there. The bank fails if one of them does not."""

HOST_DECIDES = {"use up the buffers of everybody's pipes", "use up everybody's file watches (inotify)"}
"""Of those, the ones that a host may be set up against: there they may hold."""
