"""Tasks that do not prove anything are found before they are learnt from."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.loop import End
from swe_env.episode import Episode
from swe_env.grading import Grade
from swe_env.validate import judge, load_quarantine
from tasks.jsonl import save_tasks
from tasks.model import InlineRepo, PytestTests
from tests.swe_env.conftest import FAILS, FIXED, HIDDEN, TESTS, make_patch, make_task
from tests.swe_env.test_cli import call, refusal


def graded(by: str, number: int, resolved: bool | None) -> Episode:
    grade = (
        None if resolved is None else Grade(resolved=resolved, reward=float(resolved), reason="one failed")
    )
    return Episode(
        id=f"t--{by}--{number}",
        task_id="t",
        group_id="g",
        policy=by,
        end=End.GRADER_ERROR if resolved is None else End.SUBMITTED,
        error="the engine is gone" if resolved is None else "",
        reward=None if resolved is None else float(resolved),
        grade=grade,
    )


@pytest.mark.parametrize(
    ("gold", "note", "reason"),
    [
        ([True, True], [False, False], None),
        ([True, False], [False, False], "its gold patch is flaky: failed 1 of 2 times, one failed"),
        ([False, False], [False, False], "its gold patch does not solve it: failed 2 of 2 times, one failed"),
        ([True, True], [False, True], "it is solved without a fix: 1 of 2 times"),
        ([True, None], [False, False], None),
    ],
)
def test_what_gradings_say_against_a_task(
    gold: list[bool | None], note: list[bool | None], reason: str | None
) -> None:
    episodes = [graded("gold", number, one) for number, one in enumerate(gold)]
    episodes += [graded("note", number, one) for number, one in enumerate(note)]
    assert judge(episodes) == ({} if reason is None else {"t": reason}, [])


def test_what_infrastructure_kept_from_being_judged_is_listed_apart() -> None:
    assert judge([graded("gold", 0, None), graded("note", 0, False)]) == ({}, ["t"])


@pytest.mark.docker
def test_untrustworthy_tasks_are_listed_with_their_reasons(tmp_path: Path, base_image: str) -> None:
    beside = make_patch({"calc.py": FIXED}, {"other.py": b"x = 1\n"}).decode()
    passing = TESTS.replace("== 3", "== 2")
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "validation"
    save_tasks(
        tasks,
        [
            make_task(id="good"),
            make_task(id="hollow", image=InlineRepo(files={"calc.py": FIXED}), gold_patch=beside),
            make_task(id="wrong", tests=PytestTests(files={HIDDEN: passing})),
        ],
    )
    done = call("tasks", "validate", tasks, "--out", out, "--n", "2")
    assert done.returncode == 0, done
    found = load_quarantine(out / "quarantine.json")
    assert found.runs == 2
    assert found.reasons == {
        "hollow": "it is solved without a fix: 2 of 2 times",
        "wrong": "its gold patch does not solve it: failed 2 of 2 times, "
        f"1 of 2 required tests did not pass, first {FAILS}",
    }


def test_a_file_that_is_no_quarantine_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text("{}")
    arguments = ("--dataset", "x/y", "--gold", "--out", tmp_path / "o", "--quarantine", path)
    assert "is no quarantine list" in refusal(call("eval", *arguments))
