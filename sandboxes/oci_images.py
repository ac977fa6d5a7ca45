"""Images for the daemonless backend: layers on disk, found where Docker keeps them or kept by us.

A file an image in `STATE/images`, so that what Docker once said of an image is known when its engine is
stopped. Layers are used where they lie; where they cannot be reached (Docker's containerd store) the image is
exported once. Images of our own (:meth:`ImageStore.add`) are a layer of ours on the layers of another image.

Every process holds a lock on each image that it found, so that none removes what another needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import struct
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import docker
import requests
from docker.errors import DockerException, ImageNotFound
from pydantic import BaseModel, ConfigDict, ValidationError

from sandboxes.oci_machine import STATE, unusable
from sandboxes.protocol import ImageUnavailable, SandboxError, SandboxLost
from sandboxes.reaper import OWNER_LABEL, RUN_LABEL, owner_label

EXPORT_SECONDS = 600
UNPIN_SECONDS = 2
"""Longest that Docker may be silent while an engine takes leave of it [s]."""


class OciImage(BaseModel):
    """What a sandbox needs of an image."""

    model_config = ConfigDict(frozen=True)

    name: str
    id: str
    """Content digest, or a name of ours."""
    layers: list[str]
    """Directories, the top one first."""
    env: list[str] = []
    """`NAME=value`."""
    labels: dict[str, str] = {}
    ours: bool = False
    """Made here, and not known to Docker."""

    @property
    def complete(self) -> bool:
        return all(Path(layer).is_dir() for layer in self.layers)


class ImageStore:
    """Finds images by name. Synchronous: milliseconds, or seconds where an image must be exported."""

    def __init__(self, state: Path = STATE) -> None:
        self._images, self._layers, self._snapshots = (
            state / name for name in ("images", "layers", "snapshots")
        )
        self._pins: dict[str, str] = {}  # id of an image -> container
        self._lock_file = state / "lock"
        self._locks: int | None = None
        self._held: set[str] = set()

    def find(self, name: str) -> OciImage:
        """An image whose layers are all on disk, and stay there until :meth:`unpin`.

        A name means what Docker says, while it answers: where that is another image than the one that was
        exported, the new one is exported in its place. An exported image that Docker no longer has is still
        the one that was exported. Raises :class:`ImageUnavailable`.
        """
        name = _full(name)
        was_held = name in self._held
        self._held.add(name)
        self._lock(name, fcntl.F_RDLCK, wait=True)
        known = self._read(name)
        if known is not None:
            with suppress(OSError):
                os.utime(self._file(name))  # the time of its last use
        if known is not None and known.ours:
            if known.complete:
                return known
            with suppress(SandboxError):
                self.remove(name)
            known = None
        client = connect_docker()
        if client is None:
            if known is not None and known.complete:
                return known
            raise ImageUnavailable(
                f"no image {name} here, and no Docker engine to ask: start it with `swe-env engine`"
            )
        try:
            return self._from_docker(client, name, known, was_held)
        except (DockerException, requests.RequestException) as error:
            raise ImageUnavailable(f"the Docker engine cannot give image {name}: {error}") from error
        finally:
            client.close()

    def known(self, name: str) -> bool:
        """Whether an image's layers are on disk, without asking Docker."""
        image = self._read(_full(name))
        return image is not None and image.complete

    def add(self, name: str, below: OciImage, layer: Path, labels: Mapping[str, str]) -> OciImage:
        """An image of ours: `layer` on top of `below`. The directory is moved into the store."""
        name = _full(name)
        self._held.add(name)
        self._lock(name, fcntl.F_RDLCK, wait=True)
        kept = self._layers / secrets.token_hex(12)
        with writing(kept):
            make_private(self._layers)
            layer.rename(kept)
        image = OciImage(
            name=name,
            id=f"swe-env:{kept.name}",
            layers=[str(kept), *map(self._lasting, below.layers)],
            env=below.env,
            labels={**below.labels, **labels},
            ours=True,
        )
        self._write(image)
        return image

    def list(self) -> list[OciImage]:
        """Everything that is known here, by name; nothing where this is another user's store."""
        files = sorted(self._images.glob("[!.]*.json")) if os.access(self._images, os.R_OK) else []
        return [image for file in files if (image := self._load(file)) is not None]

    def kept(self, image: OciImage) -> list[Path]:
        """Those of an image's layers that are ours."""
        return [Path(layer) for layer in image.layers if Path(layer).parent == self._layers]

    def exported(self, image: OciImage) -> bool:
        """Whether an image needs nothing of Docker's."""
        return len(self.kept(image)) == len(image.layers)

    def used(self, image: OciImage) -> float:
        """When an image was last found [s since 1970]."""
        return self._file(image.name).stat().st_mtime

    def export(self, name: str) -> OciImage:
        """Copy an image's layers into the store, so that it can be had without Docker ever after.

        A layer that several images share is copied once. See :meth:`find` for what becomes of it when Docker
        has another image of that name. Raises :class:`ImageUnavailable`; `SandboxError` on a full disk.
        """
        image = self.find(name)
        with self._alone():
            return self._keep(image)

    def remove(self, name: str) -> list[str]:
        """Forget an image, and remove those of its layers that are ours and that no other image needs.

        Never touches what is Docker's. Returns the directories removed. Raises `SandboxError` when another
        process holds the image.
        """
        name = _full(name)
        image = self._read(name)
        if image is None:
            return []
        with self._alone(name):
            self._file(name).unlink(missing_ok=True)
            return self._prune(image)

    def in_use(self, name: str) -> bool:
        """Whether another process holds an image."""
        name = _full(name)
        free = self._lock(name, fcntl.F_WRLCK)
        self._lock(name, fcntl.F_RDLCK if name in self._held else fcntl.F_UNLCK)
        return not free

    def unpin(self) -> None:
        """Let others remove again what was found. Never raises: what is left falls to the reaper."""
        self._held.clear()
        if self._locks is not None:
            os.close(self._locks)  # and with it go the locks
            self._locks = None
        client = connect_docker(timeout=UNPIN_SECONDS) if self._pins else None
        if client is not None:
            for pin in self._pins.values():
                try:
                    client.remove_container(pin, force=True)
                except DockerException:  # this one's trouble; the next may go
                    continue
                except requests.RequestException:  # it hangs: a Ctrl-C waits here
                    break
            client.close()
        self._pins.clear()

    def _from_docker(self, client: Any, name: str, known: OciImage | None, was_held: bool) -> OciImage:
        try:
            about = client.inspect_image(name)
        except ImageNotFound:
            if known is not None and known.complete and self.exported(known):
                return known
            raise ImageUnavailable(
                f"no image {name} here: `docker pull {name}`, or build or load it"
            ) from None
        same = known is not None and known.id == about["Id"] and known.complete
        if known is not None and same and self.exported(known):
            return known
        if about["Id"] not in self._pins:
            # a container that never starts: while it exists, Docker does not remove the image's layers
            labels = {RUN_LABEL: "pin", OWNER_LABEL: owner_label()}
            self._pins[about["Id"]] = client.create_container(about["Id"], ["none"], labels=labels)["Id"]
        if known is not None and same:
            return known
        image = OciImage(
            name=name,
            id=about["Id"],
            layers=reachable_layers(about) or [str(self._export(client, about["Id"]))],
            env=about["Config"].get("Env") or [],
            labels=about["Config"].get("Labels") or {},
        )
        if known is None or not self.exported(known):
            self._write(image)
            return image
        with self._alone():
            image = self._keep(image)
        if not was_held:  # else sandboxes of this process may run the old one
            with suppress(SandboxError), self._alone(name):  # or another's
                self._prune(known)
        return image

    def _keep(self, image: OciImage) -> OciImage:
        """The same image on copies of its layers. The store is locked meanwhile."""
        kept = image.model_copy(update={"layers": [str(self._copy(Path(layer))) for layer in image.layers]})
        self._write(kept)
        return kept

    def _lasting(self, layer: str) -> str:
        """A layer that stays: a snapshot without a name goes with its engine."""
        if not Path(layer).is_relative_to(self._snapshots):
            return layer
        return str(self._copy(Path(layer), secrets.token_hex(12)))

    def _copy(self, layer: Path, name: str = "") -> Path:
        """A layer of ours with the same files, whiteouts and attributes. Docker never changes a layer."""
        if layer.parent == self._layers:
            return layer
        copy = self._layers / (name or hashlib.sha256(str(layer).encode()).hexdigest()[:24])
        if copy.is_dir():
            return copy
        draft = self._layers / f".{secrets.token_hex(8)}"
        with writing(draft):
            make_private(self._layers)
        argv = ["cp", "-a", "--reflink=auto", "-T", str(layer), str(draft)]
        try:
            done = subprocess.run(argv, capture_output=True, check=False)
            if done.returncode != 0:
                reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                raise SandboxError(f"cannot copy a layer into {self._layers}: {reason}: make room there")
            draft.rename(copy)
            return copy
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _prune(self, image: OciImage) -> list[str]:
        """Remove the layers of a forgotten image that no other needs. The store is locked meanwhile."""
        needed = {layer for other in self.list() for layer in other.layers}
        removed = [str(layer) for layer in self.kept(image) if str(layer) not in needed]
        for layer in removed:
            shutil.rmtree(layer, ignore_errors=True)
        return removed

    @contextmanager
    def _alone(self, name: str = "") -> Generator[None]:
        """No other process changes layers, nor holds the image `name`. Raises `SandboxError` if one does."""
        if name and not self._lock(name, fcntl.F_WRLCK):
            raise SandboxError(f"{name} is in use: wait for the run that uses it to end")
        try:
            self._lock("", fcntl.F_WRLCK, wait=True)
            yield
        finally:
            self._lock("", fcntl.F_UNLCK)
            if name:
                self._lock(name, fcntl.F_RDLCK if name in self._held else fcntl.F_UNLCK)

    def _lock(self, name: str, kind: int, *, wait: bool = False) -> bool:
        """Lock an image, or the store itself (""), until :meth:`unpin`; False if that is not to be had.

        Each name has its byte of one file, because an evaluation holds more images than a process may open
        files.
        """
        if self._locks is None:
            try:
                self._lock_file.parent.mkdir(parents=True, exist_ok=True)
                self._locks = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise SandboxError(f"cannot write {self._lock_file} ({error.strerror}): use root") from None
        byte = 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") if name else 0
        how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._locks, how, struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _export(self, client: Any, image: str) -> Path:
        """All of an image's files as one layer of ours."""
        layer = self._layers / image.removeprefix("sha256:")[:24]
        if layer.is_dir():
            return layer
        draft = self._layers / f".{secrets.token_hex(8)}"
        with writing(draft):
            make_private(self._layers)
            draft.mkdir()
        labels = {RUN_LABEL: "export", OWNER_LABEL: owner_label()}
        container = client.create_container(image, ["none"], labels=labels)["Id"]
        try:
            tar = ["tar", "-x", "--numeric-owner", "--xattrs", "--xattrs-include=*", "-p", "-C", str(draft)]
            with subprocess.Popen(tar, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
                assert process.stdin is not None
                for chunk in client.export(container):
                    process.stdin.write(chunk)
                _, errors = process.communicate(timeout=EXPORT_SECONDS)
            if process.returncode != 0:
                reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
                raise SandboxError(f"cannot lay image {image} out in {self._layers}: {reason}")
            draft.rename(layer)
            return layer
        finally:
            client.remove_container(container, force=True)
            shutil.rmtree(draft, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._images / f"{quote(name, safe='')}.json"

    def _read(self, name: str) -> OciImage | None:
        return self._load(self._file(name))

    def _load(self, file: Path) -> OciImage | None:
        try:
            return OciImage.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None

    def _write(self, image: OciImage) -> None:
        file = self._file(image.name)
        draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        with writing(file):
            make_private(self._images)
            try:
                draft.write_text(image.model_dump_json(indent=1))
                draft.replace(file)
            finally:
                draft.unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make a directory that no other user reaches: layers hold set-user-id files, of sandboxes too."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


@contextmanager
def writing(file: Path) -> Generator[None]:
    """Raises :class:`SandboxLost` with the cure where a file or directory of the store cannot be written."""
    try:
        yield
    except OSError as error:
        cure = "make room there, or set SWE_ENV_STATE to another directory"
        raise SandboxLost(f"cannot write {file.parent} ({error.strerror}): {cure}") from error


def connect_docker(*, timeout: int = 60) -> Any | None:
    """A Docker engine, if one answers at once. `timeout`: longest that it may be silent later on [s]."""
    try:
        client: Any = docker.APIClient(
            base_url=os.environ.get("DOCKER_HOST"), version="auto", timeout=timeout
        )
        client.ping()
    except (DockerException, requests.RequestException, OSError):
        return None
    return client


def reachable_layers(about: Mapping[str, Any]) -> list[str] | None:
    """An image's overlay2 directories, the top one first; None where no sandbox could use them."""
    driver: dict[str, Any] = about.get("GraphDriver") or {}
    data: dict[str, str] = driver.get("Data") or {}
    if driver.get("Name") != "overlay2" or not data.get("UpperDir"):
        return None
    layers = [data["UpperDir"], *filter(None, data.get("LowerDir", "").split(":"))]
    here = all(Path(layer).is_dir() for layer in layers)
    return layers if here and not unusable(Path(layers[0])) else None


def _full(name: str) -> str:
    """With the tag that a name without one means."""
    last = name.rpartition("/")[2]
    return name if ":" in last or name.startswith("sha256:") else f"{name}:latest"
