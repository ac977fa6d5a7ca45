"""A Docker client for the tests that need a container."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env(version="auto", timeout=120)
    yield client
    client.close()


def git(directory: Path, *arguments: str) -> str:
    """git with a fixed author, free of the user's configuration."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main")
    return subprocess.check_output(["git", "-C", str(directory), *identity, *arguments], text=True).strip()
