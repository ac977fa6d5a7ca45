"""History shows nothing newer than the base commit; a patch is what changed, whatever git was told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from sandboxes.protocol import Sandbox
from sandboxes.repository import Baseline, Patch, apply, capture, restore, seal
from tests.sandboxes.conftest import Sandboxed

pytestmark = pytest.mark.docker

HISTORY = """
set -e
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q /testbed && cd /testbed && git symbolic-ref HEAD refs/heads/trunk
at() { export GIT_AUTHOR_DATE="$1" GIT_COMMITTER_DATE="$1"; }
at 2020-01-01T00:00:00Z
printf 'one\\n' >a.py; printf '*.log\\nbuild/\\n' >.gitignore; printf 'x\\n' >kept.log
git add -f . ; git commit -qm first
git tag -a v1 -m v1
at 2021-01-01T00:00:00Z
printf 'two\\n' >a.py; mkdir -p pkg; printf 'b\\n' >pkg/b.py; git add .; git commit -qm base; git tag base
at 2022-01-01T00:00:00Z
git tag -a late -m 'made later: FIXTEXT' v1^{}
printf 'FIXTEXT\\n' >a.py; git commit -qam fix; git tag -a v2 -m v2; git branch future
git checkout -q -b other; printf 'FIXTEXT dangling\\n' >c.py; git add .; git commit -qm dangling
git checkout -q trunk; git branch -qD other
printf 'FIXTEXT stashed\\n' >a.py; git stash -q
git notes add -m FIXTEXT; git config alias.fix '!echo FIXTEXT'
git clone -q . vendored; git -C vendored checkout -q base
git reset -q --hard base
git rev-parse base
"""

Body = Callable[[Sandbox, Baseline], Awaitable[None]]


@pytest.fixture
def sealed(sandboxed: Sandboxed) -> Callable[[Body], None]:
    """Run a body in a sandbox whose repository with a rich past is sealed at its base commit."""

    def run(body: Body) -> None:
        async def in_sandbox(sandbox: Sandbox) -> None:
            made = await sandbox.run(HISTORY, session=False)
            assert made.exit_code == 0, made.text
            await body(sandbox, await seal(sandbox, "/testbed", made.text.split()[-1]))

        sandboxed(in_sandbox)

    return run


async def text(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.run(command, cwd="/testbed")).text


def test_no_object_of_the_future_is_left_anywhere(sealed: Callable[[Body], None]) -> None:  # T09
    async def body(sandbox: Sandbox, baseline: Baseline) -> None:
        every = "git cat-file --batch-all-objects --batch --unordered 2>/dev/null | grep -ac FIXTEXT"
        assert (await text(sandbox, every)).strip() == "0"
        assert (
            await text(sandbox, "grep -rn FIXTEXT .git vendored/.git 2>/dev/null; git reflog; git stash list")
        ) == ""
        newest = await text(sandbox, "git log --all --format=%ct | sort -n | tail -1")
        assert int(newest) == 1609459200

    sealed(body)


def test_alternates_and_submodules_lead_to_no_future_either(sandboxed: Sandboxed) -> None:
    """A repository with a submodule, both with a future, whose objects lie in an alternate store."""
    script = """
    set -e
    export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
    git config --global protocol.file.allow always
    git init -q /part && cd /part && echo part >part.py && git add . && git commit -qm part
    git init -q /origin && cd /origin && git submodule -q add /part part
    echo 1 >a.py && git add . && git commit -qm base
    git tag base; echo FIXTEXT >a.py; git commit -qam fix
    cd /part && echo FIXTEXT >part.py && git commit -qam fix
    git clone -qs /origin /testbed && cd /testbed && git checkout -q base && git submodule -q update --init
    git -C part fetch -q; cat .git/objects/info/alternates >&2; git rev-parse base
    """

    async def body(sandbox: Sandbox) -> None:
        made = await sandbox.run(script, session=False)
        assert made.exit_code == 0, made.text
        baseline = await seal(sandbox, "/testbed", made.text.split()[-1])
        await sandbox.run("rm -rf /origin /part")
        assert await text(sandbox, "find . -name .git -o -name alternates -o -name modules") == "./.git\n"
        every = "git cat-file --batch-all-objects --batch --unordered | grep -ac FIXTEXT; grep -r FIXTEXT ."
        assert (await text(sandbox, every)).strip() == "0"
        assert await text(sandbox, "cat part/part.py; git status --porcelain; git fsck --full") == "part\n"
        await sandbox.write("/testbed/part/part.py", b"mine\n")
        assert (await capture(sandbox, baseline)).paths == ["part/part.py"]

    sandboxed(body)


def test_a_worktree_does_not_lead_to_its_repositorys_future(sandboxed: Sandboxed) -> None:
    script = HISTORY + "git -C /testbed worktree add -q /tree base; git -C /tree rev-parse HEAD"

    async def body(sandbox: Sandbox) -> None:
        made = await sandbox.run(script, session=False)
        await seal(sandbox, "/tree", made.text.split()[-1])
        found = await sandbox.run(
            "git --git-dir=/testbed/.git log -p trunk 2>&1; git -C /tree log --format=%s"
        )
        assert "FIXTEXT" not in found.text
        assert found.text.split()[-2:] == ["base", "first"]

    sandboxed(body)


def test_the_past_is_still_there_with_its_branch_and_old_tags(sealed: Callable[[Body], None]) -> None:
    async def body(sandbox: Sandbox, baseline: Baseline) -> None:
        assert (await text(sandbox, "git log --format=%s trunk")).split()[-2:] == ["base", "first"]
        assert set((await text(sandbox, "git tag")).split()) == {"v1", "base", "late"}
        assert (await text(sandbox, "git describe --tags --match 'v*'")).startswith("v1-")
        assert (
            await text(sandbox, "git fsck --full 2>&1 | grep -v dangling; git cat-file -t late")
        ).strip() == "commit"

    sealed(body)


def test_the_start_is_clean_and_changes_of_the_image_are_not_in_the_patch(
    sandboxed: Sandboxed,
) -> None:  # T18
    async def body(sandbox: Sandbox) -> None:
        made = await sandbox.run(
            HISTORY + "echo dirty >>a.py; echo new >new.py; git rev-parse base", session=False
        )
        baseline = await seal(sandbox, "/testbed", made.text.split()[-1])
        assert (await text(sandbox, "git status --porcelain; cat a.py")) == "two\ndirty\n"
        await sandbox.write("/testbed/mine.py", b"mine\n")
        assert (await capture(sandbox, baseline)).paths == ["mine.py"]

    sandboxed(body)


EVERYTHING = r"""
printf 'new file, no newline' >new.py; rm pkg/b.py; mkdir -p d; mv a.py d/renamed.py
printf '\000\001\377binary' >blob.bin; : >empty.py; printf 'a\r\nb\r\n' >crlf.txt; ln -s d/renamed.py link
printf '#!/bin/sh\n' >tool; chmod 755 tool
printf 'x y' >"sp ace.py"; printf q >"$(printf 'tab\there')"; printf u >ünï.py
"""


@pytest.mark.parametrize(
    "afterwards",
    [
        "true",
        "git add -A && git -c user.name=x -c user.email=x@y commit -qm work",
        "git add -A",
        "rm -rf .git",
        "rm -rf .git && git init -q . && git add -A && git -c user.name=x -c user.email=x@y commit -qm work",
        "git config core.autocrlf true; git config core.fileMode false; "
        "git config filter.x.clean 'sed s/a/b/'; mkdir -p .git/info; "
        "printf '* filter=x\n' >.git/info/attributes; printf '*.py\n' >.git/info/exclude",
        "printf '#!/bin/sh\nrm -rf /testbed/*\n' >.git/evil; git config core.fsmonitor /testbed/.git/evil",
    ],
    ids=["left", "committed", "staged", "git deleted", "git init", "configuration", "fsmonitor"],
)
def test_a_patch_brings_another_start_to_the_same_bytes(sandboxed: Sandboxed, afterwards: str) -> None:  # T17
    listing = (
        r"find . -name .git -prune -o \( -type f -o -type l \) -printf '%p %y %m %l ' "
        r"-a \( -type l -printf '\n' -o -exec sha1sum {} \; \) | grep -v kept | sort"
    )

    async def body(sandbox: Sandbox) -> None:
        made = await sandbox.run(HISTORY + "rm -rf vendored; git rev-parse base", session=False)
        commit = made.text.split()[-1]
        baseline = await seal(sandbox, "/testbed", commit)
        await sandbox.run("cp -a /testbed /other", session=False)
        done = await sandbox.run(EVERYTHING + afterwards, cwd="/testbed", session=False)
        assert done.exit_code == 0, done.text
        patch = await capture(sandbox, baseline)
        wanted = (await sandbox.run(listing, cwd="/testbed", session=False)).text
        await sandbox.run("rm -rf /testbed && mv /other /testbed", cwd="/", session=False)
        applied = await apply(sandbox, baseline, patch.data)
        assert isinstance(applied, Patch), applied
        assert (await sandbox.run(listing, cwd="/testbed", session=False)).text == wanted
        assert set(applied.paths) == set(patch.paths)

    sandboxed(body)


def test_ignored_files_are_counted_and_left_out_but_tracked_ones_are_not(
    sealed: Callable[[Body], None],
) -> None:  # T13
    async def body(sandbox: Sandbox, baseline: Baseline) -> None:
        await sandbox.run(
            "mkdir build; echo o >build/o; echo l >x.log; echo y >kept.log; echo fix >a.py", cwd="/testbed"
        )
        patch = await capture(sandbox, baseline)
        assert (patch.paths, patch.ignored) == (["a.py", "kept.log"], 2)

    sealed(body)


def test_files_in_a_nested_repository_are_files(sealed: Callable[[Body], None]) -> None:
    async def body(sandbox: Sandbox, baseline: Baseline) -> None:
        await sandbox.run("git init -q lib && echo n >lib/n.py && git -C lib add . ", cwd="/testbed")
        assert (await capture(sandbox, baseline)).paths == ["lib/n.py"]
        assert (await sandbox.run("test -d lib/.git", cwd="/testbed")).exit_code == 0

    sealed(body)


def test_an_edit_in_the_same_second_and_of_the_same_size_is_seen(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write("/testbed/a.py", b"x = 1\n")
        baseline = await seal(sandbox, "/testbed", None)
        await sandbox.write("/testbed/a.py", b"x = 2\n")
        await sandbox.run("sleep 1.1")
        assert (await capture(sandbox, baseline)).paths == ["a.py"]

    sandboxed(body)


def test_nothing_changed_is_an_empty_patch(sealed: Callable[[Body], None]) -> None:
    async def body(sandbox: Sandbox, baseline: Baseline) -> None:
        assert (await capture(sandbox, baseline)).data == b""

    sealed(body)


def test_a_patch_that_lost_its_last_newline_still_applies_exactly(
    sealed: Callable[[Body], None],
) -> None:  # T15
    async def body(sandbox: Sandbox, baseline: Baseline) -> None:
        await sandbox.write("/testbed/a.py", b"two\nand a line without an end")
        patch = await capture(sandbox, baseline)
        await restore(sandbox, baseline, patch.paths)
        assert isinstance(await apply(sandbox, baseline, patch.data.rstrip(b"\n")), Patch)
        assert await sandbox.read("/testbed/a.py") == b"two\nand a line without an end"

    sealed(body)


def test_a_patch_that_does_not_apply_says_why_and_changes_nothing(sealed: Callable[[Body], None]) -> None:
    async def body(sandbox: Sandbox, baseline: Baseline) -> None:
        wrong = b"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-nine\n+ten\n"
        assert "a.py" in str(await apply(sandbox, baseline, wrong))
        assert (await capture(sandbox, baseline)).data == b""

    sealed(body)


def test_restore_undoes_edits_creations_deletions_and_links(sealed: Callable[[Body], None]) -> None:
    async def body(sandbox: Sandbox, baseline: Baseline) -> None:
        await sandbox.run("rm -rf pkg; ln -s /tmp pkg; echo z >a.py; echo n >n.py", cwd="/testbed")
        await restore(sandbox, baseline, (await capture(sandbox, baseline)).paths)
        assert (await capture(sandbox, baseline)).data == b""

    sealed(body)
