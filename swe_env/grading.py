"""Grading: a fresh sandbox, the patch, everything the policy may not change put back, the hidden tests.

Nothing of the rollout reaches this sandbox but the patch's bytes. A required test that is not reported
as passed has not passed. What is in doubt is refused, and says why in :attr:`Grade.reason`.
"""

from __future__ import annotations

import errno
import json
import posixpath
import secrets
import shlex
import time
from importlib import resources
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from sandboxes import repository
from sandboxes.protocol import EngineUnavailable, ExecResult, SandboxError, SandboxLost
from sandboxes.repository import Patch, printable
from swe_env.protected import Verdict, examine, patch_paths, settings_changed
from swe_env.workspace import Workspace, Workspaces
from tasks.model import PytestTests, SwebenchTests, Task
from tasks.swebench import Status, SwebenchGrade, apply_script, eval_script, grade_log

Mode = Literal["strict", "official"]
"""How a patch is graded. `strict`: what steers the test runner is put back, and changing it forfeits the
reward. `official` (SWE-bench instances only): as swebench's own harness does, nothing put back."""

SETTINGS_LIMIT = 1 << 20
"""A larger settings file is not compared: it counts as changed [bytes]."""

HOST_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that say nothing of the patch."""

UNREADABLE = b"\xff"
"""Stands for a settings file that cannot be read: no text, and so a change."""

CANARY_WORDS = "align batch cache delta edges fetch grid heap index join keys limit merge node order parse"
"""What the test that must fail is called: nothing that tells it from the others."""

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
    """Files of the hidden tests, or beside them, that the patch also has: put back. No fault in itself."""
    artefacts: list[str] = []
    """Compiled files, package metadata and look-alikes of Python's modules in the patch: left out."""
    timed_out: bool = False
    image_id: str = ""
    """Content digest of the image that the repository came from; "" if nothing had to be run."""
    reason: str = ""
    """Why a patch that did not resolve the task did not, in one line."""
    seconds: float = 0.0
    log: bytes = Field(default=b"", exclude=True, repr=False)
    """Everything the test run printed; kept beside the episode."""


class Grader(Protocol):
    """:func:`grade`, or something that answers as it does."""

    async def __call__(self, task: Task, patch: bytes, workspaces: Workspaces, mode: Mode, /) -> Grade: ...


async def grade(task: Task, patch: bytes, workspaces: Workspaces, mode: Mode = "strict") -> Grade:
    """Score a patch. Raises `SandboxLost` and other `SandboxError`s, which are infrastructure's.

    `ValueError` when `official` is asked of a task that swebench's harness does not know.
    """
    started = time.monotonic()
    if not patch.strip():
        return Grade(resolved=False, reward=0.0, statuses=_missing(task), reason="the patch is empty")
    if mode == "official" and not isinstance(task.tests, SwebenchTests):
        raise ValueError(f"{task.id} is no SWE-bench instance: grade it in strict mode")
    async with workspaces.open(task.view()) as workspace:
        try:
            if mode == "official":
                result = await _grade_as_harness(task, patch, workspace)
            else:
                result = await _grade_strictly(task, patch, workspace)
        except (SandboxLost, EngineUnavailable):
            raise
        except (SandboxError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in HOST_TROUBLE:
                raise SandboxLost(f"the machine that grades is not well: {error}") from error
            # the sandbox is well, so it is the patch's content: no way out of a low score
            reason = f"the patch cannot be graded: {error}"
            result = Grade(resolved=False, reward=0.0, statuses=_missing(task), reason=reason)
    seconds = time.monotonic() - started
    return result.model_copy(update={"seconds": seconds, "image_id": workspace.image_id})


async def _grade_strictly(task: Task, patch: bytes, workspace: Workspace) -> Grade:
    how = repository.EXACTLY
    if isinstance(task.tests, SwebenchTests):  # patches made elsewhere: what the harness takes, we take
        how = apply_script(repository.INCOMING)
    applied = await repository.apply(workspace.sandbox, workspace.baseline, patch, how)
    if isinstance(applied, str):
        reason = f"the patch does not apply: {_last_line(applied)}"
        return Grade(resolved=False, reward=0.0, statuses=_missing(task), reason=reason, log=applied.encode())
    return await _run_tests(task, workspace, await _put_back(task, applied, workspace))


async def _put_back(task: Task, patch: Patch, workspace: Workspace) -> Verdict:
    """Restore every protected file that the patch touched, and say which."""
    sandbox, baseline, tests = workspace.sandbox, workspace.baseline, task.tests
    verdict = examine(
        patch.paths,
        hidden=set(tests.files) if isinstance(tests, PytestTests) else patch_paths(tests.test_patch),
        gold=patch_paths(task.gold_patch),
        existing=await repository.names_at_start(sandbox, baseline),
    )
    for path in verdict.unexamined:
        before = await repository.at_start(sandbox, baseline, path)
        try:
            after = await sandbox.read(f"{baseline.workdir}/{path}", limit=SETTINGS_LIMIT)
        except SandboxLost:
            raise
        except FileNotFoundError:
            after = None
        except (OSError, ValueError, SandboxError):
            after = UNREADABLE
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
    tampered = sorted({*map(printable, verdict.tampered), *result.tampered})
    reason = f"the patch changes how tests run: {', '.join(tampered)}" if tampered else result.reason
    return result.model_copy(
        update={
            "patch_applied": True,
            "tampered": tampered,
            "replaced": [printable(path) for path in [*verdict.hidden, *verdict.support]],
            "artefacts": [printable(path) for path in verdict.artefacts],
            "reward": 0.0 if tampered else float(result.resolved),
            "reason": reason,
        }
    )


async def _run_pytest(task: Task, tests: PytestTests, workspace: Workspace) -> Grade:
    """Hidden pytest files, read from a report that our own driver of pytest writes.

    One more test, which must fail, is run beside them: where it is not reported as failed, the runner
    does not report what happens, and nothing it says counts.
    """
    sandbox, workdir = workspace.sandbox, workspace.baseline.workdir
    folder = f"/tmp/{secrets.token_hex(8)}"
    name, function = (
        f"test_{'_'.join(secrets.SystemRandom().sample(CANARY_WORDS.split(), 2))}" for _ in "12"
    )
    canary = posixpath.join(posixpath.dirname(min(tests.files)), f"{name}.py")
    canary_id = f"{canary}::{function}"
    files = {**tests.files, canary: f"def {function}():\n    assert False\n"}
    driver = (resources.files("swe_env") / "pytest_driver.py.txt").read_bytes()
    await sandbox.write(f"{folder}/run.py", driver)
    targets = " ".join(shlex.quote(path) for path in files)
    await sandbox.run(f"rm -rf -- {targets}", cwd=workdir, session=False)
    await repository.lay_out(sandbox, workdir, files)
    options = ["-p", "no:cacheprovider", "-rA", "--tb=short"]
    asked = {"report": f"{folder}/report", "arguments": [*options, *sorted(files)]}
    ran = await sandbox.run(
        f"python3 -I -B {folder}/run.py",
        cwd=workdir,
        stdin=json.dumps(asked).encode(),
        timeout=task.test_timeout,
        output_limit=LOG_LIMIT,
        session=False,
    )
    try:
        lines = (
            (await sandbox.read(f"{folder}/report", limit=LOG_LIMIT)).decode("utf-8", "replace").splitlines()
        )
    except SandboxLost:
        raise
    except (OSError, SandboxError):
        lines = []
    reported = _read_report(lines)
    required = [*task.fail_to_pass, *task.pass_to_pass]
    statuses: dict[str, Status] = {test: reported.get(test, "MISSING") for test in required}
    canary_status = reported.get(canary_id)
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
        reason = f"the patch does not apply: {_last_line(applied.text)}"
        return Grade(resolved=False, reward=0.0, statuses=_missing(task), reason=reason, log=applied.output)
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


REPORT_LINE = 1 << 16
"""Longest line of the report that is read."""


def _read_report(lines: list[str]) -> dict[str, Status]:
    """Test -> worst status reported of it (a test can pass and then fail in its teardown)."""
    badness: list[Status] = ["PASSED", "SKIPPED", "FAILED", "ERROR"]
    reported: dict[str, Status] = {}
    for line in lines:
        try:
            test, status = json.loads(line[:REPORT_LINE])
            worse = max(badness.index(status), badness.index(reported.get(test, "PASSED")))
        except (ValueError, TypeError, RecursionError):
            continue  # not a line of ours: the tested code can write there too
        reported[test] = badness[worse]
    return reported


def _missing(task: Task) -> dict[str, Status]:
    """The statuses of a run that did not happen."""
    return dict.fromkeys([*task.fail_to_pass, *task.pass_to_pass], "MISSING")


def _count(statuses: dict[str, Status]) -> str:
    failed = [test for test, status in statuses.items() if status != "PASSED"]
    if not failed:
        return ""
    return f"{len(failed)} of {len(statuses)} required tests did not pass, first {failed[0]}"


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1]
