"""Small repositories with one bug each, made from code: a task for every (split, index), always the same.

A task is one to three short modules, a problem in a few plain sentences, hidden pytest tests, the gold
patch, and in `metadata` the tool calls of an expert. The bugs come from :mod:`tasks.bugs`. What a hidden
test asserts is found by running the right and the wrong version on the same calls: those that differ fail
before the fix, those that agree guard what already worked.

The splits cannot share a task: the name of the function to mend decides which split may use it.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tasks.bugs import FAMILIES, Draft
from tasks.draw import VERBS, Draw
from tasks.jsonl import load_tasks, save_tasks
from tasks.model import InlineRepo, PytestTests, Task
from tasks.two_files import TwoFiles, two_files

Split = Literal["train", "heldout", "shipped"]

FAMILY_NAMES = (*FAMILIES, "two_files")
SHIPPED_FILE = Path(__file__).with_name("shipped.jsonl")
SHIPPED = (0, 11, 2, 13, 4, 5, 26, 7, 8, 9, 21, 12, 28, 29)
"""Indices of the shipped tasks: every family, all four difficulties; each was read and solved by hand."""

TEST_SECONDS = 60.0
ASSERTS = 3
"""Most asserts in one hidden test."""
_LEVELS = ("plain", "guarded", "crowded")


def generate(split: Split, index: int) -> Task:
    """Task `index` (from 0) of a split. The same on every machine; about a millisecond."""
    if index < 0:
        raise ValueError(f"index {index} is negative: tasks are numbered from 0")
    # Families take turns, so that any run of ten tasks holds each once; so do the levels, ten tasks each.
    family = FAMILY_NAMES[index % 10]
    level = _LEVELS[index // 10 % 3]
    for attempt in range(1000):
        draw = Draw(f"{split}/{index}/{attempt}")
        name = _function_name(draw)
        if _owner(name) != split:
            continue
        if family == "two_files":
            plan = _plan_two_files(draw, two_files(draw, name), crowded=level == "crowded")
        else:
            plan = _plan(draw, name, FAMILIES[family].make(draw, name), level)
        if plan is not None:
            return _task(plan, split, index, family, level)
    raise AssertionError(f"no usable draw for {split} {index}: a family in tasks/bugs.py has too few calls")


def generate_many(split: Split, end: int, first: int = 0) -> list[Task]:
    """The tasks of a split from index `first` up to `end`, which is not included."""
    return [generate(split, index) for index in range(first, end)]


def shipped_tasks() -> list[Task]:
    """The tasks that come with the package, from their file."""
    return load_tasks(SHIPPED_FILE)


def make_shipped() -> list[Task]:
    """What :func:`shipped_tasks` must return; `python -m tasks.synthetic` writes the file again."""
    return [generate("shipped", index) for index in SHIPPED]


@dataclass
class _Plan:
    """A repository with a bug, on its way to becoming a task."""

    problem: str
    fixed: dict[str, str] = field(default_factory=dict[str, str])
    """Path -> text after the fix; edits undone give the broken repository."""
    edits: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """(path, bad, good)"""
    steps: list[str] = field(default_factory=list[str])
    """What an expert does: shell commands to read code with, and paths of files to write anew."""
    hidden: dict[str, str] = field(default_factory=dict[str, str])
    fail_to_pass: list[str] = field(default_factory=list[str])
    pass_to_pass: list[str] = field(default_factory=list[str])

    def broken(self) -> dict[str, str]:
        files = dict(self.fixed)
        for path, bad, good in self.edits:
            files[path] = files[path].replace(good, bad, 1)
        return files

    def add_test(self, module: str, name: str, body: str, *, fails: bool) -> None:
        """One hidden test in the hidden test file of a module."""
        path = f"tests/test_{module}.py"
        self.hidden[path] += f"\n\ndef {name}():\n{_indent(body)}\n"
        (self.fail_to_pass if fails else self.pass_to_pass).append(f"{path}::{name}")


def _plan(draw: Draw, name: str, draft: Draft, level: str) -> _Plan | None:
    """A repository around one draft, or None when the draw does not make a fair task."""
    good, bad = draft.code.replace("@@", draft.good), draft.code.replace("@@", draft.bad)
    right, wrong = _run(good, draft.calls), _run(bad, draft.calls)
    # `right` has each call once, in order.
    telling = [call for call in right if right[call] != wrong[call]]
    agreeing = [call for call in right if right[call] == wrong[call]]
    if len(telling) < 3 or any(outcome.startswith("raises") for outcome in right.values()):
        return None
    example, *telling = telling
    if len({right[call] for call in telling}) == 1 and not agreeing:
        return None  # returning one value would do

    module = draw.noun()
    package = draw.noun() if level == "crowded" else ""
    path = _path(package, module)
    helper = _helper(draw) if level != "plain" or not agreeing else None
    text = good
    if helper:
        text = draw.choice([f"{good}\n\n{helper.code}", f"{helper.code}\n\n{good}"])
    plan = _Plan(_problem(draw, name, "" if level == "crowded" else path, example, right, wrong))
    plan.fixed[path] = text
    if text.count(draft.good) != 1 or text.replace(draft.good, draft.bad).count(draft.bad) != 1:
        return None
    plan.edits.append((path, draft.bad, draft.good))
    find = [f"grep -rn 'def {name}' --include=*.py ."] if level == "crowded" else []
    plan.steps = [*find, f"cat ./{path}", path]

    exports = draft.exports + ([helper.exports[0]] if helper else [])
    plan.hidden[f"tests/test_{module}.py"] = (
        f"from {_dotted(package, module)} import {', '.join(sorted(exports))}\n"
    )
    first, second = telling[:ASSERTS], telling[ASSERTS : 2 * ASSERTS]
    plan.add_test(module, f"test_{name}", _asserts(first, right), fails=True)
    if len(second) > 1:
        plan.add_test(module, f"test_{name}_more", _asserts(second, right), fails=True)
    if agreeing:
        plan.add_test(module, f"test_{name}_keeps", _asserts(agreeing[:ASSERTS], right), fails=False)
    if helper:
        plan.add_test(module, f"test_{helper.exports[0]}", _helper_asserts(helper), fails=False)
    if level == "guarded" and helper:
        plan.fixed["tests/test_example.py"] = _visible_test(_dotted(package, module), helper)
    _furnish(draw, plan, package)
    return plan


def _plan_two_files(draw: Draw, change: TwoFiles, *, crowded: bool) -> _Plan | None:
    package = draw.noun() if crowded else ""
    first, second = _path(package, change.first), _path(package, change.second)
    problem = change.problem.format(first=f"./{first}", second=f"./{second}")
    plan = _Plan(problem, steps=[f"cat ./{first}", first, f"cat ./{second}", second])
    uses = _import(package, change.first) + "\n\n\n" if change.uses_first else ""
    plan.fixed[first] = change.first_code.replace("@@", change.first_edit[1])
    plan.fixed[second] = uses + change.second_code.replace("@@", change.second_edit[1])
    for path, (bad, good) in ((first, change.first_edit), (second, change.second_edit)):
        if plan.fixed[path].count(good) != 1 or plan.fixed[path].replace(good, bad).count(bad) != 1:
            return None
        plan.edits.append((path, bad, good))
    imports = "\n".join(sorted(_import(package, module) for module in (change.first, change.second)))
    plan.hidden[f"tests/test_{change.second}.py"] = imports + "\n"
    for number, body in enumerate(change.breaks, 1):
        plan.add_test(change.second, f"test_{change.second}_{number}", body, fails=True)
    for body in change.keeps:
        plan.add_test(change.second, f"test_{change.second}_keeps", body, fails=False)
    _furnish(draw, plan, package)
    return plan


def _furnish(draw: Draw, plan: _Plan, package: str) -> None:
    """What else is in the repository: in a package, other modules and a README."""
    # With this file pytest imports the modules from the root of the repository, however it is started.
    plan.fixed["tests/__init__.py"] = plan.hidden["tests/__init__.py"] = ""
    if not package:
        return
    plan.fixed[_path(package, "__init__")] = ""
    plan.fixed["README.md"] = (
        f"# {package}\n\nSmall functions around one {package}. The docstrings are right.\n"
    )
    for _ in range(draw.number(1, 3 - len(plan.edits))):
        other, helper = draw.noun(), _helper(draw)
        name = helper.exports[0]
        plan.fixed[_path(package, other)] = helper.code
        plan.hidden[f"tests/test_{other}.py"] = f"from {_dotted(package, other)} import {name}\n"
        plan.add_test(other, f"test_{name}", _helper_asserts(helper), fails=False)


def _visible_test(module: str, helper: Draft) -> str:
    """A test file of the repository's own: it passes, and asserts nothing that a hidden test does."""
    name = helper.exports[0]
    body = _indent(_asserts(helper.calls[2:3], _run(helper.code, helper.calls)))
    return f"from {module} import {name}\n\n\ndef test_{name}():\n{body}\n"


def _task(plan: _Plan, split: Split, index: int, family: str, level: str) -> Task:
    broken = plan.broken()
    short = "two" if family == "two_files" else FAMILIES[family].short
    difficulty = 4 if family == "two_files" else FAMILIES[family].difficulty + (level == "crowded")
    calls: list[dict[str, Any]] = []
    for step in plan.steps:
        if step in broken:
            anew = {"command": "create", "path": f"./{step}", "file_text": plan.fixed[step]}
            calls.append({"name": "edit", "arguments": anew})
        else:
            calls.append({"name": "bash", "arguments": {"command": step}})
    calls.append({"name": "submit", "arguments": {}})
    return Task(
        id=f"{short}-{split}-{index:06d}",
        source="shipped" if split == "shipped" else "synthetic",
        problem_statement=plan.problem,
        image=InlineRepo(files=dict(sorted(broken.items()))),
        tests=PytestTests(files=dict(sorted(plan.hidden.items()))),
        fail_to_pass=plan.fail_to_pass,
        pass_to_pass=plan.pass_to_pass,
        gold_patch=_diff(broken, plan.fixed),
        test_timeout=TEST_SECONDS,
        metadata={"family": family, "difficulty": difficulty, "demonstration": calls},
    )


def _function_name(draw: Draw) -> str:
    words = [draw.choice(VERBS), *(draw.noun() for _ in range(draw.number(1, 2)))]
    return "_".join(words)


def _owner(name: str) -> Split:
    """The only split in which a function of this name may be the one to mend."""
    match zlib.crc32(name.encode()) % 8:
        case 0:
            return "shipped"
        case 1 | 2:
            return "heldout"
        case _:
            return "train"


def _helper(draw: Draw) -> Draft:
    """A correct function (`good` is already in its code) that has nothing to do with the problem."""
    make: Callable[[Draw, str], Draft] = draw.choice([FAMILIES[name].make for name in _HELPER_FAMILIES])
    for _ in range(100):
        draft = make(draw, f"{draw.choice(VERBS)}_{draw.noun()}")
        draft = Draft(draft.code.replace("@@", draft.good), draft.good, draft.bad, draft.calls, draft.exports)
        outcomes = _run(draft.code, draft.calls)
        if not any(outcome.startswith("raises") for outcome in outcomes.values()):
            return draft
    raise AssertionError("no usable helper: a family in tasks/bugs.py is broken")


_HELPER_FAMILIES = ("operator", "comparison", "constant", "missing_return", "off_by_one")


def _helper_asserts(helper: Draft) -> str:
    return _asserts(helper.calls[:2], _run(helper.code, helper.calls))


def _problem(
    draw: Draw, name: str, path: str, call: str, right: Mapping[str, str], wrong: Mapping[str, str]
) -> str:
    where = f" in `./{path}`" if path else ""
    want, got = right[call], wrong[call]
    got = got if got.startswith("raises") else f"gives {got}"
    return draw.choice(
        [
            f"`{name}`{where} is wrong. `{call}` {got}, but should give {want}.",
            f"There is a bug in `{name}`{where}: `{call}` {got} where {want} is expected.",
            f"`{call}` should be {want}. It {got}. Please fix `{name}`{where}.",
            f"Fix `{name}`{where} so that it does what its docstring says. Now `{call}` {got}, not {want}.",
        ]
    )


def _run(code: str, calls: Iterable[str]) -> Mapping[str, str]:
    """Call -> `repr` of its value, or `raises Name`."""
    return _run_once(code, tuple(calls))


@lru_cache(maxsize=64)
def _run_once(code: str, calls: tuple[str, ...]) -> Mapping[str, str]:
    namespace: dict[str, Any] = {}
    exec(compile(code, "<draft>", "exec"), namespace)
    outcomes: dict[str, str] = {}
    for call in calls:
        try:
            outcomes[call] = repr(eval(call, namespace))
        except Exception as error:
            outcomes[call] = f"raises {type(error).__name__}"
    return outcomes


def _asserts(calls: Iterable[str], right: Mapping[str, str]) -> str:
    singletons = ("True", "False", "None")
    return "\n".join(
        f"assert {call} {'is' if right[call] in singletons else '=='} {right[call]}" for call in calls
    )


def _diff(before: dict[str, str], after: dict[str, str]) -> str:
    """A patch as `git diff` prints it, without the index lines."""
    parts: list[str] = []
    for path in sorted(after):
        if before[path] != after[path]:
            old, new = (text.splitlines(keepends=True) for text in (before[path], after[path]))
            parts.append(f"diff --git a/{path} b/{path}\n")
            parts.extend(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))
    return "".join(parts)


def _path(package: str, module: str) -> str:
    return f"{package}/{module}.py" if package else f"{module}.py"


def _dotted(package: str, module: str) -> str:
    return f"{package}.{module}" if package else module


def _import(package: str, module: str) -> str:
    return f"from {package} import {module}" if package else f"import {module}"


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.split("\n"))


if __name__ == "__main__":
    save_tasks(SHIPPED_FILE, make_shipped())
    print(f"wrote {len(SHIPPED)} tasks to {SHIPPED_FILE}")
