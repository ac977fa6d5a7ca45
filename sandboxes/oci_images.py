"""Images for the daemonless backend: layers on disk, found where Docker keeps them or kept by us.

A file an image in `STATE/images`, so that what Docker once said of an image is known when its engine is
stopped. Layers are used where they lie; where they cannot be reached (Docker's containerd store) the image is
exported once. Images of our own (:meth:`ImageStore.add`) are a layer of ours on the layers of another image.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import docker
import requests
from docker.errors import DockerException, ImageNotFound
from pydantic import BaseModel, ConfigDict, ValidationError

from sandboxes.protocol import ImageUnavailable, SandboxError
from sandboxes.reaper import OWNER_LABEL, RUN_LABEL, owner_label

STATE = Path(os.environ.get("SWE_ENV_STATE") or "/var/lib/swe-env")
EXPORT_SECONDS = 600


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
        self._images, self._layers = state / "images", state / "layers"
        self._pins: dict[str, str] = {}  # id of an image -> container

    def find(self, name: str) -> OciImage:
        """An image whose layers are all on disk, and stay there until :meth:`unpin`.

        Raises :class:`ImageUnavailable`.
        """
        name = _full(name)
        known = self._read(name)
        if known is not None and known.ours:
            if known.complete:
                return known
            self.remove(name)
            known = None
        client = _engine()
        if client is None:
            if known is not None and known.complete:
                return known
            raise ImageUnavailable(
                f"no image {name} here, and no Docker engine to ask: start it with `swe-env engine`"
            )
        try:
            return self._from_docker(client, name, known)
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
        kept = self._layers / secrets.token_hex(12)
        kept.parent.mkdir(parents=True, exist_ok=True)
        layer.rename(kept)
        image = OciImage(
            name=name,
            id=f"swe-env:{kept.name}",
            layers=[str(kept), *below.layers],
            env=below.env,
            labels={**below.labels, **labels},
            ours=True,
        )
        self._write(image)
        return image

    def list(self) -> list[OciImage]:
        """Everything that is known here, by name."""
        files = sorted(self._images.glob("[!.]*.json")) if self._images.is_dir() else []
        return [image for file in files if (image := self._load(file)) is not None]

    def remove(self, name: str) -> list[str]:
        """Forget an image, and remove those of its layers that are ours and that no other image needs.

        Never touches what is Docker's. Returns the directories removed.
        """
        image = self._read(_full(name))
        if image is None:
            return []
        self._file(image.name).unlink(missing_ok=True)
        needed = {layer for other in self.list() for layer in other.layers}
        removed = [
            layer for layer in image.layers if Path(layer).parent == self._layers and layer not in needed
        ]
        for layer in removed:
            shutil.rmtree(layer, ignore_errors=True)
        return removed

    def unpin(self) -> None:
        """Let Docker remove again what was found. Never raises: what is left falls to the reaper."""
        client = _engine() if self._pins else None
        if client is not None:
            for pin in self._pins.values():
                with suppress(DockerException, requests.RequestException):
                    client.remove_container(pin, force=True)
            client.close()
        self._pins.clear()

    def _from_docker(self, client: Any, name: str, known: OciImage | None) -> OciImage:
        try:
            about = client.inspect_image(name)
        except ImageNotFound:
            raise ImageUnavailable(
                f"no image {name} here: `docker pull {name}`, or build or load it"
            ) from None
        if about["Id"] not in self._pins:
            # a container that never starts: while it exists, Docker does not remove the image's layers
            labels = {RUN_LABEL: "pin", OWNER_LABEL: owner_label()}
            self._pins[about["Id"]] = client.create_container(about["Id"], ["none"], labels=labels)["Id"]
        if known is not None and known.id == about["Id"] and known.complete:
            return known
        image = OciImage(
            name=name,
            id=about["Id"],
            layers=_reachable_layers(about) or [str(self._export(client, about["Id"]))],
            env=about["Config"].get("Env") or [],
            labels=about["Config"].get("Labels") or {},
        )
        self._write(image)
        return image

    def _export(self, client: Any, image: str) -> Path:
        """All of an image's files as one layer of ours."""
        layer = self._layers / image.removeprefix("sha256:")[:24]
        if layer.is_dir():
            return layer
        draft = self._layers / f".{secrets.token_hex(8)}"
        draft.mkdir(parents=True)
        container = client.create_container(image, ["none"])["Id"]
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
        self._images.mkdir(parents=True, exist_ok=True)
        file = self._file(image.name)
        draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        draft.write_text(image.model_dump_json(indent=1))
        draft.replace(file)


def _engine() -> Any | None:
    """A Docker engine, if one answers at once."""
    try:
        client: Any = docker.APIClient(base_url=os.environ.get("DOCKER_HOST"), version="auto", timeout=60)
        client.ping()
    except (DockerException, requests.RequestException, OSError):
        return None
    return client


def _reachable_layers(about: Mapping[str, Any]) -> list[str] | None:
    """An image's overlay2 directories, the top one first; None where Docker keeps its layers otherwise."""
    driver: dict[str, Any] = about.get("GraphDriver") or {}
    data: dict[str, str] = driver.get("Data") or {}
    if driver.get("Name") != "overlay2" or not data.get("UpperDir"):
        return None
    layers = [data["UpperDir"], *filter(None, data.get("LowerDir", "").split(":"))]
    return layers if all(Path(layer).is_dir() for layer in layers) else None


def _full(name: str) -> str:
    """With the tag that a name without one means."""
    last = name.rpartition("/")[2]
    return name if ":" in last or name.startswith("sha256:") else f"{name}:latest"
