"""How far the sampling policy and the trainer's are apart on a batch, and what each mask makes of it.

All three masks are tried on every batch, whichever loss runs, so that runs with different losses can be
compared. The report is of whole batches: quantiles and maxima of parts do not add up, so ranks gather their
action tokens first (three numbers a token).
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from swe_env.training import Dppo, IcePop, Ipo, LossConfig, MaskConfig
from trainer.loss import LOG_RATIO_CAP, ActionTokens, dropped

QUANTILES = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)


class DropRate(BaseModel):
    """Share of action tokens that a mask drops; 0 where there are none. The cap is not counted here."""

    model_config = ConfigDict(frozen=True)

    all: float
    positive: float
    """Of tokens with Â > 0."""
    negative: float
    """Of tokens with Â < 0."""


class LossReport(BaseModel):
    """One batch in numbers, all of them finite as long as no input is NaN."""

    model_config = ConfigDict(frozen=True)

    action_tokens: int
    capped: int
    """Tokens with |log r| above `LOG_RATIO_CAP`: dropped by every loss."""
    drop_rates: dict[str, DropRate]
    """`ipo`, `icepop`, `dppo`: at the bounds of the loss that runs, and of the others at their defaults."""
    kl: float
    """Mismatch KL(μ‖π): the mean of k3 = r - log r - 1 (J. Schulman, "Approximating KL divergence", 2020)
    over action tokens, in float64, with log r held within ±`LOG_RATIO_CAP` [nats]."""
    kl_kept: float
    """Over the tokens that the loss that runs keeps."""
    kl_masked: float
    """Over those that its mask or the cap drops."""
    kl_max: float
    """Of a single token."""
    ratio_quantiles: dict[str, float]
    """Of r, by nearest rank: `0.5` is the median."""
    entropy: float
    """Mean over action tokens [nats]."""
    staleness: float
    """Mean over action tokens of the optimiser steps between the weights that sampled and those trained."""
    staleness_max: int


@torch.no_grad()
def report(tokens: ActionTokens, config: LossConfig, *, entropy: Tensor, staleness: Tensor) -> LossReport:
    """Measure a batch. `entropy` [actions] in nats, `staleness` [actions] in optimiser steps, an integer."""
    log_ratio = tokens.log_ratio.double().clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    k3 = log_ratio.expm1() - log_ratio
    masked = dropped(tokens, config) | tokens.capped
    masks: dict[str, MaskConfig] = {"ipo": Ipo(), "icepop": IcePop(), "dppo": Dppo()}
    if config.kind != "unmasked":
        masks[config.kind] = config
    return LossReport(
        action_tokens=log_ratio.numel(),
        capped=int(tokens.capped.sum()),
        drop_rates={name: _drop_rate(tokens, mask) for name, mask in masks.items()},
        kl=_mean(k3),
        kl_kept=_mean(k3[~masked]),
        kl_masked=_mean(k3[masked]),
        kl_max=float(k3.max()) if k3.numel() else 0.0,
        ratio_quantiles=_quantiles(log_ratio),
        entropy=_mean(entropy),
        staleness=_mean(staleness),
        staleness_max=int(staleness.max()) if staleness.numel() else 0,
    )


def _drop_rate(tokens: ActionTokens, mask: MaskConfig) -> DropRate:
    drop = dropped(tokens, mask)
    return DropRate(
        all=_mean(drop),
        positive=_mean(drop[tokens.advantages > 0]),
        negative=_mean(drop[tokens.advantages < 0]),
    )


def _quantiles(log_ratio: Tensor) -> dict[str, float]:
    count = log_ratio.numel()
    if not count:
        return {}
    ordered = log_ratio.sort().values.exp()  # torch.quantile refuses more than 2^24 elements
    return {f"{q:g}": float(ordered[round(q * (count - 1))]) for q in QUANTILES}


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0
