"""The report: all three masks whichever loss runs, and no number that is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.loss import LOG_RATIO_CAP, ActionTokens, Dppo, IcePop, Ipo, LossConfig, Unmasked
from trainer.loss_report import DropRate, LossReport, report

logprob = st.one_of(st.floats(-100.0, 0.0), st.just(-math.inf))
LOSSES: list[LossConfig] = [Ipo(), IcePop(), Dppo(), Unmasked()]


def measure(tokens: list[tuple[float, float, float]], config: LossConfig) -> LossReport:
    columns = torch.tensor(tokens).reshape(-1, 3)
    return report(
        ActionTokens(columns[:, 0], columns[:, 1], columns[:, 2]),
        config,
        entropy=torch.full((len(tokens),), 0.5),
        staleness=torch.arange(len(tokens)),
    )


def log(pi: float, mu: float, advantage: float) -> tuple[float, float, float]:
    return math.log(pi), math.log(mu), advantage


MIXED = [
    log(0.5, 0.9, 1.0),  # dropped by IPO
    log(0.5, 0.9, -1.0),  # dropped by IPO and DPPO
    log(0.05, 0.005, 1.0),  # dropped by IcePop
    log(0.6, 0.6, -1.0),
]


@pytest.mark.parametrize("config", LOSSES)
def test_every_mask_is_tried_whichever_loss_runs(config: LossConfig) -> None:
    assert measure(MIXED, config).drop_rates == {
        "ipo": DropRate(all=0.5, positive=0.5, negative=0.5),
        "icepop": DropRate(all=0.25, positive=0.5, negative=0.0),
        "dppo": DropRate(all=0.25, positive=0.0, negative=0.5),
    }


def test_the_mask_that_runs_is_tried_at_its_own_bounds() -> None:
    rates = measure(MIXED, Ipo(epsilon=0.5)).drop_rates
    assert rates["ipo"].all == 0
    assert rates["icepop"].all == 0.25


def test_kl_is_k3_on_what_the_running_loss_keeps_and_drops() -> None:
    def k3(r: float) -> float:
        return r - math.log(r) - 1

    measured = measure(MIXED, IcePop())
    assert measured.kl_masked == pytest.approx(k3(10.0), rel=1e-5)
    assert measured.kl_kept == pytest.approx(2 * k3(5 / 9) / 3, rel=1e-5)
    assert measured.kl == pytest.approx((k3(10.0) + 2 * k3(5 / 9)) / 4, rel=1e-5)
    assert measured.kl_max == pytest.approx(k3(10.0), rel=1e-5)


def test_capped_tokens_are_counted_and_are_masked_for_every_loss() -> None:
    tokens = [(-2.0, -91.0, 1.0), (-91.0, -2.0, 1.0), (-math.inf, -math.inf, 1.0), (-1.0, -1.0, 1.0)]
    for config in LOSSES:
        measured = measure(tokens, config)
        assert measured.capped == 3
        assert measured.kl_kept == 0
        assert measured.kl_max == pytest.approx(math.exp(LOG_RATIO_CAP) - LOG_RATIO_CAP - 1)


def test_kl_of_nearly_equal_policies_is_not_lost_to_rounding() -> None:
    gap = 3 * 2**-13  # k3 of it is below the spacing of float32 around 1
    assert measure([(-1.0, -1.0 - gap, 1.0)], Ipo()).kl == pytest.approx(gap**2 / 2, rel=1e-3)


def test_ratio_quantiles_are_of_the_ratio() -> None:
    ratios = [log(0.001 * number, 0.1, 1.0) for number in range(1, 1002)]
    quantiles = measure([(min(0.0, pi), mu, one) for pi, mu, one in ratios], Ipo()).ratio_quantiles
    assert quantiles["0.001"] == pytest.approx(0.02, rel=1e-4)
    assert quantiles["0.5"] == pytest.approx(5.01, rel=1e-4)
    assert quantiles["0.999"] == pytest.approx(10.0, rel=1e-4)


def test_entropy_and_staleness_pass_through() -> None:
    measured = measure(MIXED, Ipo())
    assert (measured.entropy, measured.staleness, measured.staleness_max) == (0.5, 1.5, 3)


@given(
    tokens=st.lists(st.tuples(logprob, logprob, st.sampled_from([-1.0, 0.0, 1.0])), max_size=8),
    config=st.sampled_from(LOSSES),
)
@settings(max_examples=100, deadline=None)
def test_every_number_is_finite(tokens: list[tuple[float, float, float]], config: LossConfig) -> None:
    measured = measure(tokens, config)
    numbers = [measured.kl, measured.kl_kept, measured.kl_masked, measured.kl_max]
    rates = [value for rate in measured.drop_rates.values() for value in rate.model_dump().values()]
    assert all(map(math.isfinite, [*numbers, *rates, *measured.ratio_quantiles.values()]))
    assert measured.action_tokens == len(tokens)
