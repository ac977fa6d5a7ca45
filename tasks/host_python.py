"""Finding a CPython of a wanted version on this machine, to copy into an image."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.protocol import ImageUnavailable


@dataclass(frozen=True)
class HostPython:
    """An installed CPython that works when its files lie at the same paths elsewhere."""

    prefix: Path
    version: str
    """Three parts: 3.9.18."""

    @property
    def executable(self) -> Path:
        return self.prefix / "bin" / f"python{_short(self.version)}"

    @property
    def library(self) -> Path:
        return self.prefix / "lib" / f"python{_short(self.version)}"

    def files(self) -> list[Path]:
        """What to copy, absolute: interpreter, standard library, headers; nobody's installed packages."""
        short = _short(self.version)
        kept = [*self.prefix.glob("bin/python*"), *self.prefix.glob(f"lib/libpython{short}*.so*")]
        for top in (self.library, *self.prefix.glob(f"include/python{short}*")):
            for folder, folders, names in os.walk(top):
                folders[:] = [
                    name for name in folders if name not in ("__pycache__", "site-packages", "test", "tests")
                ]
                kept += [Path(folder) / name for name in names if not name.endswith((".pyc", ".a"))]
        return sorted(kept)


def find_python(version: str, given: Path | None = None) -> HostPython:
    """A CPython `version` (two parts: 3.9) from `given` (its prefix or executable), PATH or pyenv.

    Shims are seen through: each candidate is asked for its own prefix. Debian's /usr/bin/python3 is not a
    candidate, for its files are strewn over the system. Raises :class:`ImageUnavailable`.
    """
    for candidate in _candidates(version, given):
        found = _ask(candidate)
        if (
            found
            and _short(found.version) == version
            and found.prefix != Path("/usr")
            and found.executable.exists()
        ):
            return found
    where = f"in {given}" if given else "on PATH or in pyenv"
    raise ImageUnavailable(
        f"no copyable python{version} {where}: `pyenv install {version}`, or name another with --python DIR"
    )


def _candidates(version: str, given: Path | None) -> Iterator[Path]:
    name = f"python{version}"
    if given is not None:
        yield from (given, given / name, given / "bin" / name)
        return
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield Path(folder) / name
    root = os.environ.get("PYENV_ROOT") or _output(["pyenv", "root"])
    if root:
        yield from sorted(Path(root).glob(f"versions/{version}.*/bin/{name}"), reverse=True)


def _ask(executable: Path) -> HostPython | None:
    if not executable.is_file() or not os.access(executable, os.X_OK):
        return None
    script = "import sys; print(sys.base_prefix); print('.'.join(map(str, sys.version_info[:3])))"
    lines = _output([str(executable), "-I", "-c", script]).splitlines()
    return HostPython(Path(lines[0]), lines[1]) if len(lines) == 2 else None


def _output(argv: list[str]) -> str:
    """Standard output, stripped; empty when the command is missing or fails."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])
