"""Images are pulled once, again where that helps, and only ours make room for others."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from sandboxes.protocol import ImageUnavailable
from sandboxes.reaper import RUN_LABEL
from sandboxes.registry import PulledImages
from tests.sandboxes.conftest import REPOSITORY
from tests.sandboxes.registry_server import ELSEWHERE, HERE, REFUSALS, Registry, serving

pytestmark = pytest.mark.docker

TEST_SECONDS = 60
PLENTY, NOTHING = 0, 1 << 60
"""`keep_free` on a disk that always has room, and on one that never has."""


def docker(*arguments: str) -> str:
    argv = ["docker", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as registry:
        yield registry


@pytest.fixture
def group() -> Iterator[str]:
    """What the names of a test's images begin with: `GROUP/a`, `GROUP/b`; removed in the end."""
    group = f"swe-env-test-{secrets.token_hex(4)}"
    yield group
    ours = ["--filter", f"reference={group}/*", "--filter", f"reference=*/{group}/*"]
    if left := docker("images", "--format", "{{.Repository}}:{{.Tag}}", *ours):
        docker("rmi", *left.split())


class World:
    """What most tests start from: a registry, names, and images that are pulled through it."""

    def __init__(self, registry: Registry, group: str, state: Path) -> None:
        self.registry, self.group, self.state = registry, group, state
        self.said: list[str] = []

    def images(self, *, keep_free: int = PLENTY, **options: Any) -> PulledImages:
        return PulledImages(
            self.said.append,
            keep_free=keep_free,
            mirror=self.registry.address,
            state=self.state,
            pause=0.02,
            **options,
        )

    def name(self, letter: str) -> str:
        return f"{self.group}/{letter}:latest"

    def here(self) -> str:
        """Letters of the images that the engine has."""
        names = docker("images", "--format", "{{.Repository}}", f"{self.group}/*").split()
        return "".join(sorted(name.rpartition("/")[2] for name in names))

    def removed(self) -> str:
        """Letters of the images removed to make room, in order."""
        words = [line.split()[1] for line in self.said if line.startswith("removed ")]
        return "".join(name.rpartition("/")[2][0] for name in words)

    def pull(self, letters: str) -> None:
        images = self.images()
        for letter in letters:
            run(images.ensure, self.name(letter))


@pytest.fixture
def world(registry: Registry, group: str, tmp_path: Path) -> World:
    return World(registry, group, tmp_path / "cache/images.json")


def run(body: Callable[..., Awaitable[object]], *arguments: object) -> None:
    async def main() -> None:
        with trio.fail_after(TEST_SECONDS):
            await body(*arguments)

    trio.run(main)


def refusal(images: PulledImages, name: str) -> str:
    """The one line with which an image is refused."""
    with pytest.raises(ImageUnavailable) as caught:
        run(images.ensure, name)
    line = str(caught.value)
    assert "\n" not in line
    assert name in line
    return line


def test_an_image_of_the_mirror_gets_its_name_on_docker_hub(world: World) -> None:
    world.pull("a")
    assert world.here() == "a"
    assert docker("inspect", "-f", "{{.RepoTags}}", world.name("a")) == f"[{world.name('a')}]"


@pytest.mark.parametrize("name", ["{}/a", "docker.io/{}/a:latest"])
def test_names_of_one_image_are_one_name(world: World, name: str) -> None:
    run(world.images().ensure, name.format(world.group))
    assert world.here() == "a"
    assert list(json.loads(world.state.read_bytes())["images"]) == [world.name("a")]


def test_an_image_with_a_registry_of_its_own_is_not_asked_of_the_mirror(world: World) -> None:
    name = f"{world.registry.address}/{world.group}/a:latest"
    images = PulledImages(print, keep_free=PLENTY, mirror="127.0.0.1:1", state=world.state)
    run(images.ensure, name)
    docker("rmi", name)


def test_a_tag_of_the_mirror_that_was_here_stays(world: World) -> None:
    tag = f"{world.registry.address}/{world.group}/a:latest"
    docker("pull", "-q", tag)
    world.pull("a")
    assert docker("images", "-q", tag)
    docker("rmi", tag)


def test_two_who_ask_at_once_share_one_pull(world: World) -> None:
    images = world.images()

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(images.ensure, world.name("a"))
            nursery.start_soon(images.ensure, world.name("a"))

    run(both)
    assert world.said.count(f"pulling {world.name('a')}") == 1


def test_an_image_that_is_here_is_not_asked_of_the_registry(world: World) -> None:
    world.pull("a")
    world.registry.asked.clear()
    world.pull("a")
    assert world.registry.asked == []


@pytest.mark.parametrize("status", [429, 500])
def test_a_busy_registry_is_asked_again(world: World, status: int) -> None:
    world.registry.answers = [status, status]
    world.pull("a")
    assert world.here() == "a"
    assert sum(" again in " in line for line in world.said) == 2


def test_a_registry_that_stays_busy_is_given_up_with_one_line(world: World) -> None:
    world.registry.always = 429
    line = refusal(world.images(tries=3), world.name("a"))
    assert "tried 3 times: toomanyrequests: You have reached your pull rate limit.: `docker login`" in line
    assert world.said.count(f"pulling {world.name('a')}") == 3


@pytest.mark.parametrize("part", ["manifests", "blobs"])
def test_a_silent_registry_is_given_up(world: World, part: str) -> None:
    world.registry.silent = part
    line = refusal(world.images(tries=2, silence=0.3), world.name("a"))
    assert "tried 2 times: no progress for 0.3 s" in line


def test_a_pull_is_cancelled_at_once(world: World) -> None:
    world.registry.silent = "manifests"

    async def main() -> None:
        started = trio.current_time()
        with trio.move_on_after(0.5):
            await world.images().ensure(world.name("a"))
        assert trio.current_time() - started < 2

    run(main)


@pytest.mark.parametrize("status", [404, 401])
def test_a_lasting_refusal_is_not_tried_again_and_names_the_cure(world: World, status: int) -> None:
    world.registry.always = status
    line = refusal(world.images(), world.name("a"))
    assert REFUSALS[status][1] in line
    assert line.endswith("build it here with `--repo-mirror CLONES`, or `docker login` if it is private")
    assert world.said == [f"pulling {world.name('a')}"]


def test_those_who_waited_for_a_pull_share_its_refusal(world: World) -> None:
    world.registry.always = 429
    images, lines = world.images(tries=2), list[str]()

    async def ask() -> None:
        try:
            await images.ensure(world.name("a"))
        except ImageUnavailable as error:
            lines.append(str(error))

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)

    run(both)
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert world.said.count(f"pulling {world.name('a')}") == 2


def test_an_image_of_another_architecture_is_refused_and_removed(world: World) -> None:
    world.registry.arch = ELSEWHERE
    line = refusal(world.images(), world.name("a"))
    assert f"cannot run on this machine: no matching manifest: it is for {ELSEWHERE}" in line
    assert f"the engine is {HERE}" in line
    assert "--repo-mirror CLONES" in line
    assert world.here() == ""
    assert world.said == [f"pulling {world.name('a')}"]


@pytest.mark.parametrize("name", ["Not A Name", "http://x/y", "-/x"])
def test_what_is_no_name_is_refused(world: World, name: str) -> None:
    refusal(world.images(), name)


def test_the_longest_unused_image_goes_first(world: World) -> None:
    world.pull("abc")
    world.pull("a")  # here, so only its use is noted
    refusal(world.images(keep_free=NOTHING), world.name("z"))
    assert world.removed() == "bca"
    assert world.here() == ""


def test_no_more_is_removed_than_makes_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_for_three(path: str) -> SimpleNamespace:
        return SimpleNamespace(free=3 - len(world.here()))

    world.pull("abc")
    monkeypatch.setattr(shutil, "disk_usage", disk_for_three)
    run(world.images(keep_free=1).ensure, world.name("z"))
    assert world.removed() == "a"
    assert world.here() == "bcz"


def test_without_room_an_image_is_refused_with_one_line(world: World) -> None:
    line = refusal(world.images(keep_free=NOTHING), world.name("a"))
    assert line.endswith("free some, e.g. `docker system prune`")
    assert world.registry.asked == []


def test_an_image_that_we_did_not_pull_is_left_alone(world: World) -> None:
    world.pull("a")
    docker("tag", world.name("a"), world.name("b"))
    refusal(world.images(keep_free=NOTHING), world.name("z"))
    assert world.here() == "b"


def test_an_image_that_took_the_name_of_a_pulled_one_is_left_alone(world: World) -> None:
    world.pull("ab")
    docker("tag", world.name("b"), world.name("a"))
    refusal(world.images(keep_free=NOTHING), world.name("z"))
    assert world.here() == "a"


def test_an_image_that_a_container_uses_is_left_alone(world: World) -> None:
    world.pull("ab")
    container = docker("create", world.name("a"))
    try:
        refusal(world.images(keep_free=NOTHING), world.name("z"))
        assert world.here() == "a"
    finally:
        docker("rm", container)


def test_an_image_that_is_held_is_left_alone(world: World) -> None:
    images = world.images()
    poor = world.images(keep_free=NOTHING)  # as another process would be

    async def main() -> None:
        async with images.holding(world.name("a")):
            await images.ensure(world.name("b"))
            with pytest.raises(ImageUnavailable):
                await poor.ensure(world.name("z"))
            assert world.here() == "a"
        with pytest.raises(ImageUnavailable):
            await poor.ensure(world.name("z"))
        assert world.here() == ""

    run(main)


def seal(world: World, letter: str, sealed: str) -> str:
    """An image that we committed on a pulled one."""
    container = docker("create", world.name(letter))
    docker("cp", __file__, f"{container}:/sealed")
    docker("commit", "-c", f"LABEL {RUN_LABEL}=", container, world.name(sealed))
    docker("rm", container)
    return world.name(sealed)


def test_what_was_sealed_on_an_image_goes_with_it(world: World) -> None:
    world.pull("a")
    image = docker("inspect", "-f", "{{.Id}}", world.name("a"))
    seal(world, "a", "s")
    refusal(world.images(keep_free=NOTHING), world.name("z"))
    assert world.here() == ""
    assert subprocess.run(["docker", "inspect", image], capture_output=True).returncode != 0


def test_an_image_is_left_alone_when_a_container_uses_what_was_sealed_on_it(world: World) -> None:
    world.pull("a")
    container = docker("create", seal(world, "a", "s"))
    seal(world, "a", "t")
    try:
        refusal(world.images(keep_free=NOTHING), world.name("z"))
        assert world.here() == "ast"
    finally:
        docker("rm", container)


def test_what_we_pulled_is_known_to_the_next_process(world: World) -> None:
    world.pull("a")
    code = (
        "import sys, trio\n"
        "from pathlib import Path\n"
        "from sandboxes.registry import PulledImages\n"
        "images = PulledImages(print, keep_free=1 << 60, state=Path(sys.argv[1]))\n"
        "trio.run(images.ensure, sys.argv[2])\n"
    )
    argv = [sys.executable, "-c", code, str(world.state), world.name("z")]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=TEST_SECONDS)
    assert done.stdout == f"removed {world.name('a')} to make room\n"


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    state = tmp_path / "images.json"
    code = (
        "import sys, trio\n"
        "from pathlib import Path\n"
        "from sandboxes.registry import PulledImages\n"
        "async def main():\n"
        "    images = PulledImages(print, state=Path(sys.argv[1]))\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
        "    for number in range(100):\n"
        "        await images._note(f'{sys.argv[2]}{number}', {'Id': ''})\n"  # faster than registries pull
        "trio.run(main)\n"
    )
    argv = [sys.executable, "-c", code, str(state)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [subprocess.Popen([*argv, letter], cwd=REPOSITORY, **pipes) for letter in "ab"]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()  # it has started
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    assert [writer.wait(TEST_SECONDS) for writer in writers] == [0, 0]
    names = {f"{letter}{number}" for letter in "ab" for number in range(100)}
    assert set(json.loads(state.read_bytes())["images"]) == names


def test_a_broken_state_makes_nothing_ours(world: World) -> None:
    world.pull("a")
    world.state.write_text("{")
    refusal(world.images(keep_free=NOTHING), world.name("z"))
    assert world.here() == "a"


async def settled(world: World, letters: str) -> None:
    """Wait until the engine has exactly these images, and a little longer for one too many."""
    while world.here() != letters:
        await trio.sleep(0.05)
    await trio.sleep(0.3)
    assert world.here() == letters


def test_images_are_prefetched_in_order_up_to_a_number(world: World) -> None:
    images = world.images()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(images.prefetch, [world.name(letter) for letter in "aabcd"], 2)
            await settled(world, "ab")
            await images.ensure(world.name("a"))
            await settled(world, "abc")
            await images.ensure(world.name("d"))  # out of order: no longer to be prefetched
            await images.ensure(world.name("b"))

    run(main)
    assert world.said.count(f"pulling {world.name('d')}") == 1


def test_prefetching_passes_over_an_image_that_cannot_be_had(world: World) -> None:
    images = world.images()
    world.registry.answers = [404]

    async def main() -> None:
        await images.prefetch(["No Name", world.name("a"), world.name("b")], 2)

    run(main)
    assert world.here() == "b"
    world.registry.always = 404
    assert "manifest unknown" in refusal(images, world.name("a"))


def test_prefetching_does_not_remove_what_it_prefetched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        images = world.images(keep_free=1)
        await images.prefetch([f"{world.group}/a"], 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        await images.prefetch([world.name("b")], 2)
        assert world.here() == "a"
        with pytest.raises(ImageUnavailable):
            await images.ensure(world.name("c"))  # needed now, so the last resort
        assert world.here() == ""

    run(main)
