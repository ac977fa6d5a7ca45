"""SWE-bench rows become tasks or a one-line error; logs become grades, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.jsonl import TaskFileError
from tasks.model import ImageRef, SwebenchTests, Task
from tasks.swebench import eval_script, grade_log, load_swebench

F2P = "tests/test_a.py::test_new"
P2P = "tests/test_a.py::test_old[1]"
ROW: dict[str, Any] = {
    "instance_id": "owner__thing-1",
    "repo": "owner/thing",
    "base_commit": "0" * 40,
    "problem_statement": "It does not add.",
    "hints_text": "Use a plus.",
    "patch": "diff --git a/a.py b/a.py\n",
    "test_patch": "diff --git a/tests/test_a.py b/tests/test_a.py\n",
    "version": "1.0",
    "FAIL_TO_PASS": json.dumps([F2P]),
    "PASS_TO_PASS": [P2P],
    "image": "registry/owner_thing:1",
    "eval_script": "set -ux\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\n",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}
TASK = load_swebench([ROW])[0]


def log(*lines: str, code: int = 0) -> str:
    """What an evaluation prints, with `lines` as the output of the tests."""
    start, end = "+ : '>>>>> Start Test Output'", "+ : '>>>>> End Test Output'"
    return "\n".join(["+ cd /testbed", start, *lines, end, f">>>>> Test Exit Code: {code}", ""])


def problem(rows: list[dict[str, Any]], ids: list[str] | None = None) -> str:
    with pytest.raises(TaskFileError) as caught:
        load_swebench(rows, ids)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_pytest_calls_failed_is_not_passed_by_printing_so_later() -> None:
    forged = log(f"FAILED {F2P} - assert 2 == 3", f"PASSED {P2P}", f"PASSED {F2P}")
    assert grade_log(TASK, forged, strict=False).resolved
    grade = grade_log(TASK, forged)
    assert (grade.resolved, grade.statuses[F2P]) == (False, "FAILED")


def test_a_row_becomes_a_task() -> None:
    assert TASK.id == "owner__thing-1"
    assert TASK.image == ImageRef(name="registry/owner_thing:1")
    assert TASK.workdir == "/testbed"
    assert (TASK.fail_to_pass, TASK.pass_to_pass) == ([F2P], [P2P])
    assert isinstance(TASK.tests, SwebenchTests)
    assert TASK.tests.eval_script == eval_script(TASK)
    assert "SWEBENCH_TEST_EXIT_CODE=$?" in eval_script(TASK)


def test_a_task_survives_its_file_and_can_still_be_graded(tmp_path: Path) -> None:
    again = Task.model_validate_json(TASK.model_dump_json())
    assert grade_log(again, log(f"PASSED {F2P}", f"PASSED {P2P}")).resolved


def test_the_policy_sees_no_hints_tests_or_patch() -> None:
    seen = TASK.view().model_dump_json()
    assert "It does not add." in seen
    assert not any(secret in seen for secret in ("Use a plus", "diff --git", "test_new", "eval_script"))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_rows_come_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_text(json.dumps([ROW]) if suffix == ".json" else json.dumps(ROW) + "\n")
    assert load_swebench(path) == [TASK]


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[]", "\x00"])
def test_a_json_file_that_is_no_list_of_rows(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(TaskFileError, match=r"rows\.json: "):
        load_swebench(path)


def test_the_wanted_instances_in_the_wanted_order() -> None:
    rows = [ROW | {"instance_id": f"owner__thing-{n}"} for n in range(5)]
    assert [t.id for t in load_swebench(rows, ["owner__thing-3", "owner__thing-1"])] == [
        "owner__thing-3",
        "owner__thing-1",
    ]


def test_rows_of_an_older_format() -> None:
    row = {key: value for key, value in ROW.items() if key not in ("image", "log_parser")}
    assert (
        problem([row])
        == "row 1: owner__thing-1 lacks image, log_parser: rows of swebench 5 are needed, old ones lack it"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch": None}, "lacks patch"),
        ({"instance_id": None}, "'instance_id' is missing"),
        ({"instance_id": "a/b"}, "cannot be a file name"),
        ({"log_parser": "parse_log_pytset"}, "did you mean parse_log_pytest"),
        ({"eval_type": "maybe"}, "use pass_and_fail or fail_only"),
        ({"FAIL_TO_PASS": "[not json"}, "is malformed"),
        ({"FAIL_TO_PASS": []}, "is malformed"),
        ({"eval_script": 3}, "is malformed"),
    ],
)
def test_a_row_that_cannot_be_used(change: dict[str, Any], words: str) -> None:
    assert words in problem([ROW | change])


def test_an_unknown_instance_names_its_neighbours() -> None:
    assert "did you mean owner__thing-1?" in problem([ROW], ["owner__thing-11"])


def test_instances_twice() -> None:
    assert problem([ROW, ROW]) == "row 2: instance owner__thing-1 is already at row 1: remove one of them"
    assert "asked for 2 times" in problem([ROW], ["owner__thing-1"] * 2)
    assert problem([]) == "no SWE-bench rows were given"


def test_everything_passes() -> None:
    grade = grade_log(TASK, log(f"PASSED {F2P}", f"PASSED {P2P}"))
    assert (grade.resolved, grade.log_valid, grade.problem) == (True, True, "")
    assert grade.statuses == {F2P: "PASSED", P2P: "PASSED"}


@pytest.mark.parametrize(
    ("new", "old", "resolved"),
    [
        ("PASSED", "PASSED", True),
        ("XFAIL", "PASSED", True),
        ("PASSED", "SKIPPED", True),
        ("SKIPPED", "PASSED", False),
        ("FAILED", "PASSED", False),
        ("ERROR", "PASSED", False),
        ("PASSED", "FAILED", False),
        ("", "PASSED", False),
        ("PASSED", "", False),
        ("PASSED?", "PASSED", False),
    ],
)
def test_what_resolves(new: str, old: str, resolved: bool) -> None:
    lines = [f"{status} {test}" for status, test in ((new, F2P), (old, P2P)) if status]
    grade = grade_log(TASK, log(*lines, "FAILED tests/test_a.py::test_other", code=1))
    assert grade.log_valid
    assert grade.resolved is resolved
    expected = {"": "MISSING", "XFAIL": "PASSED", "PASSED?": "ERROR"}
    assert grade.statuses == {F2P: expected.get(new, new), P2P: expected.get(old, old)}


def test_a_bare_status_word_is_no_test() -> None:
    grade = grade_log(
        TASK, log("PASSED", "FAILED", "FAILED - ", "ERROR ", f"PASSED {F2P}", "SKIPPED", f"PASSED {P2P}")
    )
    assert grade.resolved
    assert set(grade.statuses) == {F2P, P2P}


@pytest.mark.parametrize(
    "noise", [b"\xff\xfe\x80".decode("utf-8", "replace"), "\udcff\udc80", "\x00\x1b[31m", "\u2028", "\r\r"]
)
def test_strange_characters_do_not_hide_the_results(noise: str) -> None:
    assert grade_log(TASK, log(noise, f"PASSED {F2P}", noise, f"PASSED {P2P}")).resolved


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bash: /eval.sh: No such file or directory\n",
        log(f"PASSED {F2P}", f"PASSED {P2P}").split(">>>>> End")[0],
        log(),
        log("SyntaxError: invalid syntax", code=2),
        log(">>>>> Patch Apply Failed", f"PASSED {F2P}", f"PASSED {P2P}"),
        log(f"PASSED {F2P}", f"PASSED {P2P}", code=1),
    ],
)
def test_a_log_of_no_complete_run_is_invalid_and_says_so(text: str) -> None:
    grade = grade_log(TASK, text)
    assert (grade.resolved, grade.log_valid) == (False, False)
    assert grade.statuses == {F2P: "MISSING", P2P: "MISSING"}
    assert grade.problem
    assert "\n" not in grade.problem


def test_markers_printed_by_the_code_under_test_make_the_log_invalid() -> None:
    forged = log(f"PASSED {F2P}", f"PASSED {P2P}") + log(f"FAILED {F2P}", code=1)
    grade = grade_log(TASK, forged)
    assert not grade.log_valid
    assert "2 times" in grade.problem


WORDS = st.sampled_from(
    [
        "PASSED",
        "FAILED",
        "ERROR",
        "SKIPPED",
        "XFAIL",
        "ok",
        "...",
        "FAIL:",
        "[1]",
        "[100%]",
        "test_x",
        "---",
        "1/2",
        "🟡",
    ]
)
LINES = st.lists(st.lists(WORDS | st.text(max_size=8), max_size=5).map(" ".join), max_size=12)


def parsers() -> list[str]:
    from swebench.harness.log_parsers import PARSER_REGISTRY

    return sorted(PARSER_REGISTRY)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(parsers()), LINES, st.integers(-1, 2))
def test_no_parser_failure_escapes_and_no_absent_test_passes(
    parser: str, lines: list[str], code: int
) -> None:
    task = load_swebench([ROW | {"log_parser": parser}])[0]
    grade = grade_log(task, log(*lines, code=code))
    assert not grade.resolved
    assert grade.statuses[F2P] != "PASSED"


@settings(deadline=None)
@given(st.text())
def test_any_text_is_graded(text: str) -> None:
    assert not grade_log(TASK, text).resolved


def test_where_parsers_report_failures_only_silence_passes_but_only_after_a_run() -> None:
    task = load_swebench([ROW | {"eval_type": "fail_only"}])[0]
    assert grade_log(task, log("Executed 12 of 12")).resolved
    assert grade_log(task, log("Executed 12 of 12")).statuses[F2P] == "PASSED"
    assert not grade_log(task, log("Executed 12 of 12", f"FAILED {P2P}", code=1)).resolved
    assert not grade_log(task, log("command not found")).log_valid


def test_a_task_of_another_kind_is_refused() -> None:
    with pytest.raises(TaskFileError, match="load_swebench"):
        eval_script(TASK.model_copy(update={"metadata": {}}))
