"""Real sandboxes for tests: a Docker engine, images, and a way to run an async body in a container."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import docker
import pytest
import trio
from docker.errors import ImageNotFound

from sandboxes.docker import DockerEngine
from sandboxes.protocol import Limits, Sandbox
from tests.conftest import Backend, connected

T = TypeVar("T")
Sandboxed = Callable[..., Any]
"""`sandboxed(body, image=..., limits=...)`: what `body(sandbox)` returns, run in a container of its own."""

WORKDIR = "/work"
TEST_SECONDS = 120
BUSYBOX_IMAGE = "swe-env/test-busybox:1"
EMPTY_IMAGE = "swe-env/test-empty:1"


@pytest.fixture(scope="session")
def busybox_image(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image that holds one file: a static busybox. No Python, no bash, no passwd, no /tmp."""
    client: Any = docker.APIClient()
    try:
        client.inspect_image(BUSYBOX_IMAGE)
    except ImageNotFound:
        folder = tmp_path_factory.mktemp("busybox")
        download = ["apt-get", "download", "busybox-static"]
        if subprocess.run(download, cwd=folder, capture_output=True).returncode != 0:  # no package lists yet
            subprocess.run(["apt-get", "update"], check=True, capture_output=True)
            subprocess.run(download, cwd=folder, check=True, capture_output=True)
        package = next(folder.glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(folder / "root/bin/busybox", "bin/busybox")
        name, tag = BUSYBOX_IMAGE.split(":")
        client.import_image_from_data(archive.getvalue(), repository=name, tag=tag)
    return BUSYBOX_IMAGE


@pytest.fixture(scope="session")
def bashless_image(base_image: str) -> str:
    """The base image without bash: its sh is dash."""

    async def remove_bash() -> str:
        limits = Limits()
        async with (
            DockerEngine.connect(run_id="test-bashless") as engine,
            engine.sandbox(base_image, workdir=WORKDIR, limits=limits) as sandbox,
        ):
            await sandbox.run("rm -f /bin/bash /usr/bin/bash")
            return await engine.commit(sandbox, tag="swe-env/test-bashless:1", labels={})

    return trio.run(remove_bash)


@pytest.fixture(scope="session")
def empty_image(base_image: str) -> str:
    """An image without a file."""
    name, tag = EMPTY_IMAGE.split(":")
    client: Any = docker.APIClient()
    client.import_image_from_data(bytes(10240), repository=name, tag=tag)
    client.close()
    return EMPTY_IMAGE


@pytest.fixture
def sandboxed(base_image: str, backend: Backend, request: pytest.FixtureRequest) -> Sandboxed:
    def run(
        body: Callable[[Sandbox], Awaitable[T]],
        *,
        image: str = base_image,
        limits: Limits | None = None,
    ) -> T:
        async def main() -> T:
            with trio.fail_after(TEST_SECONDS):
                async with (
                    connected(backend, f"test-{request.node.name}") as engine,
                    engine.sandbox(image, workdir=WORKDIR, limits=limits or Limits()) as sandbox,
                ):
                    return await body(sandbox)

        return trio.run(main)

    return run


def own_containers(label: str) -> list[str]:
    """Ids of containers with a label, running or not."""
    argv = ["docker", "ps", "-aq", "--no-trunc", "--filter", f"label={label}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


REPOSITORY = Path(__file__).parents[2]
