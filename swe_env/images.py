"""The images that tasks need: here already, pulled ahead of need, or built from clones when needed."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import trio

from sandboxes.engine import BASE_IMAGE, ensure_base_image
from sandboxes.oci import OciEngine
from sandboxes.protocol import Engine, EngineUnavailable, ImageUnavailable, SandboxError, Say
from sandboxes.registry import PulledImages
from swe_env.request import RunRequest
from swe_env.workspace import Workspaces
from tasks.model import ImageRef, InlineRepo, Task
from tasks.swebench_image import NO_ENGINE, REFUSED, BuildRequest, require_buildable

BUILDS = 2
"""Builds at once: one compiles while the other downloads."""
PROBES = 3
"""Images asked of a registry before it is held to be unreachable."""
STOP_SECONDS = 4.0
"""For a build that is interrupted to remove its files and its container."""


@asynccontextmanager
async def workspaces_for(
    tasks: Sequence[Task], request: RunRequest, engine: Engine, say: Say
) -> AsyncGenerator[Workspaces]:
    """Workspaces of these tasks. Their images are pulled in this order while the block runs, or are built
    when they are needed; one that cannot be had is an infrastructure failure of its own episodes.

    Raises `ImageUnavailable`, before the block begins, where nothing could come of it: a row or a clone
    that a build needs is missing, or no image is here and a registry gives none. Raises `EngineUnavailable`.
    """
    needs_base = request.repo_mirror is not None or any(isinstance(one.image, InlineRepo) for one in tasks)
    if needs_base and not await _is_here(engine, BASE_IMAGE):
        await trio.to_thread.run_sync(ensure_base_image, say)
    wanted = {task.image.name: task for task in tasks if isinstance(task.image, ImageRef)}
    absent = [name for name in wanted if not await _is_here(engine, name)]
    if request.repo_mirror is not None:
        rows = {name: task.metadata["row"] for name, task in wanted.items() if "row" in task.metadata}
        for name in absent:
            if name not in rows:
                raise ImageUnavailable(
                    f"{name} is not here, and {wanted[name].id} has no row to build it from"
                )
            require_buildable(rows[name], request.repo_mirror)
        rows = {name: row for name, row in rows.items() if row.get("build_python")}
        built = BuiltImages(rows, request.repo_mirror, request.python, say)
        yield Workspaces(engine, BASE_IMAGE, built, setup_once=request.setup_once)
        return
    if not absent and isinstance(engine, OciEngine):  # nothing to ask a Docker engine for
        yield Workspaces(engine, BASE_IMAGE, setup_once=request.setup_once)
        return
    await _probe(absent, request.mirror, everything=len(absent) == len(wanted), say=say)
    images = PulledImages(say, mirror=request.mirror)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(images.prefetch, absent, request.concurrency)
        yield Workspaces(engine, BASE_IMAGE, images, setup_once=request.setup_once)
        nursery.cancel_scope.cancel()


class BuiltImages:
    """Images built here, each when it is first needed. One that cannot be built is not tried again."""

    def __init__(
        self, rows: Mapping[str, dict[str, Any]], clones: Path, python: Path | None, say: Say
    ) -> None:
        """`rows`: what to build each image from, by its name; any other image is taken to be here."""
        self._rows, self._clones, self._python, self._say = rows, clones, python, say
        self._slots = trio.CapacityLimiter(BUILDS)
        self._locks: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)
        self._done: dict[str, SandboxError | None] = {}

    @asynccontextmanager
    async def holding(self, name: str) -> AsyncGenerator[None]:
        """The image is here while the block runs. Raises `ImageUnavailable` and `EngineUnavailable`."""
        async with self._locks[name]:
            if name in self._rows and name not in self._done:
                async with self._slots:
                    self._done[name] = await self._build(self._rows[name])
        if (error := self._done.get(name)) is not None:
            raise type(error)(str(error))
        yield

    async def _build(self, row: dict[str, Any]) -> SandboxError | None:
        """Build in a process that a cancelled run can stop. Returns what came in the way, if anything."""
        request = BuildRequest(row=row, repo_mirror=self._clones, base_image=BASE_IMAGE, python=self._python)
        argv = [sys.executable, "-m", "tasks.swebench_image"]
        errors = b""

        async def collect(stream: trio.abc.ReceiveStream) -> None:
            nonlocal errors
            async for chunk in stream:
                errors = (errors + chunk)[-4096:]

        async with _process(argv, request.model_dump_json().encode()) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(collect, process.stderr)
                rest = b""
                async for chunk in process.stdout:
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        self._say(line.decode(errors="replace"))
            code = await process.wait()
        reason = errors.decode(errors="replace").strip()
        if code in (0, REFUSED):
            return ImageUnavailable(reason) if code else None
        if code == NO_ENGINE:
            return EngineUnavailable(reason)
        last = reason.rpartition("\n")[2] or f"exit code {code}"
        return ImageUnavailable(f"cannot build {row['image']}: the build process died: {last}")


@asynccontextmanager
async def _process(argv: list[str], stdin: bytes) -> AsyncGenerator[trio.Process]:
    """A process that is asked to stop, and then made to, when the block is left."""
    process = await trio.lowlevel.open_process(
        argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        assert process.stdin is not None
        await process.stdin.send_all(stdin)
        await process.stdin.aclose()
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with trio.move_on_after(STOP_SECONDS, shield=True):
                await process.wait()
            process.kill()


async def _is_here(engine: Engine, name: str) -> bool:
    try:
        await engine.image_id(name)
    except ImageUnavailable:
        return False
    return True


async def _probe(absent: Sequence[str], mirror: str | None, *, everything: bool, say: Say) -> None:
    """Have one image pulled, to be sure that the registry answers, before hundreds of episodes ask it.

    Raises the first refusal, if a few images in a row are refused and no image is here (`everything` is
    absent).
    """
    images = PulledImages(say, mirror=mirror, tries=3, pause=1.0)
    refusal: ImageUnavailable | None = None
    for name in absent[:PROBES]:
        try:
            await images.ensure(name)
            return
        except ImageUnavailable as error:
            refusal = refusal or error
    if refusal is not None and everything:
        raise refusal
    if refusal is not None:
        say(f"{refusal}: its episodes will have no verdict")
