"""Policy losses for tokens that an older policy sampled: IPO, IcePop, DPPO, and no mask at all.

Of each action token (one that the policy sampled) two probabilities are known: μ, recorded by the
inference engine when it was sampled, and π, the trainer's now. With r = π/μ and the advantage Â, every
loss here is the importance-weighted policy gradient -r·Â on the tokens it keeps, and 0 on those it drops;
they differ in what they drop. Two can add τ·(log r)², the pull back to μ of Kimi K2.5 (arXiv 2602.02276),
on all action tokens, kept or not.

One reduction for all: the sum over action tokens ÷ the action tokens of the global batch (all ranks, all
micro-batches), so that an episode weighs by its tokens however it was packed. Ranks add up: what
averages gradients over ranks (FSDP, DDP) has to be given the loss times their number.

No pair of log-probabilities in [-inf, 0] makes a loss or gradient that is not finite: what is dropped is
decided before anything is exponentiated, and a token with |log r| above `LOG_RATIO_CAP` is dropped by
every loss, from both terms. NaN is never dropped: it reaches the loss, where it is noticed.

No clipping, no KL to a reference model, no division by a standard deviation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swe_env.training import Dppo, IcePop, Ipo, LossConfig, Unmasked

LOG_RATIO_CAP = 10.0
"""Largest |log r| that is trained on. e^10 is 22,026: a single such token outweighs a whole batch. IPO and
DPPO keep it (a token that moved from 1e-40 to 0.1 moved little in probability), and float32 overflows at
e^89. At the other end nothing is lost: below -10, r is under 5e-5."""

ROUNDING = 1e-6
"""A bound is inclusive even if float32 logarithms round a token on it to the wrong side."""


@dataclass(frozen=True)
class ActionTokens:
    """What a loss needs to know of action tokens, of any number of episodes, in any order [actions]."""

    logprobs: Tensor
    """log π, natural logarithm, at the sampler's temperature. The only one that has a gradient."""
    inference_logprobs: Tensor
    """log μ, as recorded."""
    advantages: Tensor
    """Â."""

    @property
    def log_ratio(self) -> Tensor:
        """log r [actions], at least float32; +inf where μ is 0, which no sampler can have sampled."""
        log_pi, log_mu = _wide(self.logprobs), _wide(self.inference_logprobs)
        return torch.where(log_mu.isneginf(), torch.inf, log_pi - log_mu)

    @property
    def shift(self) -> Tensor:
        """π - μ [actions], without a gradient."""
        return _wide(self.logprobs.detach()).exp() - _wide(self.inference_logprobs).exp()

    @property
    def capped(self) -> Tensor:
        """True where |log r| is above `LOG_RATIO_CAP` [actions]."""
        return self.log_ratio.detach().abs() > LOG_RATIO_CAP


def policy_loss(tokens: ActionTokens, config: LossConfig, *, global_actions: int) -> Tensor:
    """The loss that `config` names, as a scalar. See the function of that name."""
    match config:
        case Ipo():
            return ipo(tokens, config, global_actions=global_actions)
        case IcePop():
            return icepop(tokens, config, global_actions=global_actions)
        case Dppo():
            return dppo(tokens, config, global_actions=global_actions)
        case Unmasked():
            return unmasked(tokens, global_actions=global_actions)


def ipo(tokens: ActionTokens, config: Ipo, *, global_actions: int) -> Tensor:
    """Σ [|π - μ| ≤ ε]·(-r·Â) + τ·(log r)², ÷ `global_actions`. A scalar."""
    return _reduce(tokens, dropped(tokens, config), config.kl_tau, global_actions)


def icepop(tokens: ActionTokens, config: IcePop, *, global_actions: int) -> Tensor:
    """Σ [α ≤ r ≤ β]·(-r·Â), ÷ `global_actions`. A scalar."""
    return _reduce(tokens, dropped(tokens, config), 0.0, global_actions)


def dppo(tokens: ActionTokens, config: Dppo, *, global_actions: int) -> Tensor:
    """Σ [not (Â > 0 and π - μ > δ_high), not (Â < 0 and π - μ < -δ_low)]·(-r·Â) + τ·(log r)²,
    ÷ `global_actions`. A scalar."""
    return _reduce(tokens, dropped(tokens, config), config.kl_tau, global_actions)


def unmasked(tokens: ActionTokens, *, global_actions: int) -> Tensor:
    """Σ -r·Â, ÷ `global_actions`. A scalar. Only the cap drops tokens."""
    return _reduce(tokens, dropped(tokens, Unmasked()), 0.0, global_actions)


def dropped(tokens: ActionTokens, config: LossConfig) -> Tensor:
    """True where the mask of `config` drops a token [actions]; the cap comes on top of it."""
    match config:
        case Ipo(epsilon=epsilon):
            return tokens.shift.abs() > epsilon + ROUNDING
        case IcePop(alpha=alpha, beta=beta):
            log_ratio = tokens.log_ratio.detach()
            return (log_ratio < math.log(alpha) - ROUNDING) | (log_ratio > math.log(beta) + ROUNDING)
        case Dppo(delta_low=low, delta_high=high):
            shift, advantages = tokens.shift, tokens.advantages
            return ((advantages > 0) & (shift > high + ROUNDING)) | (
                (advantages < 0) & (shift < -low - ROUNDING)
            )
        case Unmasked():
            return torch.zeros_like(tokens.logprobs, dtype=torch.bool)


def _reduce(tokens: ActionTokens, drop: Tensor, kl_tau: float, global_actions: int) -> Tensor:
    if global_actions < 1:
        raise ValueError("a batch without action tokens has no loss: skip the step")
    log_ratio, capped = tokens.log_ratio, tokens.capped
    keep = ~(drop | capped)
    # log r is replaced before exp: the gradient of a token multiplied by 0 after it is 0 * inf = NaN
    ratio = torch.where(keep, log_ratio, 0.0).exp()
    loss = (keep * -ratio * tokens.advantages).sum()
    if kl_tau > 0:
        loss = loss + kl_tau * torch.where(capped, 0.0, log_ratio).square().sum()
    return loss / global_actions


def _wide(logprobs: Tensor) -> Tensor:
    return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
