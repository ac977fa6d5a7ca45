"""Sandboxes without a daemon: overlay mounts on an image's layers, and crun or runc.

A sandbox is a directory under `RUN/NUMBER` and one process: `launch.c` mounts the layers in a namespace of
its own and becomes `crun run`, whose stdin and stdout are the supervisor's (:mod:`sandboxes.streams`). When
that process ends, however it ends, the mounts are gone; when this one ends, the supervisor sees its stdin
close and takes every process in the sandbox with it. Every sandbox alive has a range of user ids of its own.

Who owns what: an engine holds a lock on its `RUN/NUMBER.lock` as long as it lives. A number whose lock can be
taken has no owner, and what is left under it is removed.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import trio

from sandboxes.binaries import binary
from sandboxes.isolation import rlimits
from sandboxes.oci_images import ImageStore, OciImage, connect_docker, make_private, writing
from sandboxes.oci_machine import STATE, lacking, runtime
from sandboxes.oci_place import RUN, Place, end_starting, remove_cgroups
from sandboxes.oci_spec import HOSTS, spec
from sandboxes.protocol import (
    ChangesUnreadable,
    EngineUnavailable,
    Limits,
    Sandbox,
    SandboxError,
    SandboxLost,
)
from sandboxes.reaper import remove_orphans
from sandboxes.wire import ByteStream, Session

FIRST_ID, IDS, SANDBOXES, ENGINES = 1 << 28, 1 << 16, 1024, 56
"""User ids of this machine that sandboxes get: `IDS` each, for `SANDBOXES` alive in each of `ENGINES`."""
MACHINE_TROUBLE = tuple(
    f": {os.strerror(number)}"
    for number in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ENOMEM,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
    )
)
TOO_DEEP = f": {os.strerror(errno.ENAMETOOLONG)}"
INODE_BYTES = 1024
"""Kernel memory of an empty file."""


class OciSandbox(Session):
    """A sandbox whose changes lie in a directory that this process can read."""

    def __init__(
        self,
        stream: ByteStream,
        engine: OciEngine,
        image: OciImage,
        place: Place,
        workdir: str,
        limits: Limits,
        env: Mapping[str, str] | None,
    ) -> None:
        super().__init__(stream, id=place.name, image_id=image.id, workdir=workdir, why=place.why)
        self._engine, self._image, self._place, self._limits, self._env = engine, image, place, limits, env

    def pids(self) -> list[int]:
        """Its processes, as this machine numbers them; the runtime's first."""
        return self._place.pids()

    async def snapshot(self, *, tag: str | None = None, labels: Mapping[str, str] | None = None) -> str:
        """The files as they are now, as an image: its name, to start any number of sandboxes from.

        Processes are paused meanwhile, and are not part of it. Without `tag` it has a name that only this
        engine knows, and goes with it. Takes milliseconds for some dozens of changed files.
        """
        return await self._engine.keep(self._image, self._place, tag, labels or {}, "/")

    @asynccontextmanager
    async def with_changes_below(self, directory: str) -> AsyncGenerator[OciSandbox]:
        """As in :class:`sandboxes.protocol.Layered`."""
        image = await self._engine.keep(self._image, self._place, None, {}, directory)
        async with self._engine.sandbox(image, workdir=self.workdir, limits=self._limits) as fresh:
            yield fresh
        await self._engine.forget(image)

    @asynccontextmanager
    async def fork(self) -> AsyncGenerator[OciSandbox]:
        """A sandbox with these files and this session's directory and environment; processes stay here."""
        state = await self.state()
        image = await self.snapshot()
        async with self._engine.sandbox(
            image, workdir=self.workdir, limits=self._limits, env=self._env
        ) as child:
            if state is not None:
                await child.go_on(state)
            yield child
        await self._engine.forget(image)


class OciEngine:
    """Starts sandboxes: a :class:`sandboxes.protocol.Engine`. From :meth:`connect`."""

    def __init__(self, number: int, runtime: str, state: Path) -> None:
        self._number, self._runtime, self._store = number, runtime, ImageStore(state)
        self._home, self._snapshots = RUN / str(number), state / "snapshots" / str(number)
        self._snapshot_names = itertools.count()
        self._free_ids = list(range(SANDBOXES))
        self._images: dict[str, OciImage] = {}
        self._finding = trio.Lock()

    @classmethod
    @asynccontextmanager
    async def connect(cls, *, state: Path = STATE) -> AsyncGenerator[OciEngine]:
        """An engine for the sandboxes of one run; clears what dead engines left first, its own at the end.

        Raises :class:`EngineUnavailable` with what this machine lacks.
        """
        if reason := await trio.to_thread.run_sync(lacking, state):
            raise EngineUnavailable(f"the oci backend cannot run here: {reason}")
        with _number(state) as number:
            engine = cls(number, runtime() or "", state)
            if client := await trio.to_thread.run_sync(connect_docker):
                await remove_orphans(client)  # what pins images for engines that were killed
                client.close()
            try:
                yield engine
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(engine.clear)

    @property
    def number(self) -> int:
        """Which of the engines of this machine it is: its sandboxes lie in `RUN/NUMBER`."""
        return self._number

    def clear(self) -> None:
        """Remove what is left of this engine's sandboxes, and the snapshots that have no name."""
        self._store.unpin()
        _clear(self._home, self._snapshots)

    @asynccontextmanager
    async def sandbox(
        self, image: str, *, workdir: str, limits: Limits, env: Mapping[str, str] | None = None
    ) -> AsyncGenerator[OciSandbox]:
        """As in :class:`sandboxes.protocol.Engine`."""
        found = await self._find(image)
        if not self._free_ids:
            raise SandboxLost(f"{SANDBOXES} sandboxes are alive: lower the concurrency")
        ids = self._free_ids.pop()
        first_id = FIRST_ID + IDS * (self._number * SANDBOXES + ids)
        place = Place(self._home, f"swe-env-{secrets.token_hex(6)}", first_id)
        try:
            stream = await self._start(place, found, workdir, limits, dict(env or {}))
            sandbox = OciSandbox(stream, self, found, place, workdir, limits, env)
            await sandbox.kill_all()  # its first answer: it runs
            yield sandbox
        finally:
            with trio.CancelScope(shield=True):
                await place.end()
            self._free_ids.append(ids)

    async def commit(self, sandbox: Sandbox, *, tag: str, labels: Mapping[str, str]) -> str:
        """As in :class:`sandboxes.protocol.Engine`."""
        assert isinstance(sandbox, OciSandbox)
        await sandbox.snapshot(tag=tag, labels=labels)
        return await self.image_id(tag)

    async def image_id(self, name: str) -> str:
        """Content digest that an image has now: it may have been built again. Raises `ImageUnavailable`."""
        if not (self._snapshots / name).is_dir():
            self._images.pop(name, None)
        return (await self._find(name)).id

    async def image_labels(self, name: str) -> dict[str, str]:
        """Labels of an image that is here. Raises :class:`ImageUnavailable`."""
        return (await self._find(name)).labels

    async def keep(
        self, image: OciImage, place: Place, tag: str | None, labels: Mapping[str, str], below: str
    ) -> str:
        """Make an image of a sandbox's changes below a directory. For :class:`OciSandbox`."""
        name = tag or f"snapshot-{next(self._snapshot_names)}"

        def work() -> OciImage:
            layer = self._snapshots / (f"{name}.draft" if tag is None else secrets.token_hex(8))
            try:
                with place.frozen(), writing(layer):
                    layer.mkdir(parents=True)
                    _copy_changes(place.upper, layer, below, place.first_id)
            except SandboxError:
                shutil.rmtree(layer, ignore_errors=True)
                raise
            if tag is not None:
                return self._store.add(tag, image, layer, labels)
            kept = layer.rename(self._snapshots / name)
            return image.model_copy(update={"id": f"{image.id}+{name}", "layers": [str(kept), *image.layers]})

        self._images[name] = await trio.to_thread.run_sync(work)
        return name

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot that has no name. What others start from stays, and goes with the engine."""
        layer = self._images.pop(snapshot).layers[0]
        if not any(layer in image.layers for image in self._images.values()):
            await trio.to_thread.run_sync(partial(shutil.rmtree, layer, ignore_errors=True))

    async def _find(self, name: str) -> OciImage:
        async with self._finding:  # one at a time, lest two pin one image
            if name not in self._images:
                self._images[name] = await trio.to_thread.run_sync(self._store.find, name)
            return self._images[name]

    async def _start(
        self, place: Place, image: OciImage, workdir: str, limits: Limits, env: dict[str, str]
    ) -> ByteStream:
        config = spec(
            image.env,
            env,
            workdir,
            limits,
            place.first_id,
            cgroup=place.cgroup,
            supervisor=binary("supervisor"),
            place=place.home,
            hosts=self._home / "hosts",
        )
        try:
            place.home.mkdir(parents=True, mode=0o711)
            (place.home / "lowers").write_text("".join(f"{layer}\n" for layer in image.layers))
            (place.home / "config.json").write_text(json.dumps(config))
        except OSError as error:
            raise SandboxLost(
                f"cannot start a sandbox in {place.home}: {error.strerror}: make room there"
            ) from None
        # What is written stays when its process is killed: it must not fill the memory limit.
        disk, inodes = min(limits.disk, limits.memory * 3 // 8), limits.memory // 8 // INODE_BYTES
        bounds = ",".join(f"{name}={value}" for name, value in rlimits(limits).items())
        launch = [str(binary("launch")), str(place.first_id), str(disk), str(inodes), bounds]
        run = [self._runtime, "--root", str(self._home / "runtime"), "run", "--bundle", str(place.home)]
        return await place.start([*launch, *run, place.name])


@contextmanager
def _number(state: Path) -> Generator[int]:
    """A number that no living engine has, and its directory; those of dead ones are cleared on the way."""
    with ExitStack() as stack:
        try:
            number = _take_number(state, stack)
        except OSError as error:
            where, cure = error.filename or RUN, "make room there, or use --sandbox docker"
            raise EngineUnavailable(f"cannot write {where} ({error.strerror}): {cure}") from error
        yield number


def _take_number(state: Path, stack: ExitStack) -> int:
    """Lock a number until the stack is left."""
    snapshots = state / "snapshots"
    for folder in (state / "images", state / "layers", snapshots):
        make_private(folder)
    RUN.mkdir(mode=0o711, exist_ok=True)
    if RUN.stat().st_uid != os.geteuid():
        raise EngineUnavailable(f"{RUN} belongs to another user: remove it")
    ours: int | None = None
    for number in range(ENGINES):
        if ours is not None and not ((RUN / f"{number}.lock").exists() or (snapshots / str(number)).exists()):
            break
        file = os.open(RUN / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        if _clear(RUN / str(number), snapshots / str(number)) and ours is None:
            ours = number
            stack.callback(os.close, file)
        else:
            os.close(file)
    if ours is None:
        raise EngineUnavailable(f"{ENGINES} processes run sandboxes already: wait for one to end")
    (RUN / str(ours)).mkdir(mode=0o711)
    (RUN / str(ours) / "hosts").write_text(HOSTS)
    return ours


def _clear(home: Path, snapshots: Path) -> bool:
    """Remove everything that an engine left. False if processes of it are still alive."""
    if home.exists():
        end_starting(home)
        if not remove_cgroups(f"/swe-env/{home.name}"):
            return False
        shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(snapshots, ignore_errors=True)
    return True


def _copy_changes(upper: Path, to: Path, below: str, first_id: int) -> None:
    """Copy what an overlay's upper directory has below a directory: whiteouts and attributes, too.

    Ids become what they are in an image. Raises :class:`ChangesUnreadable`, and :class:`SandboxLost` where
    this machine is to blame.
    """
    to.chmod(0o755)
    at = PurePosixPath(below).relative_to("/")
    for folder in [*reversed(at.parents), at]:
        source = upper / folder
        if source.is_symlink() or not source.is_dir():
            break
        if folder != at:
            (to / folder).mkdir(exist_ok=True)
    else:
        source = upper / at
    if not os.path.lexists(source):
        _require(upper)
        return
    target = to / source.relative_to(upper)
    copy = ["cp", "-a", "--reflink=auto", "-T", str(source), str(target)]
    done = subprocess.run(copy, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        _require(upper)
        # each line ends with the system's words; names, which are the agent's, are quoted before them
        lines = done.stderr.decode(errors="replace").splitlines() or [f"cp ended with {done.returncode}"]
        if any(line.endswith(MACHINE_TROUBLE) for line in lines) or done.returncode < 0:
            raise SandboxLost(f"cannot copy a sandbox's files to {to}: {lines[-1][-200:]}: make room there")
        in_patch = below != "/"  # git leaves out what is too deep as well
        if not (in_patch and all(line.endswith(TOO_DEEP) for line in lines)):
            raise ChangesUnreadable(lines[-1][-200:])
    _shift(to, first_id)
    for folder, folders, files in os.walk(to):
        for name in (*folders, *files):
            _shift(Path(folder) / name, first_id)


def _require(upper: Path) -> None:
    """Raises :class:`SandboxLost` where a sandbox's files went with its process."""
    if not upper.is_dir():
        raise SandboxLost("the files of the sandbox are gone: its runtime ended")


def _shift(path: Path, first_id: int) -> None:
    status = path.lstat()
    if status.st_uid >= first_id:
        os.lchown(path, status.st_uid - first_id, status.st_gid - first_id)
        if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_ISUID | stat.S_ISGID):
            path.chmod(stat.S_IMODE(status.st_mode))  # which chown takes away
