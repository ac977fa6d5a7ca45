"""The trainer's process: batches in, weights and rows out, and nothing lost when it is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agents.loop import Budget
from swe_env.rundir import RunError, write_atomic
from swe_env.train_dir import Ready, StepRow, TrainDir
from swe_env.training import OptimiserConfig, RolloutConfig, TrainConfig, TrainerConfig
from tests.trainer.batches import episode, training
from trainer.checkpoint import checkpoints
from trainer.model import load_scorer
from trainer.rl import Asked, learn, train
from trainer.step import make_trainer
from trainer.tiny_model import make_tiny_model

STEPS = 4


def config(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": "tiny:glm",
            "steps": STEPS,
            "rollout": RolloutConfig(
                tasks="shipped", tasks_per_step=2, group_size=2, budget=Budget(context_tokens=256)
            ),
            "optimiser": OptimiserConfig(learning_rate=1e-3, decay="linear"),
            "trainer": TrainerConfig(micro_batch_tokens=512, checkpoint_every=2),
            **changes,
        }
    )


@pytest.fixture
def where(tmp_path: Path) -> TrainDir:
    """A training whose batches are all there."""
    return training(tmp_path / "run", batches=STEPS)


def steps_of(where: TrainDir, config: TrainConfig, *, kill_after: int | None = None) -> list[StepRow]:
    """Rows that the process prints; killed with SIGKILL when that many are there."""
    file = where.path / "asked.json"
    file.write_text(Asked(config=config, directory=where.path).model_dump_json())
    rows = list[StepRow]()
    with subprocess.Popen(
        [sys.executable, "-m", "trainer.rl", str(file)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()).keys() == {"ready", "last"}
        for line in process.stdout:
            rows.append(StepRow.model_validate_json(line))
            if len(rows) == kill_after:
                os.kill(process.pid, signal.SIGKILL)
                break
    return rows


def test_killed_and_started_again_it_takes_the_same_steps(where: TrainDir, tmp_path: Path) -> None:
    whole = TrainDir(tmp_path / "whole")
    subprocess.run(["cp", "-r", str(where.path), str(whole.path)], check=True)
    expected = steps_of(whole, config())
    first = steps_of(where, config(), kill_after=3)
    where.remove_weights(below=3, but={0})  # as is done while a training goes on
    again = steps_of(where, config())
    assert [row.step for row in expected] == [0, 1, 2, 3]
    assert [row.step for row in again] == [2, 3]  # the newest checkpoint is of two steps
    for row in [*first, *again]:
        assert (row.loss, row.grad_norm) == (expected[row.step].loss, expected[row.step].grad_norm)
    same = ("weights/step-4/model.safetensors", "probes/step-4.json")
    for name in same:
        assert (where.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_the_row_of_a_step_that_is_not_taken_again_is_told_again(where: TrainDir) -> None:
    told: list[object] = []
    train(Asked(config=config(steps=2), directory=where.path), told.append)
    train(Asked(config=config(steps=3), directory=where.path), told.append)
    first, _, second, goes_on, third = told
    assert first == Ready(ready=0)
    assert goes_on == Ready(ready=2, last=second)  # type: ignore[arg-type]
    assert isinstance(third, StepRow)


def test_a_step_waits_until_its_batch_is_complete(where: TrainDir) -> None:
    batch = where.batch(0).read_bytes()
    where.batch(0).unlink()
    file = where.path / "asked.json"
    file.write_text(Asked(config=config(), directory=where.path).model_dump_json())
    with subprocess.Popen(
        [sys.executable, "-m", "trainer.rl", str(file)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        assert not where.weights(1).exists()
        write_atomic(where.batch(0), batch)
        assert StepRow.model_validate_json(process.stdout.readline()).step == 0
        process.terminate()


def test_weights_are_written_at_each_step_and_checkpoints_at_some(where: TrainDir) -> None:
    rows: list[object] = []
    train(Asked(config=config(steps=3), directory=where.path), rows.append)
    assert [where.weights(version).exists() for version in range(5)] == [True] * 4 + [False]
    assert [path.name for path in checkpoints(where.checkpoints)] == ["step-2", "step-3"]
    assert len(json.loads(where.probe(3).read_text())[0]) == 3


def test_what_infrastructure_ended_is_counted_and_not_trained_on(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    draw = random.Random(1)
    rewards = {"a": (1.0, 0.0, None), "b": (1.0, 1.0, None)}
    episodes = [
        episode(f"{task}--{number}", task, reward, draw)
        for task, group in rewards.items()
        for number, reward in enumerate(group)
    ]
    asked = config()
    trainer = make_trainer(load_scorer(tmp_path / "model", asked.trainer), asked.schedule, asked.trainer)
    row = learn(trainer, episodes, asked)
    assert (row.invalid, row.groups, row.without_spread, row.tokens) == (2, 2, 1, 100)
    assert row.reward == 0.75
    assert not row.skipped


@pytest.mark.parametrize("version", [1, 5])
def test_a_token_that_is_too_old_or_of_the_future_is_refused(version: int, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    asked = config(**{"async": {"max_off_policy_steps": 2}})
    trainer = make_trainer(load_scorer(tmp_path / "model", asked.trainer), asked.schedule, asked.trainer)
    trainer.steps = 3
    draw = random.Random(1)
    fresh, wrong = (
        [episode(f"{one}--{member}", str(one), float(member), draw, version=one) for member in range(2)]
        for one in (1, version)
    )
    assert not learn(trainer, fresh, asked).skipped
    with pytest.raises(
        RunError, match=f"--0 has a token of version {version}, and step 4 may learn from 2 to 4"
    ):
        learn(trainer, wrong, asked)


def test_a_batch_from_which_nothing_can_be_learnt_changes_nothing(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    draw, asked = random.Random(1), config()
    trainer = make_trainer(load_scorer(tmp_path / "model", asked.trainer), asked.schedule, asked.trainer)
    before = [parameter.clone() for parameter in trainer.scorer.parameters()]
    row = learn(trainer, [episode(f"a--{number}", "a", 1.0, draw) for number in range(3)], asked)
    assert row.skipped
    assert (trainer.steps, trainer.skipped) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.scorer.parameters(), strict=True))
