"""An image that cannot be had costs its own episodes and no others; what can never come is refused first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest

from sandboxes.oci_images import connect_docker
from swe_env.own_images import docker_size
from swe_env.rundir import RunDir
from tests.conftest import thing_row
from tests.swe_env.test_cli import call, command, refusal

pytestmark = pytest.mark.docker


@pytest.fixture
def rows(mirror: Path, base_image: str) -> Iterator[list[dict[str, Any]]]:
    """Two instances; the image of the second needs a package that does not exist."""
    mark = uuid.uuid4().hex[:8]
    rows = [
        thing_row(mirror, f"swe-env-test/{mark}-{number}:latest") | {"instance_id": f"owner__thing-{number}"}
        for number in range(2)
    ]
    rows[1]["build_pip_packages"] = ["no_such_package_here @ file:///nowhere"]
    yield rows
    client = docker.from_env()
    for row in rows:
        if client.images.list(row["image"]):
            client.images.remove(row["image"], force=True)


def dataset(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_image_that_cannot_be_built_leaves_the_others_their_verdicts(
    rows: list[dict[str, Any]], mirror: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = call(
        "eval", "--dataset", dataset(tmp_path, rows), "--gold", "--repo-mirror", mirror.parent, "--out", out
    )
    assert done.returncode == 1
    assert "1 attempts have no verdict" in done.stderr
    good, bad = RunDir(out).episodes()
    assert good.reward == 1
    assert (bad.reward, bad.end.is_infrastructure) == (None, True)
    assert bad.error.startswith(f"cannot build {rows[1]['image']}: ERROR: ")
    assert done.stdout.count("installing with Python") == 2, "what failed is not built again for a retry"


def test_a_clone_that_is_missing_is_refused_before_anything_starts(
    rows: list[dict[str, Any]], mirror: Path, tmp_path: Path
) -> None:
    rows[1]["repo"] = "owner/other"
    out = tmp_path / "run"
    line = refusal(
        call(
            "eval", "--dataset", dataset(tmp_path, rows), "--gold", "--repo-mirror", mirror.parent,
            "--out", out,
        )
    )  # fmt: skip
    assert "no clone of owner/other" in line
    assert not RunDir(out).episodes()


def test_ctrl_c_stops_a_build_and_leaves_nothing_behind(
    rows: list[dict[str, Any]], mirror: Path, tmp_path: Path
) -> None:
    rows[0]["build_install"] = "sleep 100"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    argv = [
        *command("eval", "--dataset", dataset(tmp_path, rows[:1]), "--gold"),
        "--repo-mirror", str(mirror.parent), "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    assert process.stdout is not None
    assert any(b"installing with Python" in line for line in process.stdout)
    deadline = time.monotonic() + 60
    while not builds():
        assert time.monotonic() < deadline, "the build does not begin"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert not list(temporary.glob("swe-env-image-*"))
    while builds():
        assert time.monotonic() < deadline, "the engine still runs the build"
        time.sleep(0.1)


def builds() -> list[Any]:
    """Containers in which the engine runs the step that this test interrupts."""
    return [one for one in docker.from_env().containers.list() if "build.sh" in str(one.attrs["Args"])]


def test_several_may_ask_at_once_what_images_take(base_image: str) -> None:
    clients = [connect_docker() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        sizes = list(threads.map(docker_size, clients))
    assert min(sizes) > 0
    for client in clients:
        assert client is not None
        client.close()
