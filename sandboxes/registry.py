"""Images from a registry, for evaluations whose images are more than a disk holds.

:class:`PulledImages` pulls what a task needs, again where a registry was merely busy, and makes room by
removing what it pulled itself, the longest unused first. What it pulled, and which images are pinned, stands
in a small file that the processes of one user share. It speaks to the engine over HTTP and not through the
SDK, whose pull has no deadline and cannot be cancelled; the engine ends a pull when its connection closes.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
import trio
from docker import auth
from docker.errors import DockerException, InvalidRepository
from docker.utils import parse_repository_tag
from pydantic import BaseModel, ConfigDict, ValidationError

from sandboxes.protocol import NO_DOCKER, EngineUnavailable, ImageUnavailable, SandboxError, Say
from sandboxes.reaper import RUN_LABEL

STATE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swe-env/images.json"
KEEP_FREE = 10 << 30
"""Bytes to be free on the engine's disk before a pull: more than the images that may come at once need."""
ENGINE_SECONDS = 60.0
REMOVAL_SECONDS = 300.0
"""Longest silence of the engine in a short request, and while it removes an image [s]."""
LOCK_SECONDS = 10.0
"""Longest wait for another process to write the state, which takes milliseconds [s]."""
LONGEST_PAUSE = 60.0
"""Longest pause between two tries [s]."""
PULLS = 2
"""Pulls at once. The engine fetches three layers at a time: a pull behind many others would look silent."""

LASTING = re.compile(
    r"not found|(manifest|blob|name) unknown|unauthori[sz]ed|denied|authentication required|no basic auth"
    r"|no matching manifest|invalid reference|no space left|x509|HTTP (status: )?40[0134]\b",
    re.IGNORECASE,
)
"""Refusals that the next try would meet again; anything else is a network's or a registry's bad moment."""
REFERENCE = re.compile(r"[a-z0-9]+([._:/-]+[a-z0-9]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)


class PulledImages:
    """The images of the engine at `DOCKER_HOST` (a unix or plain tcp address). Holds nothing open."""

    def __init__(
        self,
        say: Say,
        *,
        keep_free: int = KEEP_FREE,
        mirror: str | None = None,
        state: Path = STATE,
        tries: int = 6,
        pause: float = 2.0,
        silence: float = 300.0,
    ) -> None:
        """`mirror`: host, port and path prefix of a registry that stands in for Docker Hub.

        A pull is tried `tries` times, with `pause` seconds between the first two and ever longer ones
        after; a try ends after `silence` seconds without progress.
        """
        self._say, self._keep_free, self._mirror, self._state = say, keep_free, mirror, state
        self._tries, self._pause, self._silence = tries, pause, silence
        self._pulling: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)
        self._failed: dict[str, tuple[float, str]] = {}  # when the last pull of an image failed, and why
        self._slots, self._room = trio.Semaphore(PULLS), trio.Lock()
        self._asked: set[str] = set()
        self._ahead: set[str] = set()  # prefetched, and not asked for yet
        self._consumed = trio.Event()  # set, and replaced, when something is asked for

    @asynccontextmanager
    async def holding(self, name: str) -> AsyncGenerator[None]:
        """The image is here, and no process of ours removes it, while the block runs. Raises as `ensure`."""
        async with _locked(self._hold(name), fcntl.LOCK_SH, patience=REMOVAL_SECONDS):
            await self.ensure(name)
            yield

    async def ensure(self, name: str) -> None:
        """Return when the image is in the engine, where nothing but :meth:`holding` keeps it.

        Raises :class:`ImageUnavailable` with what the registry or the disk lacks and the cure, or
        :class:`EngineUnavailable`.
        """
        name = full_name(name)
        self._asked.add(name)
        self._ahead.discard(name)
        self._consumed.set()
        self._consumed = trio.Event()
        await self._ensure(name, prefetching=False)

    def pulled(self) -> dict[str, Pulled]:
        """What was pulled here, by name. The engine may have lost it meanwhile."""
        return self._read().images

    def pinned(self) -> set[str]:
        """Names of the images that are not to be removed."""
        return set(self._read().pinned)

    async def pin(self, name: str, *, pinned: bool = True) -> None:
        """From now on no process of this user removes the image to make room, whoever brought it here.

        A line in the state and not a container that uses the image: it also holds for images that Docker
        does not know, it outlives the engine, and nobody who tidies up containers undoes it unawares. It does
        not bind Docker: `docker rmi` and `docker image prune` still remove the image.
        """
        name = full_name(name)
        async with _locked(self._hold(name), fcntl.LOCK_SH, patience=REMOVAL_SECONDS):  # not while it goes
            await self._change(lambda state: (state.pinned.add if pinned else state.pinned.discard)(name))

    async def remove(self, name: str) -> bool:
        """Remove an image that was pulled here, and what was sealed on it, unless somebody needs either."""
        name = full_name(name)
        return name in (ours := self._read().images) and await self._evict(name, ours[name].id)

    async def prefetch(self, names: Iterable[str], ahead: int) -> None:
        """Pull images in order, up to `ahead` more than have been asked for. Run it beside the episodes.

        Returns when the last one is here, so cancel it if some may never be asked for. An image that
        cannot be had is left to the :meth:`ensure` that asks for it, which says why.
        """
        for name in names if ahead > 0 else ():
            try:
                name = full_name(name)
                while len(self._ahead) >= ahead and name not in self._asked | self._ahead:
                    await self._consumed.wait()
                if name not in self._asked | self._ahead:
                    self._ahead.add(name)
                    await self._ensure(name, prefetching=True)
            except SandboxError:
                continue

    async def _ensure(self, name: str, *, prefetching: bool) -> None:
        asked = trio.current_time()
        async with self._pulling[name]:
            if image := await self._inspect(name):
                if (ours := self._read().images.get(name)) and ours.id == image["Id"]:
                    await self._note(name, image)
                return
            failed, why = self._failed.get(name, (-math.inf, ""))
            if failed > asked:  # while we waited for the lock: the answer is ours, too
                raise ImageUnavailable(why)
            try:
                await self._pull(name, prefetching=prefetching)
            except _Refused as refused:
                why = _explain(name, refused, self._tries)
                self._failed[name] = trio.current_time(), why
                raise ImageUnavailable(why) from refused

    async def _pull(self, name: str, *, prefetching: bool) -> None:
        """Pull until it worked. Raises `_Refused` when it does not, `ImageUnavailable` without room."""
        for attempt in range(self._tries):
            try:
                async with self._slots:
                    await self._make_room(name, prefetching=prefetching)
                    self._say(f"pulling {name}")
                    started = trio.current_time()
                    await self._fetch(name)
                    self._say(f"pulled {name} in {trio.current_time() - started:.0f} s")
                    return
            except _Refused as refused:
                if refused.lasting or attempt + 1 == self._tries:
                    raise
                seconds = min(LONGEST_PAUSE, self._pause * 2**attempt) * random.uniform(0.5, 1)
                self._say(f"pulling {name} again in {seconds:.0f} s: {refused}")
                await trio.sleep(seconds)

    async def _fetch(self, name: str) -> None:
        """One pull, at the end of which the image has its name and is written down as ours."""
        repository, tag, path = _parse(name)
        source = f"{self._mirror}/{path}" if self._mirror and path else repository
        local = _join(source, tag)
        theirs = source != repository and await self._inspect(local) is not None
        await self._create(source, tag)
        with trio.CancelScope(shield=True):  # a few short requests, lest it stays here and is nobody's
            image = await self._inspect(local)
            if image is None:
                raise _Refused("the engine pulled it and does not have it")
            engine, made_for = (await self._call("GET", "/version"))["Arch"], image["Architecture"]
            if made_for == engine and source != repository:
                await self._call("POST", f"/images/{local}/tag", {"repo": repository, "tag": tag})
            if not theirs and (made_for != engine or source != repository):
                await self._remove(local)
            if made_for != engine:
                raise _Refused(f"no matching manifest: it is for {made_for}, the engine is {engine}")
            await self._note(name, image)

    async def _create(self, repository: str, tag: str) -> None:
        """Have the engine pull. Raises `_Refused` with what it or the registry said."""
        headers = await trio.to_thread.run_sync(_credentials, repository, abandon_on_cancel=True)
        params = {"fromImage": repository, "tag": tag}
        limits = httpx.Timeout(ENGINE_SECONDS, read=self._silence)
        try:
            async with (
                _engine() as http,
                http.stream(
                    "POST", "/images/create", params=params, headers=headers, timeout=limits
                ) as answer,
            ):
                if answer.status_code != 200:
                    raise _Refused(_message(await answer.aread()))
                async for line in answer.aiter_lines():
                    event: dict[str, Any] = json.loads(line)
                    if "error" in event:
                        raise _Refused(str(event["error"]))
        except httpx.ConnectError as error:
            raise EngineUnavailable(NO_DOCKER) from error
        except httpx.ReadTimeout as error:
            raise _Refused(f"no progress for {self._silence:g} s") from error
        except httpx.HTTPError as error:
            raise _Refused("the engine broke off") from error

    async def _make_room(self, name: str, *, prefetching: bool) -> None:
        """Remove images of ours until `keep_free` bytes are free. Raises `ImageUnavailable`."""
        async with self._room:  # one at a time, lest two remove where one removal was enough
            root, ours = str((await self._call("GET", "/info"))["DockerRootDir"]), self.pulled()
            for old in sorted(ours, key=lambda old: (old in self._ahead, ours[old].used)):
                if _free(root) >= self._keep_free or (prefetching and old in self._ahead):
                    break
                if await self._evict(old, ours[old].id):
                    self._say(f"removed {old} to make room")
            if _free(root) < self._keep_free:
                raise ImageUnavailable(
                    f"no room to pull {name}: {_free(root) / (1 << 30):.1f} GiB free at {root}, "
                    f"{self._keep_free / (1 << 30):.1f} wanted: "
                    "free some, e.g. `docker system prune`"
                )

    async def _evict(self, name: str, id: str) -> bool:
        """Remove an image that we pulled, and what was sealed on it, unless somebody needs it."""
        try:
            async with _locked(self._hold(name), fcntl.LOCK_EX, patience=0):
                image = await self._inspect(name)
                removed = image is not None and image["Id"] == id
                if image is not None and removed:
                    sealed = await self._sealed_on(image)
                    containers = await self._call("GET", "/containers/json", {"all": "1"})
                    if {container["ImageID"] for container in containers} & {id, *sealed}:
                        return False
                    if self.pinned() & {name, *itertools.chain(*sealed.values())}:
                        return False
                    for member in [*sealed, name]:
                        if not await self._remove(member):
                            return False
                await self._change(lambda state: state.images.pop(name, None))
                return removed
        except _Busy:
            return False

    async def _sealed_on(self, image: dict[str, Any]) -> dict[str, list[str]]:
        """Images that we committed on this one, with their names: while they exist its layers stay."""
        params = {"filters": json.dumps({"label": [RUN_LABEL]})}
        found = [
            await self._inspect(entry["Id"]) for entry in await self._call("GET", "/images/json", params)
        ]
        own = image["RootFS"]["Layers"]
        children = {child["Id"]: child for child in found if child and child["Id"] != image["Id"]}
        layers = {id: child["RootFS"]["Layers"] for id, child in children.items()}
        return {id: children[id]["RepoTags"] or [] for id, its in layers.items() if own in (its, its[:-1])}

    async def _inspect(self, name: str) -> dict[str, Any] | None:
        return await self._call("GET", f"/images/{name}/json")

    async def _remove(self, name: str) -> bool:
        """Whether an image, or one name of it, was removed: the engine keeps one that is in use."""
        return await self._call("DELETE", f"/images/{name}", seconds=REMOVAL_SECONDS) is not None

    async def _call(
        self, method: str, path: str, params: dict[str, str] | None = None, *, seconds: float = ENGINE_SECONDS
    ) -> Any:
        """One short request: what the engine answers; None when there is no such thing, or it is in use."""
        try:
            async with _engine() as http:
                answer = await http.request(method, path, params=params, timeout=seconds)
        except httpx.HTTPError as error:
            raise EngineUnavailable(NO_DOCKER) from error
        if answer.status_code in (404, 409):
            return None
        if answer.status_code >= 300:
            raise SandboxError(f"the Docker engine refused {path}: {_message(answer.content)}: read its log")
        return answer.json() if answer.content else {}

    def _hold(self, name: str) -> Path:
        """The file whose lock those share who need an image; a lock ends with its process."""
        return self._state.with_suffix(".holds") / quote(full_name(name), safe="")

    def _read(self) -> _State:
        try:
            return _State.model_validate_json(self._state.read_bytes())
        except (OSError, ValidationError):
            return _State()  # nothing is known to be ours, so nothing will be removed

    async def _note(self, name: str, image: dict[str, Any]) -> None:
        used = Pulled(id=image["Id"], used=time.time())
        await self._change(lambda state: state.images.update({name: used}))

    async def _change(self, change: Callable[[_State], object]) -> None:
        """Read, change and replace the state, which no other process does meanwhile."""
        async with _locked(self._state.with_suffix(".lock"), fcntl.LOCK_EX, patience=LOCK_SECONDS):
            state = self._read()
            change(state)
            draft = self._state.with_suffix(".new")
            try:
                draft.write_text(state.model_dump_json(indent=1))
                draft.replace(self._state)
            except OSError as error:
                raise SandboxError(
                    f"cannot write {self._state}: {error.strerror}: free some space"
                ) from error


class Pulled(BaseModel):
    """What is remembered of an image that was pulled here."""

    model_config = ConfigDict(frozen=True)

    id: str
    """Its content digest: another image that takes the name later is not ours to remove."""
    used: float
    """When it was last asked for [s since 1970]."""


class _State(BaseModel):
    images: dict[str, Pulled] = {}
    pinned: set[str] = set()


class _Refused(Exception):
    """A pull failed. The message is what the engine or the registry said, in one line."""

    def __init__(self, words: str) -> None:
        super().__init__(" ".join(words.split())[:400])
        self.lasting = bool(LASTING.search(words))


class _Busy(SandboxError):
    """Somebody else has the lock."""


@asynccontextmanager
async def _locked(path: Path, how: int, *, patience: float) -> AsyncGenerator[None]:
    """Hold the lock of a file. Raises `_Busy` when it is not to be had for `patience` seconds."""
    try:
        os.makedirs(path.parent, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SandboxError(f"cannot write {path} ({error.strerror}): set XDG_CACHE_HOME") from error
    try:
        deadline = trio.current_time() + patience
        while True:
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if trio.current_time() >= deadline:
                    raise _Busy(f"{path} has been locked for {patience:.0f} s: end its owner") from None
                await trio.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _engine() -> httpx.AsyncClient:
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    socket = address.removeprefix("unix://") if address.startswith("unix://") else None
    return httpx.AsyncClient(
        base_url="http://engine" if socket else address.replace("tcp://", "http://", 1),
        transport=httpx.AsyncHTTPTransport(uds=socket, verify=False, trust_env=False),
        trust_env=False,  # a proxy for the internet has no business between us and the engine
    )


def _free(root: str) -> float:
    """Bytes free on the engine's disk; infinite when that is not one of this machine's."""
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return math.inf


def _parse(name: str) -> tuple[str, str, str]:
    """Repository, tag (or digest), and path on Docker Hub ("" if elsewhere). Raises `ImageUnavailable`."""
    repository, tag = parse_repository_tag(name)
    try:
        if not REFERENCE.fullmatch(name):
            raise InvalidRepository("invalid reference format")
        registry, path = auth.resolve_repository_name(repository)
    except InvalidRepository as error:
        raise ImageUnavailable(f"{name} names no image: {error}: correct the name") from error
    if registry != "docker.io":
        return repository, tag or "latest", ""
    return path, tag or "latest", path if "/" in path else f"library/{path}"


def full_name(name: str) -> str:
    """The one way to write a name. Raises `ImageUnavailable`."""
    return _join(*_parse(name)[:2])


def _join(repository: str, tag: str) -> str:
    return f"{repository}{'@' if ':' in tag else ':'}{tag}"


def _credentials(repository: str) -> dict[str, str]:
    """In a thread: what `docker login` left for a registry, as a header; it may ask a helper program."""
    try:
        registry = auth.resolve_repository_name(repository)[0]
        found = cast("dict[str, str] | None", auth.load_config().resolve_authconfig(registry))
    except DockerException:
        return {}  # most images are public, and the registry will say so if this one is not
    return {"X-Registry-Auth": auth.encode_header(found).decode()} if found else {}


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")


def _explain(name: str, refused: _Refused, tries: int) -> str:
    words, build = str(refused), "build it here with `--repo-mirror CLONES`"
    if "no space left" in words:
        return f"the engine's disk filled up while {name} was pulled: free some, e.g. `docker system prune`"
    if "no matching manifest" in words:
        return f"{name} cannot run on this machine: {words}: evaluate on one of that kind, or {build}"
    if refused.lasting:
        return f"cannot pull {name}: {words}: {build}, or `docker login` if it is private"
    return f"cannot pull {name}, tried {tries} times: {words}: `docker login` or try later, or {build}"
