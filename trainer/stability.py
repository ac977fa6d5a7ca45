"""Sorting six digits, learnt by many small policies side by side, from tokens of older selves of theirs.

Each training of the map is a policy of its own (a perceptron that writes the digits one after the other),
with its own AdamW; they are stacked, so that one matrix product serves all of them. A policy samples in
bfloat16 with the weights that it had `staleness` optimiser steps ago; what it learns from, and how, is what
the trainer of real policies does: log-probabilities in float32, groups whose mean reward is subtracted,
the loss of :mod:`trainer.loss`, clipped gradients.

`swe-env stability` starts this as `python -m trainer.stability CONFIG.json`.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.nn.functional import one_hot

from swe_env.stability import Kind, Run, StabilityConfig, Step
from swe_env.training import Dppo, IcePop, Ipo, LossConfig, Unmasked
from swe_env.vllm_launcher import die_with_parent
from trainer.loss import LOG_RATIO_CAP, ActionTokens, dropped, policy_loss
from trainer.processes import stop_on_term

DIGITS, LENGTH, HIDDEN = 10, 6, 64
TASKS, GROUP = 8, 8
"""Of a step."""
EPISODES = TASKS * GROUP
ACTIONS = EPISODES * LENGTH
BETAS, EPSILON, CLIP = (0.9, 0.95), 1e-8, 1.0
TOLERANCE, GAIN = 0.05, 0.1
"""A run is stable if its last fifth is at most so much worse than its best, and so much above its start."""

Weights = list[Tensor]
"""[policies, in, out] each."""


@dataclass(frozen=True)
class Place:
    """One training of the map."""

    loss: Kind
    staleness: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Curves:
    """What was measured, [steps, policies] each."""

    reward: Tensor
    kl: Tensor
    masked: Tensor
    finite: Tensor


def train(config: StabilityConfig, show: Callable[[BaseModel], None]) -> None:
    """Train the whole map; `show` is told a `Step` now and then, and each `Run` at the end."""
    places = [
        Place(loss, staleness, lr, seed)
        for loss, staleness, lr, seed in itertools.product(
            config.losses, config.staleness, config.lrs, range(config.seeds)
        )
    ]
    curves = learn(places, config, show)
    for index, place in enumerate(places):
        show(summary(place, index, curves))


def learn(places: list[Place], config: StabilityConfig, show: Callable[[BaseModel], None]) -> Curves:
    """Take all steps, of all policies at once."""
    weights = first_weights([place.seed for place in places])
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in weights]
    lrs = torch.tensor([place.lr for place in places])
    stale = torch.tensor([place.staleness for place in places])
    bounds = bounds_of(config)
    seeds = torch.tensor([place.seed for place in places])
    past: deque[Weights] = deque(maxlen=max(config.staleness) + 1)
    rows: list[tuple[Tensor, ...]] = []
    for step in range(config.steps):
        past.append([one.detach().bfloat16() for one in weights])
        ago = stale.clamp(max=step)
        older = [past[-1 - int(back)] for back in ago]
        sampler = [torch.stack([of[which][run] for run, of in enumerate(older)]) for which in range(3)]
        prompts, noise = drawn(step, config.seeds)
        prompts, noise = prompts[seeds], noise[seeds]
        tokens, inference_logprobs = sample(sampler, prompts, noise)
        rewards = (tokens == prompts.sort(-1).values).float().mean(-1)
        groups = rewards.view(len(places), TASKS, GROUP)
        advantages = (groups - groups.mean(-1, keepdim=True)).view(len(places), EPISODES, 1)
        seen = features(prompts, tokens).flatten(1, 2)
        every = logits(weights, seen).log_softmax(-1).view(*tokens.shape, DIGITS)
        logprobs = every.gather(-1, tokens[..., None])[..., 0]
        loss, masked = losses_of(places, bounds, logprobs, inference_logprobs, advantages.expand_as(logprobs))
        gradients = torch.autograd.grad(loss, weights)
        finite = update(weights, list(gradients), moments, lrs, step)
        log_ratio = (logprobs.detach() - inference_logprobs).double().clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
        kl = (log_ratio.expm1() - log_ratio).mean((1, 2))
        rows.append((rewards.mean(-1), kl.float(), masked, finite))
        if step % 10 == 9:
            show(Step(step=step, steps=config.steps))
    return Curves(*(torch.stack(column) for column in zip(*rows, strict=True)))


def first_weights(seeds: list[int]) -> Weights:
    """The same for the same seed."""
    sizes = [(DIGITS * 2 + 1 + LENGTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, DIGITS)]
    drawn: list[Weights] = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        drawn.append([torch.randn(size, generator=generator) * size[0] ** -0.5 for size in sizes])
    return [torch.stack(of).requires_grad_() for of in zip(*drawn, strict=True)]


def drawn(step: int, seeds: int) -> tuple[Tensor, Tensor]:
    """Prompts, each `GROUP` times, [seeds, EPISODES, LENGTH]; Gumbel noise, DIGITS more in each place."""
    prompts, noise = list[Tensor](), list[Tensor]()
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(1_000_003 * seed + step + 1)
        own = torch.randint(DIGITS, (TASKS, LENGTH), generator=generator)
        prompts.append(own.repeat_interleave(GROUP, 0))
        uniform = torch.rand(EPISODES, LENGTH, DIGITS, generator=generator).clamp(1e-9, 1 - 1e-7)
        noise.append(-(-uniform.log()).log())
    return torch.stack(prompts), torch.stack(noise)


def features(prompts: Tensor, tokens: Tensor) -> Tensor:
    """What a policy sees before each of `tokens`: which digits there are, the one that it wrote last, and the
    place. [policies, episodes, places, features]"""
    before = torch.cat([torch.full_like(tokens[..., :1], DIGITS), tokens[..., :-1]], -1)
    counts = one_hot(prompts, DIGITS).sum(-2, keepdim=True).expand(*tokens.shape, DIGITS)
    places = torch.arange(tokens.shape[-1]).expand(tokens.shape)
    return torch.cat([counts, one_hot(before, DIGITS + 1), one_hot(places, LENGTH)], -1)


def logits(weights: Weights, seen: Tensor) -> Tensor:
    """Of the next digit, [policies, rows, DIGITS], after features [policies, rows, ...]."""
    hidden = torch.bmm(seen.to(weights[0].dtype), weights[0]).relu()
    hidden = torch.bmm(hidden, weights[1]).relu()
    return torch.bmm(hidden, weights[2])


def sample(weights: Weights, prompts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities in float32, [policies, episodes, LENGTH] each."""
    tokens = torch.zeros_like(prompts)
    found: list[Tensor] = []
    with torch.no_grad():
        for place in range(LENGTH):
            seen = features(prompts, tokens)[..., place, :]  # nothing of the tokens from `place` on
            logprobs = logits(weights, seen).float().log_softmax(-1)
            tokens[..., place] = (logprobs + noise[..., place, :]).argmax(-1)
            found.append(logprobs.gather(-1, tokens[..., place, None])[..., 0])
    return tokens, torch.stack(found, -1)


def losses_of(
    places: list[Place],
    bounds: dict[Kind, LossConfig],
    logprobs: Tensor,
    inference_logprobs: Tensor,
    advantages: Tensor,
) -> tuple[Tensor, Tensor]:
    """The sum of all policies' losses, and the share of tokens that each drops [policies]."""
    loss, masked = torch.zeros(()), torch.zeros(len(places))
    kinds: dict[Kind, None] = dict.fromkeys(place.loss for place in places)
    for kind in kinds:
        own = torch.tensor([place.loss == kind for place in places])
        config = bounds[kind]
        flat = [one[own].flatten() for one in (logprobs, inference_logprobs, advantages)]
        tokens = ActionTokens(*flat)
        loss = loss + policy_loss(tokens, config, global_actions=ACTIONS)
        drop = dropped(tokens, config) | tokens.capped
        masked[own] = drop.float().view(int(own.sum()), ACTIONS).mean(-1)
    return loss, masked


def bounds_of(config: StabilityConfig) -> dict[Kind, LossConfig]:
    """The losses, at their default bounds."""
    if config.kl_tau is None:
        return {"ipo": Ipo(), "icepop": IcePop(), "dppo": Dppo(), "unmasked": Unmasked()}
    tau = config.kl_tau
    return {"ipo": Ipo(kl_tau=tau), "icepop": IcePop(), "dppo": Dppo(kl_tau=tau), "unmasked": Unmasked()}


def update(
    weights: Weights, gradients: list[Tensor], moments: list[tuple[Tensor, Tensor]], lrs: Tensor, step: int
) -> Tensor:
    """One step of Adam, a learning rate a policy. Returns whose gradient was finite [policies]; the others
    stay as they are."""
    norm = torch.stack([one.flatten(1).square().sum(1) for one in gradients]).sum(0).sqrt()
    finite = norm.isfinite()
    scale = torch.where(finite, (CLIP / (norm + 1e-6)).clamp(max=1.0), 0.0)[:, None, None]
    with torch.no_grad():
        for one, gradient, (first, second) in zip(weights, gradients, moments, strict=True):
            clipped = torch.where(finite[:, None, None], gradient * scale, 0.0)
            first.lerp_(clipped, 1 - BETAS[0])
            second.lerp_(clipped.square(), 1 - BETAS[1])
            mean = first / (1 - BETAS[0] ** (step + 1))
            spread = (second / (1 - BETAS[1] ** (step + 1))).sqrt() + EPSILON
            one -= torch.where(finite, lrs, 0.0)[:, None, None] * mean / spread
    return finite


def summary(place: Place, index: int, curves: Curves) -> Run:
    """What is left of one training."""
    steps = len(curves.reward)
    fifths = [float(part.mean()) for part in curves.reward[:, index].chunk(5)]
    tenth = max(1, (steps - place.staleness) // 10)
    kl = curves.kl[:, index]
    start = float(curves.reward[:5, index].mean())
    skipped = int((~curves.finite[:, index]).sum())
    return Run(
        loss=place.loss,
        staleness=place.staleness,
        lr=place.lr,
        seed=place.seed,
        stable=skipped == 0 and fifths[-1] >= max(max(fifths) - TOLERANCE, start + GAIN),
        reward=fifths[-1],
        best=max(fifths),
        kl_early=float(kl[place.staleness : place.staleness + tenth].mean()),
        kl_late=float(kl[-tenth:].mean()),
        masked=float(curves.masked[-(steps // 5) :, index].mean()),
        skipped=skipped,
    )


def main() -> None:
    signal.signal(signal.SIGTERM, stop_on_term)
    die_with_parent()
    config = StabilityConfig.model_validate_json(Path(sys.argv[1]).read_bytes())
    train(config, lambda line: print(line.model_dump_json(), flush=True))


if __name__ == "__main__":
    main()
