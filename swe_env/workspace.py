"""From a task to a sandbox in which its repository is ready: the same start for agent and grader.

An image's repository is sealed once (history cleaned, start recorded) and kept as an image of ours, so
that an episode pays for a container start and nothing else. An inline repository is sealed once, too, and an
archive of it unpacked for each episode; one with a setup script is set up each time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import trio

from sandboxes.protocol import ChangesUnreadable, Engine, ImageUnavailable, Layered, Limits, Sandbox, Warming
from sandboxes.repository import (
    RECIPE,
    Baseline,
    Patch,
    PatchError,
    RepositoryError,
    capture,
    freeze,
    lay_out,
    seal,
    thaw,
)
from tasks.model import ImageRef, InlineRepo, TaskView

ENVIRONMENT = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "TQDM_DISABLE": "1",
    # there is no network: fail at once instead of after five retries
    "PIP_RETRIES": "0",
    "PIP_DEFAULT_TIMEOUT": "5",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
"""Environment of every sandbox, on top of the image's."""

SEALED = "swe-env/sealed"
"""Repository of the images that are made here for sandboxes to start from."""
FROZEN = 64
"""Most inline repositories kept in memory, those used last."""
_BASELINE_LABEL = "swe-env.baseline"
_SEALING = Limits(memory=8 << 30, cpus=2.0, pids=1024)


@dataclass(frozen=True)
class Workspace:
    """A sandbox, and the start that its repository is compared with."""

    sandbox: Sandbox
    baseline: Baseline
    image_id: str
    """Content digest of the image that the repository came from (or was laid out in)."""
    started_sealed: bool = True
    """The recorded start is in the sandbox's image, and not only in the sandbox."""

    async def capture(self) -> Patch:
        """What was changed since the start; ends every process. Raises `PatchError` and `SandboxLost`.

        Where the backend sees the changes, they are read in a fresh sandbox, by programs that the agent never
        had in its hands.
        """
        await self.sandbox.kill_all()
        if self.started_sealed and isinstance(self.sandbox, Layered):
            try:
                async with self.sandbox.with_changes_below(self.baseline.workdir) as fresh:
                    return await capture(fresh, self.baseline)
            except ChangesUnreadable as error:
                raise PatchError(f"the working tree cannot be read: {error}") from error
        return await capture(self.sandbox, self.baseline)


@dataclass(frozen=True)
class _Start:
    """Of an inline repository."""

    baseline: Baseline
    archive: bytes


class Images(Protocol):
    """Where images come from that may not be here yet."""

    def holding(self, name: str) -> AbstractAsyncContextManager[None]:
        """The image is here while the block runs. Raises `ImageUnavailable` and `EngineUnavailable`."""
        ...


class Workspaces:
    """Opens workspaces on one engine."""

    def __init__(
        self, engine: Engine, base_image: str, images: Images | None = None, *, setup_once: bool = False
    ) -> None:
        """`base_image`: what inline repositories are laid out in. `images`: sees to it that a task's image
        is here; None if all are. `setup_once`: an inline repository is laid out, set up and sealed once, and
        its sandboxes start from there; else each does it again."""
        self._engine = engine
        self._base_image = base_image
        self._images = images
        self._setup_once = setup_once
        self._sealing: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)
        self._frozen: OrderedDict[str, _Start] = OrderedDict()

    @asynccontextmanager
    async def open(self, view: TaskView, *, again: bool = False) -> AsyncGenerator[Workspace]:
        """A fresh sandbox with the task's repository; `again` says that another one will be wanted.

        Raises `ImageUnavailable`, `SandboxLost`, `EngineUnavailable` and :class:`RepositoryError`: all
        infrastructure's.
        """
        match view.image:
            case ImageRef(name=name):
                async with self._images.holding(name) if self._images else nullcontext():
                    origin, image, baseline = await self._sealed_image(name, view)
                    async with self._sandbox(image, view, view.limits, again) as sandbox:
                        yield Workspace(sandbox, baseline, origin)
            case InlineRepo() if self._setup_once:
                origin, image, baseline = await self._sealed_image(self._base_image, view)
                async with self._sandbox(image, view, view.limits, again) as sandbox:
                    yield Workspace(sandbox, baseline, origin)
            case InlineRepo():
                async with self._sandbox(self._base_image, view, view.limits, again) as sandbox:
                    baseline = await self._lay_out(sandbox, view)
                    yield Workspace(sandbox, baseline, sandbox.image_id, started_sealed=False)

    async def _lay_out(self, sandbox: Sandbox, view: TaskView) -> Baseline:
        """As :func:`_prepare`, once for all sandboxes of a task that has no setup script."""
        if view.setup:
            return await _prepare(sandbox, view)
        key = _digest(sandbox.image_id, view.image.model_dump_json(), view.workdir, view.base_commit or "")
        async with self._sealing[key]:  # several episodes of one task start together
            if (start := self._frozen.get(key)) is None:
                baseline = await _prepare(sandbox, view)
                if frozen := await freeze(sandbox, baseline):
                    self._frozen[key] = _Start(baseline, frozen)
                    if len(self._frozen) > FROZEN:
                        self._sealing.pop(self._frozen.popitem(last=False)[0], None)
                return baseline
            self._frozen.move_to_end(key)
        await thaw(sandbox, start.archive)
        return start.baseline

    async def _sealed_image(self, name: str, view: TaskView) -> tuple[str, str, Baseline]:
        origin = await self._engine.image_id(name)
        files = view.image.model_dump_json()
        recipe = _digest(origin, files, view.workdir, view.base_commit or "", view.setup, str(RECIPE))
        tag = f"{SEALED}:{recipe}"
        async with self._sealing[tag]:  # several episodes of one task start together: seal once
            return origin, tag, await self._seal(tag, name, view)

    async def _seal(self, tag: str, name: str, view: TaskView) -> Baseline:
        try:
            labels = await self._engine.image_labels(tag)
            return Baseline(workdir=view.workdir, tree=labels[_BASELINE_LABEL])
        except (ImageUnavailable, KeyError):
            pass
        async with self._sandbox(name, view, _SEALING) as sandbox:
            baseline = await _prepare(sandbox, view)
            await self._engine.commit(sandbox, tag=tag, labels={_BASELINE_LABEL: baseline.tree})
        return baseline

    @asynccontextmanager
    async def _sandbox(
        self, image: str, view: TaskView, limits: Limits, again: bool = False
    ) -> AsyncGenerator[Sandbox]:
        async with self._engine.sandbox(
            image, workdir=view.workdir, limits=limits, env=ENVIRONMENT
        ) as sandbox:
            if again and isinstance(self._engine, Warming):
                self._engine.prepare(image, workdir=view.workdir, limits=limits, env=ENVIRONMENT)
            yield sandbox


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


async def _prepare(sandbox: Sandbox, view: TaskView) -> Baseline:
    """Lay the repository out where it is not in the image, set it up, and record its start."""
    if isinstance(view.image, InlineRepo):
        await lay_out(sandbox, view.workdir, view.image.files)
    if view.setup:
        await _set_up(sandbox, view)
    return await seal(sandbox, view.workdir, view.base_commit)


async def _set_up(sandbox: Sandbox, view: TaskView) -> None:
    result = await sandbox.run(view.setup, timeout=900, session=False)
    if result.exit_code != 0:
        raise RepositoryError(
            f"the setup script of {view.id} exited with {result.exit_code}: {result.text.strip()[-200:]}"
        )
