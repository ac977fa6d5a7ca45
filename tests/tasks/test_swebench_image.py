"""An image built from a mirror holds the past, not the future, and tells gold from nothing."""

from __future__ import annotations

import stat
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest

from sandboxes.protocol import ImageUnavailable
from tasks.host_python import find_python
from tasks.swebench import eval_script, grade_log, load_swebench
from tasks.swebench_image import build_image, find_mirror
from tests.conftest import git, thing_row


@pytest.fixture
def row(mirror: Path) -> dict[str, Any]:
    return thing_row(mirror, f"swe-env-test/thing-{uuid.uuid4().hex[:8]}:latest")


@pytest.fixture
def image(row: dict[str, Any], engine: docker.DockerClient) -> Iterator[str]:
    """Name of an image that a test may build; gone afterwards."""
    yield row["image"]
    if engine.images.list(row["image"]):
        engine.images.remove(row["image"], force=True)


def run(engine: docker.DockerClient, image: str, folder: Path, script: str) -> str:
    """Output of a script in a fresh container without a network; `folder` is at /in."""
    (folder / "script.sh").write_text(script)
    container = engine.containers.run(
        image, ["bash", "/in/script.sh"], detach=True, network_mode="none",
        volumes={str(folder): {"bind": "/in", "mode": "ro"}},
    )  # fmt: skip
    try:
        container.wait(timeout=100)
        return container.logs().decode("utf-8", "replace")
    finally:
        container.remove(force=True)


@pytest.mark.docker
def test_gold_is_told_from_nothing_in_an_image_built_here(
    row: dict[str, Any],
    image: str,
    mirror: Path,
    base_image: str,
    engine: docker.DockerClient,
    tmp_path: Path,
) -> None:
    said: list[str] = []
    assert build_image(row, mirror.parent, base_image, said.append) == image
    assert said[-1] == f"{image}: built"
    [task] = load_swebench([row])
    (tmp_path / "gold.diff").write_text(task.gold_patch)

    nothing = grade_log(task, run(engine, image, tmp_path, eval_script(task)))
    assert (nothing.log_valid, nothing.resolved) == (True, False)
    assert nothing.statuses == {"test_thing.py::test_add": "FAILED", "test_thing.py::test_zero": "PASSED"}
    gold = grade_log(task, run(engine, image, tmp_path, "git apply /in/gold.diff\n" + eval_script(task)))
    assert (gold.log_valid, gold.resolved) == (True, True)

    seen = run(
        engine,
        image,
        tmp_path,
        "git status --short; git tag; git log --all --format=%s; git cat-file --batch-all-objects --batch",
    )
    assert "v1" in seen
    assert "It adds" in seen
    assert "secret fix" not in seen
    assert "return a + b" not in seen
    assert not seen.startswith(" M")

    before = list(said)
    assert build_image(row, mirror, base_image, said.append) == image
    assert said == before, "an image with the same recipe is not built again"


@pytest.mark.docker
def test_an_image_that_two_want_at_once_is_built_once(
    row: dict[str, Any], image: str, mirror: Path, base_image: str
) -> None:
    said: list[str] = []
    with ThreadPoolExecutor() as threads:
        builds = [threads.submit(build_image, row, mirror, base_image, said.append) for _ in range(3)]
    assert [build.result() for build in builds] == [image] * 3
    assert said.count(f"{image}: built") == 1
    assert f"{image}: waiting for another process that builds it" in said


@pytest.mark.docker
def test_an_image_from_elsewhere_is_left_alone(
    row: dict[str, Any], image: str, mirror: Path, base_image: str, engine: docker.DockerClient
) -> None:
    engine.images.get(base_image).tag(image)
    said: list[str] = []
    assert build_image(row, mirror, base_image, said.append) == image
    assert "was not built here" in said[-1]
    assert engine.images.get(image).id == engine.images.get(base_image).id


@pytest.mark.docker
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_commit": "1" * 40}, "has no commit 1111"),
        ({"build_python": "2.99"}, "no copyable python2.99 on PATH or in pyenv"),
        ({"build_python": None}, "lacks column 'build_python'"),
        ({"repo": "owner/other"}, "no clone of owner/other"),
        ({"build_pip_packages": ["no_such_package_here @ file:///nowhere"]}, "ERROR: "),
    ],
)
def test_what_cannot_be_built_says_why_in_one_line(
    row: dict[str, Any], image: str, mirror: Path, base_image: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ImageUnavailable) as caught:
        build_image(row | change, mirror.parent, base_image, print)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if "all of it in" in str(caught.value):
        log = Path(str(caught.value).split("all of it in ")[1].split(")")[0])
        assert "nowhere" in log.read_text()
        log.unlink()


@pytest.mark.docker
def test_a_missing_base_image(row: dict[str, Any], mirror: Path) -> None:
    with pytest.raises(ImageUnavailable, match="base image no/such:1 does not exist here"):
        build_image(row, mirror, "no/such:1", print)


@pytest.mark.parametrize(
    "layout",
    [
        "owner+thing/repo",
        "owner__thing",
        "owner__thing.git",
        "owner/thing",
        "owner/thing.git",
        "thing",
        "thing.git",
        "",
    ],
)
@pytest.mark.parametrize("bare", [True, False])
def test_a_mirror_is_found_in_every_usual_place(tmp_path: Path, layout: str, bare: bool) -> None:
    place = tmp_path / layout
    place.mkdir(parents=True, exist_ok=True)
    git(place, "init", "-q", *(["--bare"] if bare else []))
    assert find_mirror("owner/thing", tmp_path) == (place if bare else place / ".git")


def test_no_mirror(tmp_path: Path) -> None:
    with pytest.raises(ImageUnavailable, match=r"no clone of owner/thing at or below .*: `git clone --bare`"):
        find_mirror("owner/thing", tmp_path)


def fake_python(path: Path, prefix: Path, version: str) -> Path:
    """Something that answers like an interpreter (or like the shim of one)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {prefix}\necho {version}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_shim_leads_to_the_interpreter_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = tmp_path / "versions" / "2.98.7"
    fake_python(prefix / "bin/python2.98", prefix, "2.98.7")
    fake_python(tmp_path / "shims/python2.98", prefix, "2.98.7")
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/usr/bin:/bin")
    assert find_python("2.98").executable == prefix / "bin/python2.98"


def test_pyenv_is_searched_though_its_shim_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "versions" / "2.98.7"
    fake_python(prefix / "bin/python2.98", prefix, "2.98.7")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert find_python("2.98").prefix == prefix
    with pytest.raises(ImageUnavailable, match=r"pyenv install 2\.97"):
        find_python("2.97")


@pytest.mark.parametrize("given", ["", "bin", "bin/python2.98"])
def test_a_python_that_is_named_wins(tmp_path: Path, given: str) -> None:
    fake_python(tmp_path / "bin/python2.98", tmp_path, "2.98.0")
    assert find_python("2.98", tmp_path / given).version == "2.98.0"
    with pytest.raises(ImageUnavailable, match="--python DIR"):
        find_python("2.97", tmp_path / given)


def test_installed_packages_of_the_host_are_not_copied(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin/python2.98", tmp_path, "2.98.0")
    for name in ("os.py", "site-packages/secret.py", "test/big.py", "__pycache__/os.pyc", "json/decoder.py"):
        (tmp_path / "lib/python2.98" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib/python2.98" / name).write_text("")
    copied = {str(path.relative_to(tmp_path)) for path in find_python("2.98", tmp_path).files()}
    assert copied == {"bin/python2.98", "lib/python2.98/os.py", "lib/python2.98/json/decoder.py"}
