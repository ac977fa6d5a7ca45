"""`swe-env images`: what is ours is listed, kept and removed, and nothing else is touched."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from sandboxes.oci import OciEngine
from sandboxes.oci_images import ImageStore
from sandboxes.protocol import ImageUnavailable, Limits
from sandboxes.registry import PulledImages
from tests.conftest import needs_oci
from tests.sandboxes.conftest import WORKDIR
from tests.sandboxes.registry_server import Registry, serving
from tests.swe_env.test_cli import call, refusal

pytestmark = pytest.mark.docker


def docker(*arguments: str) -> str:
    argv = ["docker", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as registry:
        yield registry


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state of its own: nothing that the machine has counts as pulled, kept or pinned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SWE_ENV_STATE", str(tmp_path / "store"))
    return tmp_path


@pytest.fixture
def group() -> Iterator[str]:
    """What the names of a test's images begin with; removed in the end."""
    group = f"swe-env-test-{secrets.token_hex(4)}"
    yield group
    names = docker("images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", f"reference={group}/*")
    if names:
        docker("rmi", *names.split())


def here(name: str) -> bool:
    return bool(docker("images", "-q", name))


def done(*arguments: str) -> str:
    """What an `images` command that succeeds prints."""
    result = call("images", *arguments)
    assert result.returncode == 0, result
    return result.stdout


def row(name: str) -> str:
    """An image's row in the list."""
    return next((line for line in done("list").splitlines() if line.startswith(name)), "")


def pull(registry: Registry, *names: str) -> None:
    assert f"{names[-1]} is here" in done("pull", *names, "--mirror", registry.address)


def with_store(state: Path, body: Callable[[OciEngine], Awaitable[object]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with OciEngine.connect(state=state / "store") as engine:
                await body(engine)

    trio.run(main)


def test_what_was_pulled_is_listed_and_removed(registry: Registry, group: str) -> None:
    name = f"{group}/a:latest"
    pull(registry, name)
    what = row(name).split()
    assert what[1:3] == ["pulled", "docker"]
    assert "freed" in done("remove", f"{group}/a")
    assert not here(name)
    assert row(name) == ""


def test_what_is_not_ours_is_refused_and_stays(base_image: str, group: str) -> None:
    name = f"{group}/theirs:1"
    docker("tag", base_image, name)
    assert row(name) == ""
    assert refusal(call("images", "remove", name)) == f"swe-env: {name} is not ours: `docker rmi {name}`"
    assert refusal(call("images", "remove", base_image)).endswith(f"is not ours: `docker rmi {base_image}`")
    assert here(name)


def test_an_image_that_took_a_pulled_ones_name_is_not_ours(
    registry: Registry, base_image: str, group: str
) -> None:
    name = f"{group}/a:latest"
    pull(registry, name)
    docker("tag", base_image, name)
    assert "not ours" in refusal(call("images", "remove", name))


def build(name: str, dockerfile: str) -> None:
    argv = ["docker", "build", "-q", "-t", name, "-"]
    subprocess.run(argv, input=dockerfile, text=True, check=True, capture_output=True, timeout=60)


def test_what_was_built_here_is_ours_and_what_others_made_of_it_is_not(base_image: str, group: str) -> None:
    ours, theirs = f"{group}/built:1", f"{group}/theirs:1"
    build(ours, f"FROM {base_image}\nLABEL swe-env.recipe={group}\n")
    trio.run(trio.sleep, 1.1)  # an image's age is known to the second
    build(theirs, f"FROM {ours}\nLABEL mine=1\n")
    assert row(ours).split()[1] == "built"
    assert "not ours" in refusal(call("images", "remove", theirs))
    done("remove", ours)
    assert not here(ours)
    assert here(theirs)


def test_an_image_in_use_is_refused(registry: Registry, group: str) -> None:
    name = f"{group}/a:latest"
    pull(registry, name)
    container = docker("create", name)
    try:
        assert f"{name} is in use" in refusal(call("images", "remove", name))
    finally:
        docker("rm", container)
    done("remove", name)


def test_a_pinned_image_stays_until_it_is_unpinned(registry: Registry, group: str, state: Path) -> None:
    name, other = f"{group}/a:latest", f"{group}/b:latest"
    pull(registry, name, other)
    done("pin", name)
    assert row(name).endswith("pinned")
    assert "images unpin" in refusal(call("images", "remove", name))
    poor = PulledImages(print, keep_free=1 << 60, state=state / "cache/swe-env/images.json")
    with pytest.raises(ImageUnavailable):
        trio.run(poor.ensure, f"{group}/z")
    assert here(name)
    assert not here(other)
    done("unpin", name)
    assert "not pinned" in refusal(call("images", "unpin", name))
    done("remove", name)


def test_what_is_unknown_cannot_be_pinned_or_removed(group: str) -> None:
    assert "images list" in refusal(call("images", "pin", f"{group}/a"))
    assert "not ours" in refusal(call("images", "remove", f"{group}/a"))
    assert "--unused" in refusal(call("images", "remove"))


@needs_oci
def test_an_exported_image_needs_docker_no_more(base_image: str, group: str, state: Path) -> None:
    name = f"{group}/mine:1"
    build(name, f"FROM {base_image}\nRUN rm /etc/issue && mkdir {WORKDIR} && echo old >{WORKDIR}/file\n")
    done("export", name)
    assert (state / "store/layers").stat().st_mode & 0o077 == 0  # su of an image would be root's here
    assert row(name).split()[1:4] == ["exported", "docker,", "oci"]
    docker("rmi", name)
    with_store(state, lambda engine: says(engine, name, "old"))
    docker("tag", base_image, name)  # now the name means another image
    with_store(state, lambda engine: says(engine, name, ""))
    docker("rmi", name)
    with_store(state, lambda engine: says(engine, name, ""))
    done("remove", name)
    assert list((state / "store/layers").iterdir()) == []
    assert here(base_image)


@needs_oci
def test_the_list_says_what_can_run_without_an_engine_and_leaves_out_what_is_gone(
    base_image: str, group: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{group}/mine:1"
    docker("tag", base_image, name)
    with_store(state, lambda engine: says(engine, name, ""))
    with monkeypatch.context() as stopped:
        stopped.setenv("DOCKER_HOST", "unix:///nothing")
        assert "docker (stopped)" in row(name)
        assert "start it with `swe-env engine`" in refusal(call("images", "remove", name))
        with_store(state, lambda engine: says(engine, name, ""))
    docker("rmi", name)
    assert row(name) == ""


async def says(engine: OciEngine, name: str, text: str) -> None:
    async with engine.sandbox(name, workdir=WORKDIR, limits=Limits()) as sandbox:
        result = await sandbox.run("cat file 2>/dev/null; test -e /etc/issue || echo gone")
        assert result.text == (f"{text}\ngone\n" if text else "")


@needs_oci
def test_exported_images_share_their_layers(base_image: str, group: str, state: Path) -> None:
    name = f"{group}/mine:1"
    build(name, f"FROM {base_image}\nRUN echo more >/file\n")
    done("export", name, base_image)
    layers = [image.layers for image in ImageStore(state / "store").list()]
    assert len(list((state / "store/layers").iterdir())) == max(map(len, layers)) > min(map(len, layers))
    done("remove", name)
    assert row(base_image).split()[1:3] == ["base,", "exported"]
    assert here(base_image)


@needs_oci
def test_sealed_starts_that_nobody_uses_are_removed(
    base_image: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = [f"swe-env/sealed:{secrets.token_hex(12)}" for _ in range(3)]

    async def seal(engine: OciEngine) -> None:
        for tag in sealed:
            async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
                await sandbox.run("head -c 1M /dev/zero >file")
                await engine.commit(sandbox, tag=tag, labels={})

    with_store(state, seal)
    done("pin", sealed[1])
    # Without an engine: its sealed starts are this machine's, and not the test's to remove.
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    user = subprocess.Popen(
        [sys.executable, "-c", USER, str(state / "store"), sealed[2]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert user.stdout is not None
    user.stdout.readline()
    said = done("remove", "--unused")
    assert f"removed {sealed[0]}" in said
    assert f"kept: {sealed[1]} is pinned" in said
    assert f"kept: {sealed[2]} is in use" in said
    assert "1.0 MB freed" in said or "1.1 MB freed" in said
    user.kill()
    user.communicate()
    assert f"removed {sealed[2]}" in done("remove", "--unused")
    assert [image.name for image in ImageStore(state / "store").list() if image.ours] == [sealed[1]]


USER = """
import sys
from pathlib import Path
from sandboxes.oci_images import ImageStore
ImageStore(Path(sys.argv[1])).find(sys.argv[2])
print("found", flush=True)
sys.stdin.read()
"""


def test_without_an_engine_the_store_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert done("list").split() == ["image", "what", "where", "size", "last", "used", "pinned"]


def test_a_state_from_before_pins_is_read(state: Path) -> None:
    file = state / "cache/swe-env/images.json"
    os.makedirs(file.parent)
    file.write_text(json.dumps({"images": {"a:latest": {"id": "sha256:0", "used": 1.0}}}))
    assert set(PulledImages(print, state=file).pulled()) == {"a:latest"}
