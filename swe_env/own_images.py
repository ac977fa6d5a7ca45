"""The images that are ours, in Docker and in the oci backend's store: which there are, and removing them.

Ours is what was pulled by :class:`sandboxes.registry.PulledImages`, what was built here or sealed for
sandboxes to start from, and what the store keeps. Anything else may be somebody's: `docker rmi` removes it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import requests
import trio
from docker.errors import APIError, DockerException

from sandboxes.engine import BASE_IMAGE
from sandboxes.oci_images import ImageStore, connect_docker
from sandboxes.protocol import EngineUnavailable, SandboxError
from sandboxes.reaper import remove_orphans
from sandboxes.registry import PulledImages, full_name
from swe_env.workspace import SEALED
from tasks.swebench_image import LABEL

COUNTING_SECONDS = 60.0
"""For others who ask Docker what its images take."""

STOPPED = "docker (stopped)"
"""Where the files of an image are that the oci backend can run, though no Docker engine answers."""

OURS = {"pulled", "built", "sealed"}
"""Kinds of image that may be removed from Docker."""


@dataclass
class OwnImage:
    """An image that is ours, or that the oci backend knows."""

    name: str
    kinds: list[str] = field(default_factory=list[str])
    """Of pulled, built, sealed, base and exported; none for an image of Docker's that the store knows."""
    where: list[str] = field(default_factory=list[str])
    """Of docker, oci store and docker (stopped): where its files are."""
    size: int = 0
    """As Docker counts it, with the layers it shares, and what the store keeps of it [bytes]."""
    used: float | None = None
    """When it was last asked for, if known [s since 1970]."""
    pinned: bool = False


class OwnImages:
    """Synchronous; where no Docker engine answers, these are the images of the store alone."""

    def __init__(self, pulled: PulledImages, store: ImageStore) -> None:
        self._pulled, self._store = pulled, store

    def find(self) -> list[OwnImage]:
        """By name. Raises `EngineUnavailable` when the engine breaks off.

        What the store knew of images that are nowhere any more is left out.
        """
        in_docker = self._in_docker()
        found = {
            name: OwnImage(name, [kind] if kind else [], ["docker"], size)
            for name, kind, size in in_docker or []
        }
        records = {record.name: record for record in self._store.list()}
        for name, record in records.items():
            kept = self._store.kept(record)
            is_name = not name.startswith("sha256:")
            stopped = in_docker is None and is_name and not kept and record.complete
            if not (name in found or kept or stopped):
                continue
            image = found.setdefault(name, OwnImage(name))
            if name.startswith(f"{SEALED}:") and "sealed" not in image.kinds:
                image.kinds.append("sealed")
            if not record.ours and self._store.exported(record):
                image.kinds.append("exported")
            if kept or stopped:
                image.where.append("oci store" if kept else STOPPED)
            image.size += _size(kept)
            image.used = self._store.used(record)
        for name, pulled in self._pulled.pulled().items():
            if name in found and "pulled" in found[name].kinds:
                found[name].used = max(pulled.used, found[name].used or 0)
        for name in self._pulled.pinned() & set(found):
            found[name].pinned = True
        return sorted(
            (image for image in found.values() if image.kinds or image.name in records),
            key=lambda one: one.name,
        )

    def pin(self, name: str, *, pinned: bool) -> None:
        """Keep an image from being removed, or let go of it again: see :meth:`PulledImages.pin`."""
        name = full_name(name)
        if pinned and not any(image.name == name for image in self.find()):
            raise SandboxError(f"no image {name} that we know: `swe-env images list` shows what there is")
        if not pinned and name not in self._pulled.pinned():
            raise SandboxError(f"{name} is not pinned: `swe-env images list` shows what is")
        trio.run(lambda: self._pulled.pin(name, pinned=pinned))

    def remove(self, name: str) -> None:
        """Remove an image of ours from wherever it is; of an image of others, what the store keeps of it.

        Raises `SandboxError` in one line when it is not ours, pinned, or in use: by a container (a sandbox,
        or one that holds it for a process with the oci backend), or by a process that found it in the store.
        """
        name = full_name(name)
        image = next((one for one in self.find() if one.name == name), None)
        in_docker = image is not None and bool(OURS & set(image.kinds)) and "docker" in image.where
        if image is not None and image.where == [STOPPED]:
            raise EngineUnavailable(f"{name} is in Docker, which is stopped: start it with `swe-env engine`")
        in_store = image is not None and "oci store" in image.where
        if image is None or not (in_docker or in_store):
            raise SandboxError(f"{name} is not ours: `docker rmi {name}`")
        if image.pinned:
            raise SandboxError(f"{name} is pinned: `swe-env images unpin {name}` first")
        record = any(one.name == name for one in self._store.list())
        if record and self._store.in_use(name):
            raise SandboxError(f"{name} is in use: wait for the run that uses it to end")
        if in_docker:
            self._remove_from_docker(image)
        if record:
            self._store.remove(name)

    def sealed(self) -> Iterable[str]:
        """Names of the sealed starts, each of which can be made again."""
        return [image.name for image in self.find() if "sealed" in image.kinds]

    def size(self) -> int:
        """What all images take, Docker's and the store's: its change is what a removal freed."""
        layers = {layer for record in self._store.list() for layer in self._store.kept(record)}
        client = connect_docker()
        try:
            return _size(layers) + (docker_size(client) if client else 0)
        except (DockerException, requests.RequestException) as error:
            raise _broke_off(error) from error
        finally:
            if client:
                client.close()

    def _in_docker(self) -> list[tuple[str, str, int]] | None:
        """Name, kind ("" for images of others) and size of every image with a name; None: no engine."""
        client = connect_docker()
        if client is None:
            return None
        try:
            entries = cast("list[dict[str, Any]]", client.images())
        except (DockerException, requests.RequestException) as error:
            raise _broke_off(error) from error
        finally:
            client.close()
        pulled = self._pulled.pulled()
        first: dict[str, int] = {}
        named: dict[str, dict[str, Any]] = {}
        for entry in entries:
            tags: list[str] = entry["RepoTags"] or []
            here = [tag for tag in tags if tag != "<none>:<none>"]
            here += [name for name, one in pulled.items() if "@" in name and one.id == entry["Id"]]
            named |= dict.fromkeys(here, entry)
            if here and not here[0].startswith(f"{SEALED}:"):
                recipe = _recipe(entry)
                first[recipe] = min(first.get(recipe, entry["Created"]), entry["Created"])

        def kind(name: str, entry: dict[str, Any]) -> str:
            recipe = _recipe(entry)
            if name.startswith(f"{SEALED}:"):
                return "sealed"
            if name in pulled and pulled[name].id == entry["Id"]:
                return "pulled"
            if name == BASE_IMAGE:
                return "base"
            # what somebody else makes from an image that was built here inherits its label
            return "built" if recipe and entry["Created"] == first[recipe] else ""

        return [(name, kind(name, entry), int(entry["Size"])) for name, entry in named.items()]

    def _remove_from_docker(self, image: OwnImage) -> None:
        client = connect_docker()
        if client is None:
            raise EngineUnavailable(
                f"no Docker engine to remove {image.name}: start it with `swe-env engine`"
            )
        try:
            trio.run(remove_orphans, client)  # what dead processes left would look like use
            if "pulled" not in image.kinds:
                client.remove_image(image.name)
            elif not trio.run(self._pulled.remove, image.name):
                raise SandboxError(
                    f"{image.name} is in use, or a pinned image is sealed on it: wait, or unpin that one"
                )
        except APIError as error:
            if error.status_code == 409:
                raise SandboxError(f"{image.name} is in use: wait for the run that uses it to end") from error
            if error.status_code != 404:
                raise _broke_off(error) from error
        except (DockerException, requests.RequestException) as error:
            raise _broke_off(error) from error
        finally:
            client.close()


def _recipe(entry: dict[str, Any]) -> str:
    labels: dict[str, str] = entry["Labels"] or {}
    return labels.get(LABEL, "")


def docker_size(client: Any) -> int:
    """What Docker's images take [bytes]. The engine counts for one at a time, and refuses the others."""
    deadline = time.monotonic() + COUNTING_SECONDS
    while True:
        try:
            return int(client.df()["LayersSize"])
        except APIError as error:
            if "already running" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _size(layers: Iterable[Path]) -> int:
    """Bytes on the disk. A layer that is gone has none."""
    here = [str(layer) for layer in layers if layer.is_dir()]
    if not here:
        return 0
    done = subprocess.run(["du", "-scB1", *here], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[-2])


def _broke_off(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"the Docker engine failed: {' '.join(str(error).split())[:300]}: read its log")
