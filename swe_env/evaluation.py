"""What an evaluation came to: official predictions, logs and report, and a summary for people.

    runs/eval-x/predictions.jsonl                                  official format
    runs/eval-x/MODEL.RUN.json                                     official report, by swebench's own code
    runs/eval-x/logs/run_evaluation/RUN/MODEL/INSTANCE/            official layout: report.json, ...
    runs/eval-x/summary.json                                       what the table shows

Of further attempts an instance (`n` > 1), RUN and predictions are numbered: `eval-x.1`,
`predictions-1.jsonl`.
Everything is made from the episodes in the run directory, so it can be made again at any time.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from swe_env.episode import Episode
from swe_env.predictions import write_predictions
from swe_env.rundir import RunDir, write_atomic
from tasks.model import Task
from tasks.swebench import eval_script, harness_report


class Share(BaseModel):
    """How many of some instances were resolved."""

    model_config = ConfigDict(frozen=True)

    resolved: float
    """Expected number of instances resolved by one attempt (a whole number if each had one)."""
    instances: int
    """Instances with a verdict."""

    @property
    def rate(self) -> float:
        return self.resolved / self.instances if self.instances else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the rate (Wilson's score interval, with instances as the trials)."""
        n, p, z = self.instances, self.rate, 1.959964
        if n == 0:
            return 0.0, 1.0
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)


class Summary(BaseModel):
    """An evaluation in numbers."""

    model_config = ConfigDict(frozen=True)

    whole: Share
    pass_at: dict[int, Share]
    """k -> chance that one of k attempts resolves an instance (unbiased; Chen et al. 2021, section 2.1), of
    the instances that have k verdicts."""
    by_repository: dict[str, Share]
    endings: dict[str, int]
    """How attempts ended, refined by what grading said."""
    quarantined: Share | None = None
    """Of the instances on the quarantine list, which `whole` counts, too; None without a list."""
    no_verdict: list[str]
    """Attempts that infrastructure ended: neither resolved nor unresolved."""
    tampered: list[str]
    """Attempts that changed how tests run (strict mode)."""


def write_results(
    rundir: RunDir, tasks: Sequence[Task], quarantine: Collection[str] | None = None
) -> Summary:
    """Write everything official and the summary. Raises `RunError` for an episode that cannot be read."""
    episodes = rundir.episodes()
    attempts = _by_attempt(episodes)
    for number, own in sorted(attempts.items()):
        suffix = f".{number}" if number else ""
        _write_official(rundir, suffix, own, tasks)
    summary = summarise(episodes, tasks, quarantine)
    write_atomic(rundir.path / "summary.json", summary.model_dump_json(indent=1).encode())
    return summary


def summarise(
    episodes: Sequence[Episode], tasks: Sequence[Task], quarantine: Collection[str] | None = None
) -> Summary:
    """Count. Attempts without a verdict are in `no_verdict` and nowhere else."""
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        if episode.reward is not None:
            verdicts[episode.task_id].append(episode.reward > 0)
    repository = {task.id: task.repo for task in tasks}
    most = max((len(one) for one in verdicts.values()), default=0)
    return Summary(
        whole=_share(verdicts),
        pass_at={k: pass_at(k, list(verdicts.values())) for k in range(1, most + 1)},
        by_repository={
            name: _share({one: given for one, given in verdicts.items() if repository.get(one) == name})
            for name in sorted({repository[one] for one in verdicts if one in repository})
        },
        quarantined=None
        if quarantine is None
        else _share({one: given for one, given in verdicts.items() if one in quarantine}),
        endings=dict(Counter(_ending(episode) for episode in episodes).most_common()),
        no_verdict=[episode.id for episode in episodes if episode.reward is None],
        tampered=[episode.id for episode in episodes if episode.grade and episode.grade.tampered],
    )


def pass_at(k: int, verdicts: Sequence[Sequence[bool]]) -> Share:
    """Over instances with at least `k` attempts, the chance of each: 1 - C(n-c, k) / C(n, k)."""
    able = [one for one in verdicts if len(one) >= k]
    chances = [1 - math.comb(len(one) - sum(one), k) / math.comb(len(one), k) for one in able]
    return Share(resolved=sum(chances), instances=len(able))


def _share(verdicts: Mapping[str, Sequence[bool]]) -> Share:
    return Share(resolved=sum(sum(one) / len(one) for one in verdicts.values()), instances=len(verdicts))


def _ending(episode: Episode) -> str:
    grade = episode.grade
    if grade is None:
        return str(episode.end)
    if grade.reward > 0:
        return "resolved"
    if not episode.patch.strip():
        return f"{episode.end}, empty patch"
    if not grade.patch_applied:
        return f"{episode.end}, patch does not apply"
    if grade.timed_out:
        return f"{episode.end}, tests timed out"
    return f"{episode.end}, {'tampered' if grade.tampered else 'unresolved'}"


def _by_attempt(episodes: Sequence[Episode]) -> dict[int, list[Episode]]:
    attempts: dict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        attempts[int(episode.id.rpartition("--")[2])].append(episode)
    return attempts


def _write_official(rundir: RunDir, suffix: str, episodes: Sequence[Episode], tasks: Sequence[Task]) -> None:
    from swebench.harness import reporting
    from swebench.harness.constants import RUN_EVALUATION_LOG_DIR

    out, run_id = rundir.path, rundir.path.resolve().name + suffix
    by_id = {task.id: task for task in tasks}
    # what infrastructure ended before there was a patch is no prediction; the report lists it as incomplete
    known = [one for one in episodes if one.task_id in by_id and (one.grade or one.patch)]
    if not known:
        return
    model = known[0].policy.removeprefix("vllm:")
    patches = {episode.task_id: episode.patch for episode in known}
    write_predictions(out / f"predictions{suffix.replace('.', '-')}.jsonl", model, patches)
    for episode in known:
        folder = out / RUN_EVALUATION_LOG_DIR / run_id / model.replace("/", "__") / episode.task_id
        _write_logs(folder, by_id[episode.task_id], episode, rundir.log(episode.id))
    predictions = {
        name: {
            "instance_id": name,
            "model_name_or_path": model,
            "model_patch": patch.decode(errors="replace"),
        }
        for name, patch in patches.items()
    }
    rows = [task.metadata["row"] for task in tasks]
    # it reads and writes below the working directory, and prints
    with contextlib.chdir(out), contextlib.redirect_stdout(io.StringIO()):
        cast(Any, reporting).make_run_report(predictions, rows, run_id)


def _write_logs(folder: Path, task: Task, episode: Episode, log: bytes) -> None:
    """An instance's directory as the harness leaves it; `report.json`, which says that it is done, last."""
    from swebench.harness.constants import APPLY_PATCH_FAIL, APPLY_PATCH_PASS

    grade = episode.grade
    if grade is None or not episode.patch.strip():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "patch.diff").write_bytes(episode.patch)
    (folder / "eval.sh").write_text(eval_script(task), errors="replace")
    output = folder / "test_output.txt"
    applied = APPLY_PATCH_PASS if grade.patch_applied else APPLY_PATCH_FAIL
    (folder / "run_instance.log").write_text(f"{applied}\n{grade.reason}\n", errors="replace")
    if not grade.patch_applied:
        return
    # the harness reads it back as text of the locale
    text = log.decode("utf-8", "replace")
    if grade.timed_out:
        output.write_text(
            f"{text}\n\nTimeout error: {task.test_timeout:g} seconds exceeded.", errors="replace"
        )
        return
    output.write_text(text, errors="replace")
    prediction = {"instance_id": task.id, "model_name_or_path": episode.policy, "model_patch": "present"}
    report = harness_report(task, prediction, output)
    report[task.id]["resolved"] = grade.reward > 0
    write_atomic(folder / "report.json", json.dumps(report, indent=4).encode())
