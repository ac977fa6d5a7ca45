"""Which files of a patch decide how tests run, and so are not the policy's to change.

Pure decisions on names and contents; :mod:`swe_env.grading` acts on them. Three kinds:
*hidden* paths belong to the hidden tests, whose version runs; *tampering* changes what the test runner
does and forfeits the reward; *artefacts* are compiled files that could stand in for source.
A file that the gold patch itself changes is the task's to change, and so the policy's.
"""

from __future__ import annotations

import configparser
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

RUNNER_HOOKS = re.compile(r"(^|/)(conftest\.py|\.?pytest\.(ini|toml)|(site|user)customize\.py|[^/]+\.pth)$")
"""Files that exist to change how Python or pytest runs."""

RUNNER_SETTINGS = {
    "pyproject.toml": ("tool.pytest", "tool.coverage"),
    "setup.cfg": ("tool:pytest", "pytest", "options.entry_points"),
    "tox.ini": ("pytest", "testenv"),
}
"""Files that hold runner settings among others, and the sections that are the runner's."""

IMPORT_ROOT = re.compile(r"^(?:src/|lib/)?([A-Za-z_]\w*)(?:\.py$|/)")
"""What a module or package at an import root is called."""

RUNNER_MODULES = re.compile(r"_?pytest|pluggy|iniconfig|packaging|py|coverage|xdist|pytest_\w+")
"""Besides the standard library: new modules of these names would be loaded instead of the runner's own."""

ARTEFACTS = re.compile(r"(^|/)(__pycache__|[^/]+\.(egg|dist)-info)/|\.py[co]$")
"""Compiled modules, and metadata through which an installed package (or a forged one) adds plugins."""


class Verdict(BaseModel):
    """What is to be put back before the hidden tests run."""

    model_config = ConfigDict(frozen=True)

    hidden: list[str] = []
    tampered: list[str] = []
    artefacts: list[str] = []
    unexamined: list[str] = []
    """Settings files changed: tampering if their runner sections changed, restored either way."""

    @property
    def restored(self) -> list[str]:
        return [*self.hidden, *self.tampered, *self.artefacts, *self.unexamined]


def examine(paths: Iterable[str], *, hidden: set[str], gold: set[str], existing: set[str]) -> Verdict:
    """Sort a patch's paths. `hidden`: files of the hidden tests; `gold`: files the gold patch changes;
    `existing`: those of :func:`lookalikes` that the baseline has."""
    found: dict[str, list[str]] = {"hidden": [], "tampered": [], "artefacts": [], "unexamined": []}
    for path in sorted(set(paths)):
        if path in hidden or any(test.startswith(path + "/") for test in hidden):
            found["hidden"].append(path)
        elif path in gold:
            continue
        elif ARTEFACTS.search(path):
            found["artefacts"].append(path)
        elif RUNNER_HOOKS.search(path) or any(root not in existing for root in lookalikes([path])):
            found["tampered"].append(path)
        elif posixpath.basename(path) in RUNNER_SETTINGS:
            found["unexamined"].append(path)
    return Verdict(**found)


def lookalikes(paths: Iterable[str]) -> set[str]:
    """Import roots (`src/json`, `pytest.py`) that would stand in for the runner's or Python's own modules.

    They do so only if they are new: a repository may well have a package `test`, or be pytest's own.
    """
    roots: set[str] = set()
    for path in paths:
        match = IMPORT_ROOT.match(path)
        if match and (match[1] in sys.stdlib_module_names or RUNNER_MODULES.fullmatch(match[1])):
            roots.add(path[: match.end()].rstrip("/"))
    return roots


def settings_changed(path: str, before: bytes | None, after: bytes | None) -> bool:
    """Whether the runner's sections of a settings file differ. What cannot be read counts as changed."""
    name = posixpath.basename(path)
    try:
        return _sections(name, before) != _sections(name, after)
    except (ValueError, configparser.Error):
        return before != after


def patch_paths(patch: str) -> set[str]:
    """The files that a unified diff names (old and new names)."""
    names: set[str] = set()
    for old, new in re.findall(r"^diff --git a/(.+?) b/(.+)$", patch, re.M):
        names |= {old, new}
    for name in re.findall(r"^(?:\+\+\+ b|--- a)/(.+?)(?:\t.*)?$", patch, re.M):
        names.add(name)
    return names


def _sections(name: str, content: bytes | None) -> object:
    if content is None:
        return {}
    wanted = RUNNER_SETTINGS[name]
    if name == "pyproject.toml":
        tool = tomllib.loads(content.decode()).get("tool", {})
        return {key: tool.get(key.removeprefix("tool.")) for key in wanted}
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(content.decode())
    return {key: dict(parser[key]) for key in wanted if parser.has_section(key)}
