"""Git hygiene: what the agent may see of a repository's past, and what it changed.

Two rules hold everything up. **History is allowed, not cleaned**: :func:`seal` builds a new `.git`
from nothing but the objects reachable from the base commit, so refs, reflogs, stashes, packs, dangling
objects, alternates, hooks, configuration and submodule repositories of the image are gone because they
were never copied. **The agent owns `.git`, so we do not use it**: the working tree at the start is
written as one tree object into a store of our own, and :func:`capture` compares the final working tree
with that tree. Commits, `git init`, a deleted `.git`, hooks, filters and attributes change nothing.

The store lies inside the sandbox and holds nothing but the files that were there at the start.
Whoever damages it only damages their own patch.
"""

from __future__ import annotations

import posixpath
from importlib import resources

from pydantic import BaseModel, ConfigDict

from sandboxes.protocol import Sandbox, SandboxError

STORE = "/.swe-env/base.git"
"""Our own repository inside the sandbox: the files as they were when it was sealed."""

INCOMING = f"{STORE}/incoming"
"""The patch that is being applied."""

RECIPE = 3
"""Changes when sealing changes, so that images sealed the old way are not used again."""

MAX_FROZEN = 4 << 20
"""Largest start that is kept in memory [bytes]."""

MAX_PATHS = 5000
"""Most files that a patch may touch to be graded."""

MAX_PATCH = 32 << 20
"""Largest patch taken [bytes]. A larger one is build output, not work."""


class RepositoryError(SandboxError):
    """The repository cannot be sealed: the task's image is not what the task says (infrastructure)."""


class PatchError(SandboxError):
    """The working tree cannot be turned into a patch (what the agent left behind is the cause)."""


class Baseline(BaseModel):
    """The sealed start of a repository."""

    model_config = ConfigDict(frozen=True)

    workdir: str
    tree: str
    """Object id of the working tree as the task gives it, untracked files included."""


class Patch(BaseModel):
    """What changed between the baseline and now, byte for byte."""

    model_config = ConfigDict(frozen=True)

    data: bytes
    """Output of `git diff --binary`: bytes, because files are bytes. Empty when nothing changed."""
    paths: list[str] = []
    """Files changed, added or deleted (undecodable bytes in names as surrogate escapes)."""
    ignored: int = 0
    """New files and directories left out because the repository's .gitignore names them."""
    unreadable: int = 0
    """Files left out because they could not be read."""


async def seal(sandbox: Sandbox, workdir: str, base_commit: str | None) -> Baseline:
    """Leave only what `base_commit` can reach in `workdir`'s history, and record the working tree.

    With `base_commit=None` the directory is made a repository whose only commit is its content now.
    Changes that the image carries on top of the base commit are committed once more, with the base
    commit's date, so that the agent starts from a clean status. Raises :class:`RepositoryError`.
    """
    script = _script("seal.sh")
    env = {"WORKDIR": workdir, "BASE": base_commit or "", "STORE": STORE}
    result = await sandbox.run(script, env=env, cwd="/", timeout=900, session=False)
    last = result.text.strip().rsplit("\n", 1)[-1]
    if result.exit_code != 0 or not last.startswith("tree "):
        raise RepositoryError(
            f"cannot seal {workdir} at {base_commit or 'its content'}: {last or 'no output'}; "
            "check the task's image, workdir and base_commit"
        )
    return Baseline(workdir=workdir, tree=last.removeprefix("tree "))


async def freeze(sandbox: Sandbox, baseline: Baseline) -> bytes | None:
    """A sealed repository and its store as an archive, for :func:`thaw`; None if it is too large to be kept.

    To be taken before anybody else had the sandbox in hand.
    """
    env = {"WORKDIR": baseline.workdir, "STORE": STORE}
    # posix: with fractions of a second, by which git knows that a file was not touched
    script = 'tar -c --format=posix -C / -- "${WORKDIR#/}" "${STORE#/}" 2>/dev/null'
    result = await sandbox.run(script, env=env, cwd="/", timeout=60, session=False, output_limit=MAX_FROZEN)
    return None if result.exit_code or result.dropped else result.output


async def thaw(sandbox: Sandbox, frozen: bytes) -> None:
    """Lay a repository out as it was when it was frozen, in a sandbox of the same image."""
    result = await sandbox.run("tar -xp -C /", cwd="/", stdin=frozen, timeout=60, session=False)
    if result.exit_code != 0:
        raise RepositoryError(f"cannot lay the repository out: {result.text.strip()[-300:]}")


async def capture(sandbox: Sandbox, baseline: Baseline, *, timeout: float = 120.0) -> Patch:
    """The difference between the baseline and the working tree now, whatever happened to `.git`.

    Ends every process in the sandbox first, so that the tree holds still. Raises :class:`PatchError`
    when the sandbox is in no state to be read.
    """
    await sandbox.kill_all()
    env = {"WORKDIR": baseline.workdir, "TREE": baseline.tree, "STORE": STORE}
    result = await sandbox.run(_script("capture.sh"), env=env, cwd="/", timeout=timeout, session=False)
    words = result.text.strip().rsplit("\n", 1)[-1].split()
    if (
        result.exit_code != 0
        or len(words) != 3
        or words[0] != "captured"
        or not "".join(words[1:]).isdecimal()
    ):
        why = "timed out" if result.timed_out else result.text.strip().rsplit("\n", 1)[-1]
        raise PatchError(f"the working tree cannot be read: {why or 'no output'}")
    try:
        data = await sandbox.read(f"{STORE}/patch", limit=MAX_PATCH)
        names = await sandbox.read(f"{STORE}/names", limit=MAX_PATCH)
    except (SandboxError, OSError) as error:
        if type(error) is SandboxError or isinstance(error, OSError):
            raise PatchError(f"the patch cannot be taken out: {error}") from error
        raise
    return Patch(data=data, paths=_paths(names), ignored=int(words[1]), unreadable=int(words[2]))


EXACTLY = 'ours apply --binary --whitespace=nowarn "$STORE/incoming"'
"""How a patch of ours is applied: as it is, or not at all."""


async def apply(sandbox: Sandbox, baseline: Baseline, data: bytes, how: str = EXACTLY) -> Patch | str:
    """Apply a patch to the working tree; returns it with its paths, or git's reason why it does not apply.

    `how`: a shell script that applies :data:`INCOMING` in the working directory, and exits with 0 if it did.

    Names come from the tree and from what was written, so that a rename shows both ends and an ignored
    file does not hide. A missing final newline is added (by us, not by `how`): some tools strip it.
    """
    if how == EXACTLY and not data.endswith(b"\n"):
        data += b"\n"
    await sandbox.write(INCOMING, data)
    env = {"WORKDIR": baseline.workdir, "TREE": baseline.tree, "STORE": STORE, "HOW": how}
    result = await sandbox.run(_script("apply.sh"), env=env, cwd="/", timeout=300, session=False)
    if result.exit_code != 0:
        return result.text.strip() or f"git apply exited with {result.exit_code}"
    names = _paths(await sandbox.read(f"{STORE}/names", limit=MAX_PATCH))
    written = _paths(await sandbox.read(f"{STORE}/written", limit=MAX_PATCH))
    paths = {*names, *(path.removeprefix("./") for path in written)}
    if len(paths) > MAX_PATHS:
        return f"it touches {len(paths)} files, more than {MAX_PATHS}: build output, not work"
    return Patch(data=data, paths=sorted(paths))


async def restore(sandbox: Sandbox, baseline: Baseline, paths: list[str]) -> None:
    """Put files back as the baseline has them; those it does not have are removed."""
    if not paths:
        return
    env = {"WORKDIR": baseline.workdir, "TREE": baseline.tree, "STORE": STORE}
    listing = _listing(paths)
    # a folder on the way that was made a link would lead the removal astray
    folders = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
    await sandbox.write(f"{STORE}/folders", _listing(sorted(folders)))
    result = await sandbox.run(
        _script("restore.sh"), env=env, cwd="/", stdin=listing, timeout=120, session=False
    )
    if result.exit_code != 0:
        raise RepositoryError(f"cannot restore {len(paths)} protected files: {result.text.strip()[-300:]}")


async def at_start(sandbox: Sandbox, baseline: Baseline, path: str) -> bytes | None:
    """A file's content in the baseline; None if it has none."""
    env = {"WORKDIR": baseline.workdir, "OBJECT": f"{baseline.tree}:{path}", "STORE": STORE}
    script = _script() + 'ours cat-file blob "$OBJECT" 2>/dev/null'
    result = await sandbox.run(script, env=env, cwd="/", timeout=60, session=False, output_limit=MAX_PATCH)
    return result.output if result.exit_code == 0 else None


async def names_at_start(sandbox: Sandbox, baseline: Baseline) -> set[str]:
    """The paths of all files of the baseline."""
    env = {"WORKDIR": baseline.workdir, "TREE": baseline.tree, "STORE": STORE}
    script = _script() + 'ours ls-tree -r -z --name-only "$TREE"'
    result = await sandbox.run(script, env=env, cwd="/", timeout=60, session=False, output_limit=MAX_PATCH)
    if result.exit_code != 0 or result.truncated:
        raise RepositoryError(f"cannot list the start of {baseline.workdir}: {result.text[-200:].strip()}")
    return set(_paths(result.output))


async def lay_out(sandbox: Sandbox, workdir: str, files: dict[str, str]) -> None:
    """Write text files below `workdir`, in place of whatever is there.

    Raises `ValueError` for a path that leads out of it.
    """
    for path, text in files.items():
        target = posixpath.normpath(posixpath.join(workdir, path))
        if not target.startswith(workdir.rstrip("/") + "/"):
            raise ValueError(f"{path!r} leads out of {workdir}: use a relative path without '..'")
        await sandbox.write(target, text.encode())


def _script(name: str = "") -> str:
    """A script with the settings that keep the agent's and the image's git configuration out."""
    scripts = resources.files("sandboxes") / "scripts"
    return "".join((scripts / part).read_text() for part in ("git_env.sh", name) if part)


def _listing(paths: list[str]) -> bytes:
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)


def printable(path: str) -> str:
    """A path for records and people: bytes that are not text become \\xNN."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _paths(names: bytes) -> list[str]:
    return [name.decode("utf-8", "surrogateescape") for name in names.split(b"\0") if name]
