"""A Docker client for the tests that need a container."""

from __future__ import annotations

from collections.abc import Iterator

import docker
import pytest


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env(version="auto", timeout=120)
    yield client
    client.close()
