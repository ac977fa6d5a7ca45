"""Which files of a patch decide how tests run, and so are not the policy's to change.

Pure decisions on names and contents; :mod:`swe_env.grading` acts on them. Kinds of paths: *hidden* ones
belong to the hidden tests, whose version runs; *support* lies beside hidden tests and is put back without
blame; *artefacts* are compiled files, package metadata and look-alikes, left out without blame; *tampering*
changes what the test runner does and forfeits the reward.
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

RUNNER_FILES = re.compile(r"(conftest\.py|\.?pytest\.(ini|toml))$")
"""Names of files that exist to change how pytest runs the tests beside and below them."""

STARTUP_HOOKS = re.compile(r"(^|/)(site|user)customize(\.|/|$)|^(src/|lib/)?[^/]+\.pth$")
"""What Python runs when it starts, wherever the path leads."""

RUNNER_SETTINGS = {
    "pyproject.toml": ("tool.pytest", "tool.coverage"),
    "setup.cfg": ("tool:pytest", "pytest", "options.entry_points"),
    "tox.ini": ("pytest", "testenv"),
}
"""Files that hold runner settings among others, and the sections that are the runner's."""

IMPORT_ROOT = re.compile(r"^((?:src/|lib/)?([A-Za-z_]\w*))(?:$|\.py$|\.[\w.-]*so$|/(?:.*\.(?:py|so))?$)")
"""A module, package, extension or link at an import root, and what it is called."""

RUNNER_MODULES = re.compile(
    r"_?pytest|pluggy|iniconfig|packaging|py|attrs?|tomli|exceptiongroup|importlib_metadata|zipp"
    r"|typing_extensions|pygments|colorama|coverage|xdist|pytest_\w+"
)
"""Besides the standard library: new modules of these names could be loaded instead of the runner's own."""

ARTEFACTS = re.compile(r"(^|/)(__pycache__|[^/]+\.(egg|dist)-info)(/|$)|\.py[co]$", re.I)
"""Compiled modules, and metadata through which an installed package (or a forged one) adds plugins."""

TEST_DIRECTORY = re.compile(r"^_{0,2}(\w+_)?(tests?|testing)(_\w+)?_{0,2}$")


class Verdict(BaseModel):
    """What is to be put back before the hidden tests run."""

    model_config = ConfigDict(frozen=True)

    hidden: list[str] = []
    support: list[str] = []
    tampered: list[str] = []
    artefacts: list[str] = []
    unexamined: list[str] = []
    """Settings files changed: tampering if their runner sections changed, restored either way."""

    @property
    def restored(self) -> list[str]:
        return [*self.hidden, *self.support, *self.tampered, *self.artefacts, *self.unexamined]


def examine(paths: Iterable[str], *, hidden: set[str], gold: set[str], existing: set[str]) -> Verdict:
    """Sort a patch's paths. `hidden`: files of the hidden tests; `gold`: files the gold patch changes;
    `existing`: files of the baseline."""
    above = {folder for test in hidden for folder in _folders(test)}
    beside = {test_root for test in hidden if (test_root := _test_root(test))}
    roots = {match[1] for path in existing if (match := IMPORT_ROOT.match(path))}
    found: dict[str, list[str]] = {name: [] for name in Verdict.model_fields}
    for path in sorted(set(paths)):
        folder, name = posixpath.split(path)
        if path in hidden or path in above or not hidden.isdisjoint(_folders(path)):
            found["hidden"].append(path)
        elif path in gold:
            continue
        elif ARTEFACTS.search(path) or _is_lookalike(path, roots):
            found["artefacts"].append(path)
        elif STARTUP_HOOKS.search(path) or (folder in above and RUNNER_FILES.match(name)):
            found["tampered"].append(path)
        elif folder in above and name in RUNNER_SETTINGS:
            found["unexamined"].append(path)
        elif not beside.isdisjoint(_folders(path)):
            found["support"].append(path)
    return Verdict(**found)


def _folders(path: str) -> list[str]:
    """All folders that a path lies in; "" is the repository."""
    folders = [""]
    for index, letter in enumerate(path):
        if letter == "/":
            folders.append(path[:index])
    return folders


def _test_root(test: str) -> str | None:
    """The outermost folder of a hidden test that is for tests by its name: what lies in it serves tests."""
    for folder in _folders(test):
        if TEST_DIRECTORY.match(posixpath.basename(folder)):
            return folder
    return None


def _is_lookalike(path: str, existing_roots: set[str]) -> bool:
    """Whether a new file stands where Python would find it instead of its own or the runner's module.

    New is what counts: a repository may well have a package `test`, or be pytest's own.
    """
    match = IMPORT_ROOT.match(path)
    if match is None or match[1] in existing_roots:
        return False
    return match[2] in sys.stdlib_module_names or RUNNER_MODULES.fullmatch(match[2]) is not None


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
    content = content or b""  # no file has no sections
    wanted = RUNNER_SETTINGS[name]
    if name == "pyproject.toml":
        tool = tomllib.loads(content.decode()).get("tool", {})
        return {key: tool.get(key.removeprefix("tool.")) for key in wanted}
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(content.decode())
    return {key: dict(parser[key]) for key in wanted if parser.has_section(key)}
