"""Generated tasks: reproducible, disjoint, balanced, fast, and true (their tests decide as promised)."""

from __future__ import annotations

import builtins
import difflib
import json
import keyword
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tasks.draw import NOUNS, VERBS
from tasks.model import InlineRepo, PytestTests, Task
from tasks.synthetic import FAMILY_NAMES, generate, generate_many, make_shipped, shipped_tasks

MANY = 2000


@pytest.fixture(scope="module")
def train() -> list[Task]:
    return generate_many("train", MANY)


@pytest.fixture(scope="module")
def heldout() -> list[Task]:
    return generate_many("heldout", MANY)


def files(task: Task) -> dict[str, str]:
    assert isinstance(task.image, InlineRepo)
    return task.image.files


def hidden(task: Task) -> dict[str, str]:
    assert isinstance(task.tests, PytestTests)
    return task.tests.files


def text(task: Task) -> str:
    return json.dumps([files(task), task.problem_statement])


def test_the_same_index_is_the_same_task_everywhere(train: list[Task]) -> None:
    script = "from tasks.synthetic import generate; print(generate('train', 7).model_dump_json())"
    elsewhere = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "5"},
        capture_output=True,
        check=True,
    )
    assert Task.model_validate_json(elsewhere.stdout) == train[7] == generate("train", 7)


def test_all_tasks_are_different_and_no_split_sees_another(train: list[Task], heldout: list[Task]) -> None:
    assert len({text(task) for task in train}) == MANY
    assert len({text(task) for task in heldout}) == MANY
    assert not {text(task) for task in train} & {text(task) for task in heldout}
    assert not {text(task) for task in shipped_tasks()} & {text(task) for task in train + heldout}
    assert len({task.id for task in train + heldout + shipped_tasks()}) == 2 * MANY + len(shipped_tasks())


def test_no_function_to_mend_is_in_two_splits(train: list[Task], heldout: list[Task]) -> None:
    def targets(tasks: list[Task]) -> set[str]:
        return {
            task.fail_to_pass[0].rpartition("test_")[2]
            for task in tasks
            if task.metadata["family"] == "operator"
        }

    assert not targets(train) & targets(heldout)


def test_families_and_difficulties_are_balanced(train: list[Task], heldout: list[Task]) -> None:
    for tasks in (train, heldout):
        assert Counter(task.metadata["family"] for task in tasks) == dict.fromkeys(FAMILY_NAMES, MANY // 10)
        difficulties = Counter(task.metadata["difficulty"] for task in tasks)
        assert set(difficulties) == {1, 2, 3, 4}
        assert min(difficulties.values()) >= MANY // 10


def test_a_thousand_tasks_take_less_than_three_seconds() -> None:
    started = time.process_time()
    generate_many("train", 1000)
    assert time.process_time() - started < 3


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        generate("train", -1)


def test_the_policy_sees_neither_tests_nor_patch_nor_demonstration(train: list[Task]) -> None:
    for task in train[:100]:
        seen = task.view().model_dump_json()
        assert "demonstration" not in seen
        assert "gold_patch" not in seen
        assert not any(name in seen for name in task.fail_to_pass)
        for _, text in written(task):
            assert json.dumps(text)[1:-1] not in seen


def test_names_collide_with_nothing_python_knows() -> None:
    known = set(dir(builtins)) | set(keyword.kwlist) | set(sys.stdlib_module_names)
    assert not (set(NOUNS) | {noun.title() for noun in NOUNS}) & known
    assert len(set(NOUNS)) == len(NOUNS)
    assert not set(NOUNS) & set(VERBS)


def test_hidden_tests_have_several_inputs_and_are_not_in_the_repository(train: list[Task]) -> None:
    for task in train[:200]:
        shown = {path for path in files(task) if Path(path).name.startswith("test_")}
        assert not shown & set(hidden(task))
        assert task.pass_to_pass
        failing = {name.split("::")[1] for name in task.fail_to_pass}
        asserts = [
            line.strip()
            for body in "".join(hidden(task).values()).split("def ")[1:]
            if body.split("(")[0] in failing
            for line in body.splitlines()
            if "assert" in line
        ]
        assert len(set(asserts)) >= 2
        # The example of the problem is not among them: answering it alone is not enough.
        assert not any(line in task.problem_statement for line in asserts)


def test_an_expert_reads_a_file_then_writes_it_anew_and_changes_a_line_or_two(train: list[Task]) -> None:
    for task in train:
        calls = [call["arguments"] for call in task.metadata["demonstration"]]
        for place, (path, text) in enumerate(written(task)):
            before, after = files(task)[path].splitlines(), text.splitlines()
            changed = sum(part.startswith(("+ ", "- ")) for part in difflib.ndiff(before, after))
            assert 1 <= changed <= 3
            assert {"command": f"cat ./{path}"} in calls[: 2 * place + 2]


def test_the_shipped_file_is_what_the_generator_makes() -> None:
    shipped = shipped_tasks()
    assert shipped == make_shipped()
    assert len(shipped) == 14
    assert {task.metadata["family"] for task in shipped} == set(FAMILY_NAMES)
    assert {task.metadata["difficulty"] for task in shipped} == {1, 2, 3, 4}
    assert {task.source for task in shipped} == {"shipped"}


def test_gold_and_demonstration_solve_and_nothing_else_does(
    tmp_path: Path, train: list[Task], heldout: list[Task]
) -> None:
    tasks = train[:30] + heldout[30:60] + shipped_tasks()
    for task in tasks:
        lay(tmp_path / task.id / "before", files(task) | hidden(task))
        lay(tmp_path / task.id / "gold", files(task))
        applied = subprocess.run(
            ["git", "apply", "--whitespace=error"],
            cwd=tmp_path / task.id / "gold", input=task.gold_patch.encode(), capture_output=True, check=False,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)},
        )  # fmt: skip
        assert applied.returncode == 0, (task.id, applied.stderr)
        assert read(tmp_path / task.id / "gold") == demonstrated(task)
        lay(tmp_path / task.id / "gold", hidden(task))
    outcomes = run_all([tmp_path / task.id / state for task in tasks for state in ("before", "gold")])
    for task in tasks:
        required = set(task.fail_to_pass) | set(task.pass_to_pass)
        before, gold = (outcomes[str(tmp_path / task.id / state)] for state in ("before", "gold"))
        assert {name for name in required if before.get(name) == "failed"} == set(task.fail_to_pass), task.id
        assert {name for name in required if before.get(name) == "passed"} == set(task.pass_to_pass), task.id
        assert set(gold.values()) == {"passed"}, task.id
        assert required <= set(gold), task.id


def lay(root: Path, content: dict[str, str]) -> None:
    for path, body in content.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(body)


def read(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def written(task: Task) -> list[tuple[str, str]]:
    """Path and new text of each file that the expert writes."""
    calls: list[dict[str, Any]] = task.metadata["demonstration"]
    edits = [call["arguments"] for call in calls if call["name"] == "edit"]
    return [(edit["path"].removeprefix("./"), edit["file_text"]) for edit in edits]


def demonstrated(task: Task) -> dict[str, str]:
    """The repository after the expert's edits."""
    return files(task) | dict(written(task))


RUNNER = """
import json, os, sys, pytest
idle = "cacheprovider capture debugging doctest faulthandler junitxml logging pastebin stepwise unittest"
LEAN = [part for name in idle.split() for part in ("-p", "no:" + name)]
class Outcomes:
    def __init__(self): self.of = {}
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed: self.of[report.nodeid] = report.outcome
for root in sys.argv[1:]:
    reader, writer = os.pipe()
    if os.fork() == 0:  # each repository has modules of its own: none may stay imported
        os.chdir(root)
        outcomes = Outcomes()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        pytest.main(["-q", "--assert=plain", "--rootdir", root, *LEAN], plugins=[outcomes])
        os.write(writer, json.dumps(outcomes.of).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file: print(json.dumps([root, json.loads(file.read())]), flush=True)
    os.wait()
"""


def run_all(roots: list[Path]) -> dict[str, dict[str, str]]:
    """Root -> node id -> outcome, of the tests of many repositories, from one warm pytest."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, roots)],
        env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, check=True, timeout=300,
    )  # fmt: skip
    return dict(json.loads(line) for line in done.stdout.splitlines())
