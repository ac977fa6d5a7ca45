"""A base image comes from a registry where one answers, and from Debian's packages where none does."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from sandboxes import engine
from tests.sandboxes.registry_server import Registry, serving

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def upstream(base_image: str) -> Iterator[Registry]:
    """A registry whose Python image is the base image's files, with a Python that pip may install into."""
    unlock = "rm -f /usr/lib/python3*/EXTERNALLY-MANAGED"
    container = command("docker", "create", "--network=none", base_image, "sh", "-c", unlock)
    try:
        command("docker", "start", "--attach", container)
        files = subprocess.run(["docker", "export", container], capture_output=True, check=True).stdout
    finally:
        command("docker", "rm", container)
    with serving() as registry:
        registry.layer = files
        yield registry


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A base image's name that no image has; what the test made of it is removed in the end."""
    name = f"swe-env-test-{secrets.token_hex(4)}/base:1"
    monkeypatch.setattr(engine, "BASE_IMAGE", name)
    yield name
    subprocess.run(["docker", "rmi", "-f", name], capture_output=True, check=False)


def command(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def from_registry(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{registry.address}/library/python:3.11-slim-bookworm"
    monkeypatch.setattr(engine, "UPSTREAM_IMAGE", name)


def test_the_base_image_is_derived_from_the_one_a_registry_has(
    upstream: Registry, absent: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from_registry(upstream, monkeypatch)
    said: list[str] = []
    assert engine.ensure_base_image(said.append) == absent
    assert said == [f"pulling {engine.UPSTREAM_IMAGE}", f"building {absent} on {engine.UPSTREAM_IMAGE}"]
    check = "python -m pytest --version && git --version && patch --version && ps --version"
    command("docker", "run", "--rm", "--network=none", absent, "sh", "-c", check)
    layers = command("docker", "inspect", "-f", "{{len .RootFS.Layers}}", absent)
    assert int(layers) == 2  # the pulled one, and ours
    command("docker", "rmi", "-f", engine.UPSTREAM_IMAGE)


def test_an_upstream_image_that_cannot_be_built_on_is_said_and_left(
    busybox_image: str, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "UPSTREAM_IMAGE", busybox_image)
    said: list[str] = []
    client = docker.APIClient()
    try:
        assert not engine._derive(client, said.append)
    finally:
        client.close()
    assert said[-1].startswith("that failed (")
    assert said[-1].endswith("; building from Debian packages instead")


def test_a_registry_that_says_nothing_is_left_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "REGISTRY_SECONDS", 0.5)
    said: list[str] = []
    with serving() as registry:
        registry.silent = "manifests"
        from_registry(registry, monkeypatch)
        started = time.monotonic()
        assert not engine._pull(said.append)
        assert time.monotonic() - started < 10
    assert said[-1] == "no registry answers; building from Debian packages instead"
