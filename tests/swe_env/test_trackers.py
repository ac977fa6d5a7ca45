"""What trackers are told of a training, read back from what they wrote."""

from __future__ import annotations

import importlib
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from swe_env import trackers
from swe_env.rundir import RunError
from swe_env.runner import Watcher
from swe_env.sft import Progress
from swe_env.trackers import numbers, tracked
from swe_env.train_dir import EvaluationRow, StepRow, TrainDir
from swe_env.training import Tracker, TrainConfig

EVALUATION = EvaluationRow(step=0, solved=0.25, episodes=8, invalid=0, seconds=3.5)


def step_row(step: int) -> StepRow:
    return StepRow(
        step=step, episodes=4, invalid=0, reward=0.5, turns=3.0, groups=2, without_spread=1, tokens=900,
        action_tokens=300, loss=0.1, action_nll=0.2, grad_norm=1.5, learning_rate=1e-3, skipped=False,
        losses={"kl": 0.01, "drop_rates": {"ipo": {"all": 0.125}}}, train_seconds=1.0,
    )  # fmt: skip


class Shown:
    """A screen that keeps what it is shown."""

    def __init__(self) -> None:
        self.rows: list[StepRow | EvaluationRow] = []

    def begins(self, stage: str, total: int) -> Watcher:
        raise AssertionError(stage)

    def learns(self, progress: Progress) -> None: ...

    def row(self, row: StepRow | EvaluationRow, total_steps: int) -> None:
        self.rows.append(row)


def train(where: TrainDir, *trackers: Tracker, rows: list[StepRow | EvaluationRow]) -> Shown:
    """Show `rows` as a training would, and keep them in `where`."""
    asked = {"model": "tiny:glm", "steps": 2, "trackers": trackers}
    rollout = {"tasks": "synthetic:train:4", "tasks_per_step": 1, "group_size": 2}
    config, shown = TrainConfig.model_validate(asked | {"rollout": rollout}), Shown()

    async def body() -> None:
        with trio.fail_after(60):
            async with tracked(shown, config, where) as screen:
                for row in rows:
                    if row not in where.rows():
                        where.add(row)
                    screen.row(row, 2)

    where.path.mkdir(exist_ok=True)
    trio.run(body)
    return shown


def scalars(where: TrainDir) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) in order, as TensorBoard reads them."""
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(where.path / "tensorboard"))
    found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_all_numbers_of_a_row_have_a_name() -> None:
    told = {"solved": 0.25, "episodes": 8, "invalid": 0, "seconds": 3.5}
    assert numbers(EVALUATION) == {f"evaluation/{name}": value for name, value in told.items()}
    told = numbers(step_row(1))
    assert told["step/losses/drop_rates/ipo/all"] == 0.125
    assert told["step/reward"] == 0.5


def test_tensorboard_is_told_every_row_once_also_when_a_training_goes_on(tmp_path: Path) -> None:
    where = TrainDir(tmp_path / "run")
    shown = train(where, "tensorboard", rows=[EVALUATION, step_row(0)])
    assert shown.rows == [EVALUATION, step_row(0)]
    train(where, "tensorboard", rows=[step_row(0), step_row(1)])
    found = scalars(where)
    assert found["evaluation/solved"] == [(0, 0.25)]
    assert found["step/reward"] == [(0, 0.5), (1, 0.5)]


def test_wandb_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 300)  # its service answers late on a busy machine
    train(TrainDir(tmp_path / "run"), "wandb", rows=[EVALUATION, step_row(0)])
    written = next((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")).read_bytes()
    assert b"step/losses/kl" in written
    assert b"evaluation/solved" in written


def test_trackio_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    train(TrainDir(tmp_path / "run"), "trackio", rows=[step_row(0)])
    database = sqlite3.connect(next((tmp_path / "trackio").glob("**/*.db")))
    assert "step/losses/kl" in "".join(map(str, database.execute("select * from metrics").fetchall()))


def test_a_tracker_that_is_not_installed_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=r"wandb is not installed: pip install 'swe-env\[wandb\]'"):
        train(TrainDir(tmp_path / "run"), "wandb", rows=[])
