"""SWE-bench instances as tasks, graded by swebench's own parsers and rules.

A row has everything: how its image is called, the script that runs its tests, the parser that reads the
log. That is the format of swebench 5; rows from older dumps lack four columns and are refused by name.
Importing swebench takes seconds, so it happens on first use. Nothing here touches the network.
"""

from __future__ import annotations

import difflib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from sandboxes.protocol import Limits
from tasks.jsonl import TaskFileError, read_rows
from tasks.model import ImageRef, SwebenchTests, Task

Status = Literal["PASSED", "FAILED", "ERROR", "SKIPPED", "MISSING"]

CLASSIC_COLUMNS = (
    "instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch", "version",
    "FAIL_TO_PASS", "PASS_TO_PASS",
)  # fmt: skip
NEW_COLUMNS = ("image", "eval_script", "log_parser", "eval_type")

LIMITS = Limits(memory=4 << 30, cpus=2.0, pids=1024)
"""Real test suites want more than a small task does."""


class SwebenchGrade(BaseModel):
    """What one evaluation log proves."""

    model_config = ConfigDict(frozen=True)

    statuses: dict[str, Status]
    """Required test -> status. MISSING when the log does not mention it; an expected failure is PASSED."""
    resolved: bool
    log_valid: bool
    """False when the log describes no complete run: then nothing is resolved and every status is MISSING."""
    problem: str = ""
    """Why the log is not valid, in one line."""


def load_swebench(
    source: str | Path | Iterable[Mapping[str, Any]], instance_ids: Sequence[str] | None = None
) -> list[Task]:
    """Tasks from a JSONL (or JSON list) file of swebench 5 rows, or from the rows themselves.

    With `instance_ids`: those only, in that order. Raises :class:`TaskFileError`, in one line, for a row
    that lacks columns, for an id that is not there and for an id that is there twice.
    """
    rows = _rows(source)
    seen: dict[str, str] = {}
    for where, row in rows:
        name = row.get("instance_id")
        if not isinstance(name, str):
            raise TaskFileError(f"{where}: column 'instance_id' is missing: these are not SWE-bench rows")
        if name in seen:
            raise TaskFileError(f"{where}: instance {name} is already at {seen[name]}: remove one of them")
        seen[name] = where
    by_id = {str(row["instance_id"]): (where, row) for where, row in rows}
    wanted = list(by_id) if instance_ids is None else list(instance_ids)
    for name in wanted:
        if name not in by_id:
            raise TaskFileError(f"instance {name!r} is not among the {len(by_id)} rows{_close(name, by_id)}")
        if wanted.count(name) > 1:
            raise TaskFileError(f"instance {name!r} is asked for {wanted.count(name)} times: ask once")
    return [_task(*by_id[name]) for name in wanted]


def eval_script(task: Task) -> str:
    """The bash script that runs the hidden tests of a task, as swebench would run it."""
    return str(_spec(task).eval_script)


def apply_script(patch_file: str) -> str:
    """The bash script that applies a patch as swebench's harness does: several ways, ever more lenient.

    Exits with 0 when one of them took it. Each but the first starts from a clean checkout.
    """
    from swebench.harness.run_evaluation import GIT_APPLY_CMDS

    reset = "git checkout -- . ; git clean -fd"
    ways = f"\n{reset}\n".join(f"{command} {patch_file} && exit 0" for command in GIT_APPLY_CMDS)
    return f"{ways}\ngit apply --check --reverse {patch_file}\n"


def harness_report(task: Task, prediction: Mapping[str, Any], log: Path) -> dict[str, Any]:
    """What swebench's harness writes as an instance's `report.json`, from its test output."""
    from swebench.harness.grading import get_eval_report

    return dict(get_eval_report(_spec(task), dict(prediction), str(log), include_tests_status=True))


def grade_log(task: Task, log_text: str, *, strict: bool = True) -> SwebenchGrade:
    """Read the output (stdout and stderr together) of :func:`eval_script` run on a patched repository.

    Parsing and the rules of resolution are swebench's. With `strict`, three things are stricter: a required
    test must be among its successes by name (swebench drops a status it does not know from both lists); one
    that pytest's summary also calls failed has not passed, whatever was printed later; and a second pair of
    markers makes the log invalid, because only the code under test can have printed it.
    Whoever runs the script must also see that it came to its own end: a log cut off or replaced by a process
    that killed the script can look complete. Never raises on what a log contains.
    """
    from swebench.harness.constants import END_TEST_OUTPUT, FAIL_TO_PASS, PASS_TO_PASS, START_TEST_OUTPUT
    from swebench.harness.grading import get_eval_report, get_logs_eval

    for marker in (START_TEST_OUTPUT, END_TEST_OUTPUT) if strict else ():
        if (count := log_text.count(marker)) != 1:
            return _invalid(
                task, f"the log has {marker!r} {count} times, not once: no complete, untampered run"
            )
    spec = _spec(task)
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "", "model_patch": "present"}
    with tempfile.TemporaryDirectory(prefix="swe-env-grade-") as folder:
        log = Path(folder) / "test_output.txt"
        # swebench opens it without naming an encoding; so do we, and what does not fit becomes '?'.
        with log.open("w", errors="replace") as file:
            file.write(log_text)
        try:
            report = get_eval_report(spec, prediction, str(log), include_tests_status=True)[spec.instance_id]
            found, _ = get_logs_eval(spec, str(log))
        except Exception as error:  # a parser meets any bytes whatever: its failure is a verdict on the log
            return _invalid(task, f"{spec.log_parser} failed on the log ({type(error).__name__}: {error})")
    lists = cast(dict[str, dict[str, list[str]]] | None, report.get("tests_status"))
    if lists is None:
        reason = report.get("infra_failure_reason", "a patch did not apply, or no test result was printed")
        return _invalid(task, f"swebench finds no test run in the log: {reason}")
    succeeded = set(lists[FAIL_TO_PASS]["success"]) | set(lists[PASS_TO_PASS]["success"])
    failed = _listed_as_failed(log_text) if strict else set[str]()
    succeeded -= failed
    required = [*task.fail_to_pass, *task.pass_to_pass]
    return SwebenchGrade(
        statuses={test: _status(test, found, test in succeeded) for test in required},
        resolved=bool(report["resolved"]) and (not strict or all(test in succeeded for test in required)),
        log_valid=True,
    )


def _rows(source: str | Path | Iterable[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(where, row) of each row; `where` is for error messages."""
    if not isinstance(source, str | Path):
        rows = [(f"row {number}", dict(row)) for number, row in enumerate(source, start=1)]
        if not rows:
            raise TaskFileError("no SWE-bench rows were given")
        return rows
    if Path(source).suffix != ".json":
        return [(f"{source}:{number}", row) for number, row in read_rows(source)]
    try:
        content = json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskFileError(f"{source}: cannot be read ({error.strerror}): check the path") from error
    except ValueError as error:
        raise TaskFileError(f"{source}: not JSON in UTF-8 ({error})") from error
    items = cast(list[Any], content) if isinstance(content, list) else []
    if not items or not all(isinstance(item, dict) for item in items):
        raise TaskFileError(f"{source}: is not a JSON list of rows: save it as one, or as JSONL")
    return [(f"{source}: row {number}", row) for number, row in enumerate(items, start=1)]


def _task(where: str, row: dict[str, Any]) -> Task:
    name = str(row["instance_id"])
    missing = [column for column in (*CLASSIC_COLUMNS, *NEW_COLUMNS) if row.get(column) is None]
    if set(missing) & set(NEW_COLUMNS):
        raise TaskFileError(
            f"{where}: {name} lacks {', '.join(missing)}: rows of swebench 5 are needed, old ones lack it"
        )
    if missing:
        raise TaskFileError(f"{where}: {name} lacks {', '.join(missing)}: take the row from a complete dump")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise TaskFileError(
            f"{where}: instance_id {name!r} cannot be a file name: use letters, digits, . _ -"
        )
    from swebench.harness.constants import EvalType
    from swebench.harness.log_parsers import PARSER_REGISTRY

    if row["log_parser"] not in PARSER_REGISTRY:
        raise TaskFileError(
            f"{where}: {name} has log_parser {row['log_parser']!r}, unknown to the installed swebench"
            f"{_close(str(row['log_parser']), PARSER_REGISTRY)}"
        )
    if row["eval_type"] not in [kind.value for kind in EvalType]:
        raise TaskFileError(
            f"{where}: {name} has eval_type {row['eval_type']!r}: use pass_and_fail or fail_only"
        )
    try:
        spec = _make_spec(row)
        return Task(
            id=name,
            source="swebench",
            repo=row["repo"],
            base_commit=row["base_commit"],
            problem_statement=row["problem_statement"],
            image=ImageRef(name=row["image"]),
            workdir="/testbed",
            activate="source /opt/miniconda3/bin/activate && conda activate testbed",
            tests=SwebenchTests(
                test_patch=row["test_patch"],
                eval_script=spec.eval_script,
                log_parser=row["log_parser"],
                eval_type=row["eval_type"],
                version=str(row["version"]),
            ),
            fail_to_pass=spec.FAIL_TO_PASS,
            pass_to_pass=spec.PASS_TO_PASS,
            gold_patch=row["patch"],
            limits=LIMITS,
            metadata={"row": row},
        )
    except (TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise TaskFileError(
            f"{where}: {name} is malformed ({reason}): take the row from a good dump"
        ) from error


def _spec(task: Task) -> Any:
    row = task.metadata.get("row")
    if not isinstance(row, dict):
        raise TaskFileError(
            f"task {task.id} carries no SWE-bench row in its metadata: load it with load_swebench"
        )
    return _make_spec(cast(dict[str, Any], row))


def _make_spec(row: dict[str, Any]) -> Any:
    from swebench.harness import utils

    return cast(Any, utils).make_test_spec(row)


def _invalid(task: Task, problem: str) -> SwebenchGrade:
    statuses: dict[str, Status] = dict.fromkeys([*task.fail_to_pass, *task.pass_to_pass], "MISSING")
    return SwebenchGrade(
        statuses=statuses, resolved=False, log_valid=False, problem=" ".join(problem.split())[:400]
    )


def _listed_as_failed(log_text: str) -> set[str]:
    """Tests that a pytest summary lists as failed (or in error)."""
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", log_text, re.M))


def _status(test: str, found: Mapping[str, str], succeeded: bool) -> Status:
    from swebench.harness import grading

    key = grading._resolve_case(test, dict(found))  # pyright: ignore[reportPrivateUsage]
    match found[key] if key is not None else None:
        case "PASSED" | "XFAIL":
            return "PASSED" if succeeded else "FAILED"
        case "FAILED" | "ERROR" | "SKIPPED" as status:
            return status
        case None:
            # Some parsers report failures only (eval_type fail_only): there, silence is success.
            return "PASSED" if succeeded else "MISSING"
        case _:
            return "ERROR"


def _close(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f": did you mean {', '.join(near)}?" if near else ": check its spelling"
