"""The images that tasks need: built from clones, pulled ahead of need, or here already."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from sandboxes.docker import DockerEngine
from sandboxes.engine import BASE_IMAGE, ensure_base_image
from sandboxes.protocol import ImageUnavailable, Say
from sandboxes.registry import PulledImages
from swe_env.request import RunRequest
from swe_env.workspace import Workspaces
from tasks.model import ImageRef, InlineRepo, Task
from tasks.swebench_image import build_image


@asynccontextmanager
async def workspaces_for(
    tasks: Sequence[Task], request: RunRequest, engine: DockerEngine, say: Say
) -> AsyncGenerator[Workspaces]:
    """Workspaces of these tasks, whose images are pulled in this order while the block runs.

    Images that are to be built are built first. Where any is to be pulled, the first is, before the block
    begins, to be sure that the registry answers. Raises `ImageUnavailable` and `EngineUnavailable`.
    """
    if request.repo_mirror is not None or any(isinstance(task.image, InlineRepo) for task in tasks):
        await trio.to_thread.run_sync(ensure_base_image, say)
    absent: list[str] = []
    for task in {task.id: task for task in tasks}.values():
        if not isinstance(task.image, ImageRef):
            continue
        if request.repo_mirror is not None and "row" in task.metadata:
            row, clones = task.metadata["row"], request.repo_mirror
            await trio.to_thread.run_sync(
                partial(build_image, row, clones, BASE_IMAGE, say, python=request.python)
            )
        try:
            await engine.image_id(task.image.name)
        except ImageUnavailable:
            if not absent:
                await PulledImages(say, mirror=request.mirror, tries=3, pause=1.0).ensure(task.image.name)
            absent.append(task.image.name)
    images = PulledImages(say, mirror=request.mirror)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(images.prefetch, absent[1:], request.concurrency)
        yield Workspaces(engine, BASE_IMAGE, images if request.repo_mirror is None else None)
        nursery.cancel_scope.cancel()
