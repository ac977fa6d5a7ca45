"""Grading: a fresh sandbox, the patch, everything the policy may not change put back, the hidden tests.

Nothing of the rollout reaches this sandbox but the patch's bytes. A required test that is not reported
as passed has not passed. What is in doubt is refused, and says why in :attr:`Grade.reason`.
"""

from __future__ import annotations

import json
import secrets
import shlex
import time
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sandboxes import repository
from sandboxes.protocol import ExecResult, SandboxError
from sandboxes.repository import Patch
from swe_env.protected import Verdict, examine, lookalikes, patch_paths, settings_changed
from swe_env.workspace import Workspace, Workspaces
from tasks.model import PytestTests, SwebenchTests, Task
from tasks.swebench import SwebenchGrade, apply_script, eval_script, grade_log

Status = Literal["PASSED", "FAILED", "ERROR", "SKIPPED", "MISSING"]

Mode = Literal["strict", "official"]
"""How a patch is graded. `strict`: what steers the test runner is put back, and changing it forfeits the
reward. `official` (SWE-bench instances only): as swebench's own harness does, nothing put back."""

LOG_LIMIT = 16 << 20
"""Most of a test run's output that is kept [bytes]."""


class Grade(BaseModel):
    """What the hidden tests said of one patch."""

    model_config = ConfigDict(frozen=True)

    resolved: bool
    """Every required test passed, in a run without the policy's changes to protected files."""
    reward: float
    """1 if resolved and nothing was tampered with, else 0."""
    statuses: dict[str, Status] = {}
    """Required test -> what it did. MISSING: it was not reported, which is not a pass."""
    patch_applied: bool = False
    tampered: list[str] = []
    """Files that steer the test runner and that the patch changed: put back, and the reward is forfeited."""
    replaced: list[str] = []
    """Files of the hidden tests that the patch also has: the hidden version ran. No fault in itself."""
    artefacts: list[str] = []
    """Compiled files in the patch: left out."""
    timed_out: bool = False
    image_id: str = ""
    """Content digest of the image that the repository came from; "" if nothing had to be run."""
    reason: str = ""
    """Why a patch that did not resolve the task did not, in one line."""
    seconds: float = 0.0
    log: bytes = Field(default=b"", exclude=True, repr=False)
    """Everything the test run printed; kept beside the episode."""


async def grade(task: Task, patch: bytes, workspaces: Workspaces, mode: Mode = "strict") -> Grade:
    """Score a patch. Raises `SandboxLost` and other `SandboxError`s, which are infrastructure's.

    `ValueError` when `official` is asked of a task that swebench's harness does not know.
    """
    started = time.monotonic()
    missing: dict[str, Status] = dict.fromkeys([*task.fail_to_pass, *task.pass_to_pass], "MISSING")
    if not patch.strip():
        return Grade(resolved=False, reward=0.0, statuses=missing, reason="the patch is empty")
    if mode == "official" and not isinstance(task.tests, SwebenchTests):
        raise ValueError(f"{task.id} is no SWE-bench instance: grade it in strict mode")
    async with workspaces.open(task.view()) as workspace:
        if mode == "official":
            result = await _grade_as_harness(task, patch, workspace)
            return _finished(result, workspace, started)
        applied = await repository.apply(workspace.sandbox, workspace.baseline, patch)
        if isinstance(applied, str):
            reason = f"the patch does not apply: {_last_line(applied)}"
            result = Grade(resolved=False, reward=0.0, statuses=missing, reason=reason, log=applied.encode())
        else:
            verdict = await _put_back(task, applied, workspace)
            result = await _run_tests(task, workspace, verdict)
        return _finished(result, workspace, started)


def _finished(grade: Grade, workspace: Workspace, started: float) -> Grade:
    return grade.model_copy(update={"seconds": time.monotonic() - started, "image_id": workspace.image_id})


async def _put_back(task: Task, patch: Patch, workspace: Workspace) -> Verdict:
    """Restore every protected file that the patch touched, and say which."""
    sandbox, baseline = workspace.sandbox, workspace.baseline
    hidden = (
        set(task.tests.files) if isinstance(task.tests, PytestTests) else patch_paths(task.tests.test_patch)
    )
    existing = {
        root for root in lookalikes(patch.paths) if await repository.has_at_start(sandbox, baseline, root)
    }
    verdict = examine(patch.paths, hidden=hidden, gold=patch_paths(task.gold_patch), existing=existing)
    for path in verdict.unexamined:
        before = await repository.at_start(sandbox, baseline, path)
        try:
            after = await sandbox.read(f"{baseline.workdir}/{path}")
        except (OSError, UnicodeEncodeError):
            after = None
        if settings_changed(path, before, after):
            verdict = verdict.model_copy(update={"tampered": [*verdict.tampered, path]})
    await repository.restore(sandbox, baseline, verdict.restored)
    return verdict


async def _run_tests(task: Task, workspace: Workspace, verdict: Verdict) -> Grade:
    match task.tests:
        case PytestTests() as tests:
            result = await _run_pytest(task, tests, workspace)
        case SwebenchTests():
            result = await _run_swebench(task, workspace)
    tampered = sorted({*verdict.tampered, *result.tampered})
    reason = f"the patch changes how tests run: {', '.join(tampered)}" if tampered else result.reason
    return result.model_copy(
        update={
            "patch_applied": True,
            "tampered": tampered,
            "replaced": verdict.hidden,
            "artefacts": verdict.artefacts,
            "reward": 0.0 if tampered else float(result.resolved),
            "reason": reason,
        }
    )


async def _run_pytest(task: Task, tests: PytestTests, workspace: Workspace) -> Grade:
    """Hidden pytest files, read from a report that our own plugin writes.

    One more test, which must fail, is run beside them: where it is not reported as failed, the runner
    does not report what happens, and nothing it says counts.
    """
    sandbox, workdir = workspace.sandbox, workspace.baseline.workdir
    nonce = secrets.token_hex(8)
    ours, report = f"/tmp/swe-env-{nonce}", f"/tmp/swe-env-{nonce}/report"
    canary = f"test_canary_{nonce}.py"
    plugin = (resources.files("swe_env") / "pytest_report.py.txt").read_bytes()
    await sandbox.write(f"{ours}/swe_env_report.py", plugin)
    await repository.lay_out(sandbox, workdir, tests.files)
    await sandbox.write(f"{workdir}/{canary}", b"def test_canary():\n    assert False\n")
    files = " ".join(shlex.quote(path) for path in [*sorted(tests.files), canary])
    ran = await sandbox.run(
        f"python3 -m pytest -p swe_env_report -p no:cacheprovider -rA --tb=short {files}",
        env={"PYTHONPATH": ours, "SWE_ENV_REPORT": report, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=task.test_timeout,
        output_limit=LOG_LIMIT,
        session=False,
    )
    try:
        lines = (await sandbox.read(report, limit=LOG_LIMIT)).decode("utf-8", "replace").splitlines()
    except (OSError, SandboxError):
        lines = []
    reported = _read_report(lines)
    required = [*task.fail_to_pass, *task.pass_to_pass]
    statuses: dict[str, Status] = {test: reported.get(test, "MISSING") for test in required}
    canary_status = reported.get(f"{canary}::test_canary")
    # pytest exits with 1 when it ran to its end and a test failed, as the canary does
    honest = canary_status == "FAILED" and ran.exit_code == 1
    forced = canary_status == "PASSED"
    resolved = honest and all(status == "PASSED" for status in statuses.values())
    if ran.timed_out:
        reason = f"the hidden tests did not end within {task.test_timeout:g} seconds"
    elif not honest and not forced:
        reason = "the test run did not complete"
    else:
        reason = _count(statuses)
    return Grade(
        resolved=resolved,
        reward=float(resolved),
        statuses=statuses,
        tampered=["the test runner reports a failing test as passed"] if forced else [],
        timed_out=ran.timed_out,
        reason=reason,
        log=ran.output,
    )


async def _run_swebench(task: Task, workspace: Workspace) -> Grade:
    """The instance's own evaluation script, read by swebench's own parser and rules.

    Its log can be forged by a process that prints a whole one and kills the script: how the script ended
    counts too.
    """
    ran = await _run_eval_script(task, workspace)
    graded = grade_log(task, ran.text)
    if ran.exit_code > 128 and not ran.timed_out:  # 128 itself is how git fails
        reason = f"the test run was killed (exit code {ran.exit_code})"
        return _swebench_grade(task, ran, graded.model_copy(update={"resolved": False, "problem": reason}))
    return _swebench_grade(task, ran, graded)


async def _grade_as_harness(task: Task, patch: bytes, workspace: Workspace) -> Grade:
    """What swebench's harness says of a patch, flaws included."""
    sandbox = workspace.sandbox
    await sandbox.write("/tmp/patch.diff", patch)
    applied = await sandbox.run(
        apply_script("/tmp/patch.diff"), cwd=workspace.baseline.workdir, timeout=300, session=False
    )
    if applied.exit_code != 0:
        missing: dict[str, Status] = dict.fromkeys([*task.fail_to_pass, *task.pass_to_pass], "MISSING")
        reason = f"the patch does not apply: {_last_line(applied.text)}"
        return Grade(resolved=False, reward=0.0, statuses=missing, reason=reason, log=applied.output)
    ran = await _run_eval_script(task, workspace)
    return _swebench_grade(task, ran, grade_log(task, ran.text, strict=False))


async def _run_eval_script(task: Task, workspace: Workspace) -> ExecResult:
    # bash reads a group to its end before it starts: the tested code cannot rewrite what is still to run
    script = f"{{\n{eval_script(task)}\n}}\n"
    await workspace.sandbox.write("/eval.sh", script.encode())
    return await workspace.sandbox.run(
        "/bin/bash /eval.sh", timeout=task.test_timeout, output_limit=LOG_LIMIT, session=False
    )


def _swebench_grade(task: Task, ran: ExecResult, graded: SwebenchGrade) -> Grade:
    late = f"the hidden tests did not end within {task.test_timeout:g} seconds" if ran.timed_out else ""
    resolved = graded.resolved and not ran.timed_out
    return Grade(
        resolved=resolved,
        reward=float(resolved),
        statuses=graded.statuses,
        patch_applied=True,
        timed_out=ran.timed_out,
        reason=late or graded.problem or _count(graded.statuses),
        log=ran.output,
    )


def _read_report(lines: list[str]) -> dict[str, Status]:
    """Test -> worst status reported of it (a test can pass and then fail in its teardown)."""
    badness: list[Status] = ["PASSED", "SKIPPED", "FAILED", "ERROR"]
    reported: dict[str, Status] = {}
    for line in lines:
        try:
            test, status = json.loads(line)
            worse = max(badness.index(status), badness.index(reported.get(test, "PASSED")))
        except (ValueError, TypeError):
            continue  # not a line of ours: the tested code can write there too
        reported[test] = badness[worse]
    return reported


def _count(statuses: dict[str, Status]) -> str:
    failed = [test for test, status in statuses.items() if status != "PASSED"]
    if not failed:
        return ""
    return f"{len(failed)} of {len(statuses)} required tests did not pass, first {failed[0]}"


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1]
