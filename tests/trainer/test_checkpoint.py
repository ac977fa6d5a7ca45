"""Checkpoints: a training that was killed at any moment goes on as if it had not been."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainer.processes import FORKS, together
from tests.trainer.test_step import STREAMS, stream, trainer_of
from trainer.checkpoint import CheckpointError, checkpoints, load_checkpoint, save_checkpoint
from trainer.packing import micro_batch
from trainer.step import OptimiserConfig, Trainer, supervised_step

STEPS = 8
CONFIG = OptimiserConfig(learning_rate=1e-3, warmup_steps=3, decay="cosine", total_steps=STEPS)


def lines(file: Path) -> list[tuple[int, float]]:
    """Whole lines of a log of losses: a kill may have cut the last one."""
    text = file.read_text() if file.exists() else ""
    return [tuple(json.loads(line)) for line in text.split("\n")[:-1]]


def train(model: Path, directory: Path, log: Path) -> None:
    """Ends after `STEPS` steps. What it trains on is drawn as it goes, from both generators."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    trainer = trainer_of(model, CONFIG)
    position = load_checkpoint(trainer, directory) or {"next": 0}
    start = position["next"]
    assert isinstance(start, int)
    for step in range(start, STEPS):
        drawn = [STREAMS[int(torch.randint(len(STREAMS), ()))], stream(20, seed=random.randrange(99))]
        done = supervised_step(trainer, [micro_batch(drawn)])
        with log.open("a") as file:
            file.write(json.dumps([step, done.loss]) + "\n")
        save_checkpoint(trainer, directory, {"next": step + 1}, keep=2)


def test_a_training_killed_at_random_moments_has_the_losses_of_one_that_was_not(
    tiny_glm: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    undisturbed = FORKS.Process(target=train, args=(tiny_glm, tmp_path / "a", whole))
    undisturbed.start()
    undisturbed.join(60)
    expected = dict(lines(whole))
    assert list(expected) == list(range(STEPS))

    draw, kills = random.Random(), 0
    while True:
        process = FORKS.Process(target=train, args=(tiny_glm, tmp_path / "b", broken))
        before = len(lines(broken))
        process.start()
        while kills < 3 and process.is_alive() and len(lines(broken)) < before + 2:
            time.sleep(0.005)
        if kills < 3:
            time.sleep(draw.uniform(0, 0.1))  # within the save, or within the next step
            process.kill()
            kills += 1
        process.join(60)
        if process.exitcode == 0:
            break
    found = lines(broken)
    assert kills == 3
    assert {step for step, _ in found} == set(range(STEPS))
    assert all(loss == expected[step] for step, loss in found)  # also of the steps that were done twice
    assert [path.name for path in checkpoints(tmp_path / "b")] == ["step-7", "step-8"]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["step-7", "step-8"]


def test_what_two_ranks_saved_one_goes_on_from(tiny_glm: Path, tmp_path: Path) -> None:
    together(2, save_at_two_ranks, tmp_path / "meet", tiny_glm, tmp_path / "c")
    trainer = trainer_of(tiny_glm, CONFIG)
    assert load_checkpoint(trainer, tmp_path / "c") == {"next": 1}
    assert (trainer.steps, trainer.skipped) == (1, 0)
    alone = trainer_of(tiny_glm, CONFIG)
    supervised_step(alone, [micro_batch(STREAMS)])
    mine, theirs = moments(trainer), moments(alone)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    losses = [supervised_step(one, [micro_batch(STREAMS)]).loss for one in (trainer, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def save_at_two_ranks(rank: int, model: Path, directory: Path) -> None:
    trainer = trainer_of(model, CONFIG)
    own = [STREAMS[:3], STREAMS[3:]][rank]
    supervised_step(trainer, [micro_batch(own)])
    save_checkpoint(trainer, directory, {"next": 1}, keep=1)


def moments(trainer: Trainer) -> Tensor:
    """The first moments of AdamW, in the order of parameters."""
    state = trainer.optimiser.state
    return torch.cat([state[one]["exp_avg"].flatten() for one in trainer.scorer.parameters()])


def test_saving_before_the_first_step_does_not_change_training(tiny_glm: Path, tmp_path: Path) -> None:
    plain, saved, resumed = (trainer_of(tiny_glm, CONFIG) for _ in range(3))
    save_checkpoint(saved, tmp_path, {}, keep=1)
    assert load_checkpoint(resumed, tmp_path) == {}
    losses = [
        [supervised_step(trainer, [micro_batch(STREAMS)]).loss for _ in range(2)]
        for trainer in (plain, saved, resumed)
    ]
    assert losses[0] == losses[1] == losses[2]


def test_the_newest_are_kept_and_half_written_ones_are_none(tiny_glm: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_glm, CONFIG)
    assert load_checkpoint(trainer, tmp_path) is None
    for done in (8, 9, 10, 11):
        trainer.steps = done
        save_checkpoint(trainer, tmp_path, {"next": done}, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-10", "step-11"]
    shutil.copytree(tmp_path / "step-11", tmp_path / ".step-12.draft")
    assert load_checkpoint(trainer, tmp_path) == {"next": 11}
    trainer.steps = 13
    save_checkpoint(trainer, tmp_path, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-13"]
    with pytest.raises(ValueError, match="keep at least 1"):
        save_checkpoint(trainer, tmp_path, {}, keep=0)


def test_a_checkpoint_of_another_model_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    save_checkpoint(trainer_of(tiny_models / "llama", CONFIG), tmp_path, {}, keep=1)
    with pytest.raises(CheckpointError, match="cannot go on from .*step-0: .*give the model") as error:
        load_checkpoint(trainer_of(tiny_models / "glm", CONFIG), tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "step-0" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="remove it to go on from the one before"):
        load_checkpoint(trainer_of(tiny_models / "llama", CONFIG), tmp_path)
