"""A step: the same whatever it was cut into, careful with what is not finite, honest in its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.trainer.processes import together
from trainer.loss import Ipo
from trainer.model import ModelConfig, load_scorer, save_model
from trainer.packing import MicroBatch, Stream, micro_batch, pack
from trainer.step import (
    OptimiserConfig,
    StepReport,
    Trainer,
    accumulate,
    learning_rate,
    make_trainer,
    policy_step,
    supervised_step,
)

LENGTHS = [37, 5, 2, 90, 12]
FAST = OptimiserConfig(learning_rate=1e-3)


def stream(length: int, *, seed: int, logprob: float = -6.9) -> Stream:
    draw = torch.Generator().manual_seed(seed)
    is_action = [index > 0 and index % 3 != 0 for index in range(length)]
    return Stream(
        token_ids=torch.randint(900, (length,), generator=draw).tolist(),
        is_action=is_action,
        logprobs=[logprob if action else 0.0 for action in is_action],
        policy_versions=[3 if action else -1 for action in is_action],
        advantage=1.0 if seed % 2 else -0.5,
        name=f"e{seed}",
    )


STREAMS = [stream(length, seed=seed) for seed, length in enumerate(LENGTHS)]


def trainer_of(directory: Path, config: OptimiserConfig = FAST, **model: Any) -> Trainer:
    held = ModelConfig(**model)
    return make_trainer(load_scorer(directory, held), config, held)


def gradients(trainer: Trainer, batches: Sequence[MicroBatch], *, actions: int) -> dict[str, Tensor]:
    """Of the mean of -log π over `actions` tokens, on whole tensors."""
    accumulate(trainer, batches, lambda batch: -trainer.scorer(batch).logprobs.sum() / actions)
    found: dict[str, Tensor] = {}
    for name, parameter in trainer.scorer.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    return found


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance * scale, msg=name)


def similarity(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Cosine between two gradients."""
    one, other = (torch.cat([grad.flatten().double() for grad in of.values()]) for of in (found, expected))
    return float(torch.cosine_similarity(one, other, dim=0))


ACTIONS = sum(sum(one.is_action) for one in STREAMS)


def test_losses_and_gradients_do_not_depend_on_the_number_of_micro_batches(tiny_glm: Path) -> None:
    [cut] = pack(STREAMS, budget=90)
    assert len(cut) > 1
    whole, parts = trainer_of(tiny_glm), trainer_of(tiny_glm)
    close(gradients(parts, cut, actions=ACTIONS), gradients(whole, [micro_batch(STREAMS)], actions=ACTIONS))


def test_a_report_says_what_the_step_did(tiny_glm: Path) -> None:
    [cut] = pack(STREAMS, budget=90)
    done = policy_step(trainer_of(tiny_glm), cut, Ipo(), version=5)
    assert (done.step, done.skipped, done.learning_rate) == (0, False, FAST.learning_rate)
    assert (done.tokens, done.action_tokens) == (sum(LENGTHS), ACTIONS)
    assert done.losses is not None
    assert (done.losses.action_tokens, done.losses.staleness) == (ACTIONS, 2)
    assert done.seconds > 0


def test_the_loss_falls_from_step_to_step(tiny_glm: Path) -> None:
    trainer, batch = trainer_of(tiny_glm), micro_batch(STREAMS)
    reports = [supervised_step(trainer, [batch]) for _ in range(5)]
    assert reports[-1].loss < reports[0].loss - 0.5
    assert [one.step for one in reports] == [0, 1, 2, 3, 4]


def test_a_supervised_loss_is_the_weighted_mean_of_what_the_models_own_logits_say(tiny_glm: Path) -> None:
    batch = micro_batch([STREAMS[3]])
    model = AutoModelForCausalLM.from_pretrained(tiny_glm)
    with torch.no_grad():
        every = torch.log_softmax(model(input_ids=batch.token_ids[None]).logits[0], -1)
    nll = -every[:-1].gather(1, batch.token_ids[1:, None])[:, 0]
    is_action = batch.is_action[1:]
    weights = torch.where(is_action, 1.0, 0.1)
    done = supervised_step(trainer_of(tiny_glm), [batch], other_weight=0.1)
    assert done.loss == pytest.approx(float((nll * weights).sum() / weights.sum()), abs=1e-5)
    assert done.action_nll == pytest.approx(float(nll[is_action].mean()), abs=1e-5)
    without = supervised_step(trainer_of(tiny_glm), [batch])
    assert without.loss == pytest.approx(without.action_nll, rel=5e-7)  # float32: 1e-7


def test_gradients_are_clipped_to_a_global_norm_and_the_norm_before_is_reported(tiny_glm: Path) -> None:
    batch = micro_batch(STREAMS)
    expected = gradients(trainer_of(tiny_glm), [batch], actions=ACTIONS)
    trainer = trainer_of(tiny_glm, OptimiserConfig(clip_norm=0.01, betas=(0.9, 0.95)))
    done = supervised_step(trainer, [batch])
    norm = torch.cat([one.flatten().double() for one in expected.values()]).norm()
    assert done.grad_norm == pytest.approx(float(norm), rel=1e-4)
    first = [trainer.optimiser.state[one]["exp_avg"].flatten() for one in trainer.scorer.parameters()]
    assert float(torch.cat(first).double().norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted_aloud(
    tiny_glm: Path, caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    trainer = trainer_of(tiny_glm)
    before = [one.detach().clone() for one in trainer.scorer.parameters()]
    broken = micro_batch([replace(STREAMS[0], advantage=bad), *STREAMS[1:]])
    done = policy_step(trainer, [broken], Ipo(epsilon=1), version=3)
    assert done.skipped
    assert (trainer.skipped, trainer.steps) == (1, 1)
    assert "step 0 is skipped" in caplog.text
    assert all(torch.equal(*pair) for pair in zip(before, trainer.scorer.parameters(), strict=True))
    assert not trainer.optimiser.state
    assert not supervised_step(trainer, [micro_batch(STREAMS)]).skipped


def test_a_batch_in_which_nobody_acts_is_refused(tiny_glm: Path) -> None:
    idle = replace(STREAMS[0], is_action=[False] * LENGTHS[0])
    with pytest.raises(ValueError, match="nothing to learn: leave the step out"):
        supervised_step(trainer_of(tiny_glm), [micro_batch([idle])])


def test_the_learning_rate_rises_and_falls_as_configured() -> None:
    def rates(**more: Any) -> list[float]:
        config = OptimiserConfig(learning_rate=1.0, **more)
        return [round(learning_rate(step, config), 3) for step in range(8)]

    assert rates() == [1] * 8
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1, 1]
    down: dict[str, Any] = {"warmup_steps": 2, "total_steps": 6, "final_fraction": 0.2}
    assert rates(decay="linear", **down) == [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates(decay="cosine", **down) == [0.5, 1, 1, 0.883, 0.6, 0.317, 0.2, 0.2]


def test_a_decay_without_an_end_is_refused(tiny_glm: Path) -> None:
    with pytest.raises(ValueError, match="has no end: give total_steps"):
        trainer_of(tiny_glm, OptimiserConfig(decay="linear"))


@pytest.mark.parametrize("shape", ["glm", "qwen", "llama"])
def test_in_bfloat16_weights_and_gradients_stay_float32(tiny_models: Path, shape: str) -> None:
    batch = [micro_batch(STREAMS)]
    half = trainer_of(tiny_models / shape, compute_dtype="bfloat16", activation_checkpointing=True)
    found = gradients(half, batch, actions=ACTIONS)
    expected = gradients(trainer_of(tiny_models / shape), batch, actions=ACTIONS)
    assert {one.dtype for one in [*half.scorer.parameters(), *found.values()]} == {torch.float32}
    assert 0.95 < similarity(found, expected) < 1


def test_two_ranks_do_what_one_does(tiny_models: Path, tmp_path: Path) -> None:
    together(2, _rank, tmp_path / "meet", tiny_models, tmp_path)
    for shape in ("glm", "qwen"):
        one = trainer_of(tiny_models / shape)
        expected = gradients(one, [micro_batch(STREAMS)], actions=ACTIONS)
        for checkpointing in (False, True):
            found = torch.load(tmp_path / f"{shape}-{checkpointing}.pt")
            close(found, expected)
        one.optimiser.zero_grad()
        alone = policy_step(one, [micro_batch(STREAMS)], Ipo(), version=5)
        for rank in range(2):
            both: StepReport = torch.load(tmp_path / f"{shape}-{rank}.pt", weights_only=False)
            assert both.loss == pytest.approx(alone.loss, abs=1e-5)
            assert both.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
            assert (both.tokens, both.action_tokens) == (alone.tokens, alone.action_tokens)
            assert both.losses is not None
            assert alone.losses is not None
            assert both.losses.kl == pytest.approx(alone.losses.kl, rel=1e-5)
            assert both.losses.drop_rates == alone.losses.drop_rates
    half = torch.load(tmp_path / "half.pt")
    exact = torch.load(tmp_path / "glm-False.pt")
    assert {one.dtype for one in half.values()} == {torch.float32}
    assert 0.95 < similarity(half, exact) < 1
    # what two ranks save is what they loaded, to the last bit and name
    before = AutoModelForCausalLM.from_pretrained(tiny_models / "glm").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def _rank(rank: int, models: Path, out: Path) -> None:
    """One of two processes. The second has nothing to do in the last round."""
    rounds = [[[3], [0, 1]], [[2, 4], []]]
    own = [micro_batch([STREAMS[index] for index in of_ranks[rank]]) for of_ranks in rounds]
    for shape in ("glm", "qwen"):
        for checkpointing in (False, True):
            trainer = trainer_of(models / shape, activation_checkpointing=checkpointing)
            found = gradients(trainer, own, actions=ACTIONS)
            if rank == 0:
                torch.save(found, out / f"{shape}-{checkpointing}.pt")
            trainer.optimiser.zero_grad()
        if shape == "glm":
            saved = out / "saved"
            saved.mkdir(exist_ok=True)
            save_model(trainer.scorer, models / shape, saved)
        torch.save(policy_step(trainer, own, Ipo(), version=5), out / f"{shape}-{rank}.pt")
    half = trainer_of(models / "glm", compute_dtype="bfloat16", activation_checkpointing=True)
    found = gradients(half, own, actions=ACTIONS)
    if rank == 0:
        torch.save(found, out / "half.pt")
