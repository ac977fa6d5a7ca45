"""The stability map: runs are what they would be alone, and the map says of them what it claims."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from swe_env.stability import Kind, Run, StabilityConfig, cells
from swe_env.training import Dppo, IcePop, Ipo, Unmasked
from trainer.stability import (
    LENGTH,
    Curves,
    Place,
    bounds_of,
    drawn,
    features,
    first_weights,
    learn,
    sample,
    summary,
)

CONFIG = StabilityConfig(losses=["ipo"], staleness=[0, 3], lrs=[1e-2], seeds=1, steps=12)
HERE = Place("ipo", 3, 1e-2, 1)


def quietly(_: BaseModel) -> None:
    pass


def curve(places: list[Place], which: Place) -> torch.Tensor:
    steps = CONFIG.model_copy(update={"seeds": 2})
    return learn(places, steps, quietly).kl[:, places.index(which)]


def test_a_run_does_not_depend_on_what_else_is_mapped() -> None:
    other: Kind = "unmasked"
    crowd = [
        replace(HERE, seed=0),
        replace(HERE, loss=other),
        HERE,
        replace(HERE, lr=1.0),
        replace(HERE, staleness=0),
    ]
    torch.testing.assert_close(curve(crowd, HERE), curve([HERE], HERE), rtol=1e-3, atol=1e-6)


def test_policies_sample_with_the_weights_of_so_many_steps_ago() -> None:
    """Without staleness only bfloat16 is between sampler and trainer; with it, what was learnt since."""
    fresh = replace(HERE, staleness=0)
    curves = learn([fresh, HERE], CONFIG.model_copy(update={"seeds": 2}), quietly)
    assert torch.equal(curves.reward[0, 0], curves.reward[0, 1])  # nothing is older than the first weights
    assert (curves.kl[:, 0] < 1e-4).all()
    assert (curves.kl[3:, 1] > 1e-3).all()


def test_log_probabilities_are_of_the_tokens_that_were_sampled() -> None:
    weights = first_weights([0, 1])
    prompts, noise = drawn(0, 2)
    tokens, logprobs = sample(weights, prompts, noise)
    again, _ = sample(weights, prompts, noise)
    assert torch.equal(tokens, again)
    assert logprobs.exp().sum() > 0
    seen = features(prompts, tokens)
    assert seen.shape == (*tokens.shape, 10 + 11 + LENGTH)
    assert torch.equal(seen[..., 1:, 10:20].argmax(-1), tokens[..., :-1])  # the digit before


def test_a_run_that_falls_back_or_learns_nothing_is_not_stable() -> None:
    def judged(rewards: list[float]) -> Run:
        reward = torch.tensor(rewards).repeat_interleave(10)[:, None]
        ones = torch.ones_like(reward)
        return summary(Place("ipo", 0, 1e-2, 0), 0, Curves(reward, ones, ones, ones.bool()))

    assert judged([0.1, 0.2, 0.3, 0.4, 0.5]).stable
    assert judged([0.1, 0.2, 0.4, 0.5, 0.46]).stable
    assert not judged([0.1, 0.2, 0.4, 0.5, 0.4]).stable
    assert not judged([0.1, 0.1, 0.1, 0.1, 0.1]).stable


def run(lr: float, seed: int, *, stable: bool, reward: float) -> Run:
    return Run(
        loss="ipo",
        staleness=8,
        lr=lr,
        seed=seed,
        stable=stable,
        reward=reward,
        best=reward,
        kl_early=0.1,
        kl_late=0.2,
        masked=0.0,
        skipped=0,
    )


def test_the_largest_stable_learning_rate_is_stable_for_all_seeds() -> None:
    runs = [
        run(0.1, 0, stable=True, reward=0.4),
        run(0.1, 1, stable=True, reward=0.6),
        run(0.2, 0, stable=True, reward=0.9),
        run(0.2, 1, stable=False, reward=0.5),
    ]
    [cell] = cells(runs)
    assert (cell.largest, cell.reward, cell.best_lr, cell.kl_growth) == (0.1, 0.5, 0.2, 2.0)
    [none] = cells([run(0.1, 0, stable=False, reward=0.2)])
    assert (none.largest, none.reward) == (None, None)


def command(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "swe_env", "stability", "--out", str(out), *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def test_the_command_writes_a_table_and_a_picture(tmp_path: Path) -> None:
    small = ("--losses=ipo,dppo", "--staleness=0,2", "--lrs=1e-2", "--seeds=2", "--steps=10")
    done = command(tmp_path / "map", *small)
    assert done.returncode == 0, done.stderr
    assert "largest stable lr" in done.stdout
    with (tmp_path / "map" / "runs.csv").open() as file:
        rows = [Run.model_validate(row) for row in csv.DictReader(file)]
    assert [(row.loss, row.staleness, row.seed) for row in rows] == [
        (loss, staleness, seed) for loss in ("ipo", "dppo") for staleness in (0, 2) for seed in (0, 1)
    ]
    assert (tmp_path / "map" / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--losses", "ppo", "--losses: input should be 'ipo'"),
        ("--staleness", "-1", "--staleness: input should be"),
    ],
)
def test_what_cannot_be_mapped_is_refused(option: str, value: str, message: str, tmp_path: Path) -> None:
    done = command(tmp_path / "map", f"{option}={value}")
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "map").exists()


def test_with_one_weight_of_the_divergence_only_the_masks_differ() -> None:
    bounds = bounds_of(StabilityConfig(kl_tau=0.0))
    assert bounds == {"ipo": Ipo(), "icepop": IcePop(), "dppo": Dppo(kl_tau=0.0), "unmasked": Unmasked()}
    assert bounds_of(StabilityConfig())["dppo"] == Dppo()
