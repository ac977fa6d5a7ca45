"""One optimiser step: micro-batches to gradients, gradients to weights, and a report of what happened.

A rank accumulates the gradients of its micro-batches. Every loss is a sum ÷ a number of the global batch
(all ranks, all micro-batches), so that the result does not depend on how the batch was cut up. FSDP
averages gradients over ranks: the loss is multiplied by their number first.

A step whose loss or gradient norm is not finite changes no weight. It is counted, reported and logged as an
error; the schedule goes on, because the data does.

Not done: gradients in bfloat16, an optimiser other than AdamW, several losses in one step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from swe_env.training import LossConfig, ModelConfig, OptimiserConfig
from trainer.loss import ActionTokens, policy_loss
from trainer.loss_report import LossReport, report
from trainer.model import ranks, total
from trainer.packing import MicroBatch
from trainer.scoring import Scorer, Scores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did, the same on every rank."""

    step: int
    """From 0."""
    loss: float
    """Of the global batch."""
    losses: LossReport | None
    """How far the policies are apart; None of a supervised step, which knows only one."""
    action_nll: float
    """Mean of -log π over action tokens [nats]."""
    grad_norm: float
    """Global norm before clipping."""
    tokens: int
    """Of the global batch: prompts, observations and actions."""
    action_tokens: int
    seconds: float
    """Of this rank."""
    learning_rate: float
    skipped: bool
    """No weight was changed: the loss or the norm was not finite."""


@dataclass
class Trainer:
    """What changes from step to step. Make it with :func:`make_trainer`."""

    scorer: Scorer
    optimiser: AdamW
    config: OptimiserConfig
    autocast: bool = False
    """Products in bfloat16; sharded weights are gathered as bfloat16 instead."""
    steps: int = 0
    """Done, skipped ones included: the place in the schedule."""
    skipped: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.scorer.parameters()).device


def make_trainer(scorer: Scorer, config: OptimiserConfig, model: ModelConfig | None = None) -> Trainer:
    """AdamW over everything in `scorer` that has a gradient, in the dtype it has: float32.

    `model` is what the scorer was loaded with. Raises ValueError for a decay without an end.
    """
    if config.decay != "constant" and config.total_steps is None:
        raise ValueError(f"{config.decay} decay has no end: give total_steps, or decay = 'constant'")
    parameters = [one for one in scorer.parameters() if one.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    optimiser = AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
    )
    sharded = any(isinstance(one, DTensor) for one in parameters)
    half = model is not None and model.compute_dtype == "bfloat16"
    return Trainer(scorer, optimiser, config, autocast=half and not sharded)


def policy_step(
    trainer: Trainer,
    batches: Sequence[MicroBatch],
    loss: LossConfig,
    *,
    temperature: float = 1.0,
    version: int,
) -> StepReport:
    """One step of reinforcement learning. A collective: every rank brings as many `batches` as the others.

    `temperature` is the sampler's; `version` is that of the weights before the step, from which staleness is
    counted. Raises ValueError for a global batch without action tokens.
    """
    began, seen = time.monotonic(), _Seen()
    counts = _counts(trainer, batches)

    def loss_of(batch: MicroBatch) -> Tensor:
        scores = cast("Scores", trainer.scorer(batch, temperature=temperature))
        of = batch.is_action
        tokens = ActionTokens(scores.logprobs, batch.logprobs[of], batch.advantages[of])
        seen.add(tokens, scores.entropies, version - batch.policy_versions[of])
        return policy_loss(tokens, loss, global_actions=counts.actions)

    value = accumulate(trainer, batches, loss_of)
    tokens, entropy, staleness = seen.of_all_ranks(trainer.device)
    return _finish(
        trainer,
        began,
        value,
        counts,
        losses=report(tokens, loss, entropy=entropy, staleness=staleness),
        action_nll=float(-tokens.logprobs.double().mean()),
    )


def supervised_step(
    trainer: Trainer, batches: Sequence[MicroBatch], *, other_weight: float = 0.0
) -> StepReport:
    """One step towards what the policy of an episode did. A collective, as `policy_step` is.

    The loss is the mean of -log π with weight 1 on action tokens and `other_weight` on the others, which a
    small model learns to copy from. Advantages and recorded log-probabilities are not looked at. Raises
    ValueError for a global batch without action tokens.
    """
    began = time.monotonic()
    counts = _counts(trainer, batches)
    # a stream's first token is never predicted
    others = counts.tokens - counts.streams - counts.actions
    weight = counts.actions + other_weight * others
    action_nll = torch.zeros((), dtype=torch.float64, device=trainer.device)

    def loss_of(batch: MicroBatch) -> Tensor:
        scored = replace(batch, is_action=batch.position_ids > 0) if other_weight > 0 else batch
        nll = -cast("Scores", trainer.scorer(scored)).logprobs
        is_action = batch.is_action[scored.is_action]
        action_nll.add_(nll.detach()[is_action].double().sum())
        return (nll * torch.where(is_action, 1.0, other_weight)).sum() / weight

    value = accumulate(trainer, batches, loss_of)
    nll = float(total(action_nll)) / counts.actions
    return _finish(trainer, began, value, counts, losses=None, action_nll=nll)


def accumulate(
    trainer: Trainer, batches: Iterable[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]
) -> float:
    """Add the gradients of `batches` to those there are; returns the loss of all ranks together.

    `loss_of` is told one micro-batch, on the trainer's device, and answers its part of the global loss.
    """
    device, value = trainer.device, 0.0
    for batch in batches:
        half = torch.autocast(device.type, torch.bfloat16) if trainer.autocast else nullcontext()
        with half:
            loss = loss_of(batch.to(device))
        (loss * ranks()).backward()
        value += float(loss.detach())
    return float(total(torch.tensor(value, dtype=torch.float64, device=device)))


def apply_gradients(trainer: Trainer, loss: float) -> tuple[float, float, bool]:
    """Clip the gradients, step and clear them. Returns norm before clipping, learning rate, skipped.

    Where `loss` or the norm is not finite, which all ranks see alike, no weight and no state of the
    optimiser changes.
    """
    parameters = [one for one in trainer.scorer.parameters() if one.grad is not None]
    norm = get_total_norm([one.grad for one in parameters if one.grad is not None])
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    rate = learning_rate(trainer.steps, trainer.config)
    skip = not (math.isfinite(loss) and math.isfinite(float(whole)))
    if skip:
        trainer.skipped += 1
        log.error(
            "step %d is skipped: its loss is %s and its gradient norm %s (%d skipped so far)",
            *(trainer.steps, loss, float(whole), trainer.skipped),
        )
    else:
        clip_grads_with_norm_(parameters, trainer.config.clip_norm, whole)
        for group in trainer.optimiser.param_groups:
            group["lr"] = rate
        trainer.optimiser.step()
    trainer.optimiser.zero_grad()
    trainer.steps += 1
    return float(whole), rate, skip


def learning_rate(step: int, config: OptimiserConfig) -> float:
    """Of `step`, counted from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.decay == "constant" or config.total_steps is None:
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    left = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * left)


@dataclass(frozen=True)
class _Counts:
    """Of the global batch."""

    actions: int
    tokens: int
    streams: int


def _counts(trainer: Trainer, batches: Sequence[MicroBatch]) -> _Counts:
    own = [
        (one.action_tokens, len(one.token_ids), len(one.boundaries) - 1)
        for one in batches
        if len(one.token_ids) > 1  # not the single token of an empty one
    ]
    actions, tokens, of_streams = total(torch.tensor([(0, 0, 0), *own], device=trainer.device).sum(0))
    counts = _Counts(int(actions), int(tokens), int(of_streams))
    if counts.actions < 1:
        raise ValueError("a batch without action tokens has nothing to learn: leave the step out")
    return counts


def _finish(
    trainer: Trainer,
    began: float,
    loss: float,
    counts: _Counts,
    *,
    losses: LossReport | None,
    action_nll: float,
) -> StepReport:
    step = trainer.steps
    grad_norm, rate, skipped = apply_gradients(trainer, loss)
    return StepReport(
        step=step,
        loss=loss,
        losses=losses,
        action_nll=action_nll,
        grad_norm=grad_norm,
        tokens=counts.tokens,
        action_tokens=counts.actions,
        seconds=time.monotonic() - began,
        learning_rate=rate,
        skipped=skipped,
    )


@dataclass
class _Seen:
    """The action tokens of a step, kept for its report."""

    rows: list[Tensor] = field(default_factory=list[Tensor])
    """One a micro-batch, [5, actions]: log π, log μ, Â, entropy, staleness."""

    def add(self, tokens: ActionTokens, entropy: Tensor, staleness: Tensor) -> None:
        columns = (tokens.logprobs.detach(), tokens.inference_logprobs, tokens.advantages, entropy, staleness)
        self.rows.append(torch.stack([one.float() for one in columns]))

    def of_all_ranks(self, device: torch.device) -> tuple[ActionTokens, Tensor, Tensor]:
        """Tokens, entropy, staleness. A collective."""
        own = torch.cat([torch.zeros(5, 0, device=device), *self.rows], dim=1)
        log_pi, log_mu, advantages, entropy, staleness = _gathered(own)
        return ActionTokens(log_pi, log_mu, advantages), entropy, staleness.long()


def _gathered(own: Tensor) -> Tensor:
    """[columns, tokens of this rank] -> [columns, tokens of all ranks], in the order of ranks."""
    if not dist.is_initialized():
        return own
    lengths = own.new_zeros(ranks(), dtype=torch.int64)
    lengths[dist.get_rank()] = own.shape[1]
    most = int(total(lengths).max())
    kept: list[int] = lengths.tolist()  # pyright: ignore[reportUnknownVariableType]
    padded = torch.nn.functional.pad(own, (0, most - own.shape[1]))
    every = [torch.empty_like(padded) for _ in range(ranks())]
    dist.all_gather(every, padded)
    return torch.cat([one[:, :length] for one, length in zip(every, kept, strict=True)], dim=1)
