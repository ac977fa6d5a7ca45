"""One start for agent and grader; what changed since is read by programs that the agent never had."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from sandboxes.oci import OciSandbox
from sandboxes.repository import Patch, capture
from swe_env.workspace import Workspace, Workspaces
from tests.conftest import Backend, connected, needs_oci
from tests.swe_env.conftest import make_task

pytestmark = pytest.mark.docker

TEST_SECONDS = 60
CHANGES = {
    "edits": "echo x >>calc.py; printf 'no newline' >new.txt; printf '\\0\\377' >binary; chmod +x calc.py",
    "deletions": "rm -rf * && echo all-new >only",
    "a replaced folder": "mkdir -p d/e; echo 1 >d/e/f; rm -rf tests; mkdir tests; mv d tests/d",
    "links and names": "ln -s /etc/passwd link; rm calc.py; ln -s link calc.py; echo 1 >$'a\\nb \\377'",
    "git of its own": "git add -A; git clone -q . nested; echo x >nested/y; rm -rf .git",
    "ignored": "printf '*.log\\n' >.gitignore; echo 1 >a.log; echo 1 >a.txt",
    "names too deep for a path": "deep() { local i; for i in {1..25}; do mkdir $1; cd $1; done; }; "
    "(deep $(printf 'n%.0s' {1..200}) && echo 1 >leaf); echo x >>calc.py",
    "nothing": "true",
}


def in_workspace(
    backend: Backend,
    base_image: str,
    body: Callable[[Workspace], Awaitable[None]],
) -> None:
    async def main() -> None:
        with trio.fail_after(TEST_SECONDS):
            async with connected(backend, "test-workspace") as engine:
                workspaces = Workspaces(engine, base_image, setup_once=True)
                async with workspaces.open(make_task().view()) as workspace:
                    await body(workspace)

    trio.run(main)


@needs_oci
@pytest.mark.parametrize("change", CHANGES)
def test_a_patch_read_apart_has_the_bytes_of_one_read_inside(base_image: str, change: str) -> None:
    async def body(workspace: Workspace) -> None:
        assert isinstance(workspace.sandbox, OciSandbox)
        result = await workspace.sandbox.run(CHANGES[change])
        assert result.exit_code == 0, result.text
        apart = await workspace.capture()
        inside = await capture(workspace.sandbox, workspace.baseline)
        assert apart == inside
        assert bool(apart.data) == (change != "nothing")

    in_workspace("oci", base_image, body)


@needs_oci
def test_a_git_that_the_agent_put_in_place_reads_nothing(base_image: str) -> None:
    async def body(workspace: Workspace) -> None:
        await workspace.sandbox.run("echo x >>calc.py; printf '#!/bin/sh\\nexit 1\\n' >$(command -v git)")
        assert (await workspace.capture()).paths == ["calc.py"]

    in_workspace("oci", base_image, body)


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_repository_that_was_frozen_a_patch_has_the_same_bytes(
    base_image: str, backend: Backend, change: str
) -> None:
    async def main() -> None:
        async with connected(backend, "test-frozen") as engine:
            workspaces, task = Workspaces(engine, base_image), make_task()
            states: list[bytes] = []
            patches: list[Patch] = []
            with trio.fail_after(TEST_SECONDS):
                for _ in ("laid out", "thawed"):
                    async with workspaces.open(task.view()) as workspace:
                        state = await workspace.sandbox.run(
                            "git status --porcelain; git log --format=fuller; git config -l; stat -c %n%a%F *"
                        )
                        states.append(state.output)
                        await workspace.sandbox.run(CHANGES[change])
                        patches.append(await workspace.capture())
            assert states[0] == states[1]
            assert patches[0] == patches[1]
            assert bool(patches[1].data) == (change != "nothing")

    trio.run(main)


def test_set_up_once_runs_the_setup_script_once(base_image: str, backend: Backend) -> None:
    task = make_task(setup="date +%s%N >stamp; sleep 0.1")

    async def main() -> None:
        stamps: set[bytes] = set()
        async with connected(backend, "test-setup-once") as engine:
            workspaces = Workspaces(engine, base_image, setup_once=True)

            async def look() -> None:
                async with workspaces.open(task.view()) as workspace:
                    stamps.add(await workspace.sandbox.read("stamp"))
                    assert not (await workspace.capture()).data

            with trio.fail_after(TEST_SECONDS):
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(look)
        assert len(stamps) == 1

    trio.run(main)
