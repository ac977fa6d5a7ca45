"""Losses: equal to a reference in plain Python, finite everywhere, and different where they should be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from trainer.loss import (
    LOG_RATIO_CAP,
    ActionTokens,
    Dppo,
    IcePop,
    Ipo,
    LossConfig,
    Unmasked,
    dppo,
    dropped,
    icepop,
    ipo,
    policy_loss,
    unmasked,
)

Token = tuple[float, float, float]
"""log π, log μ, Â."""
LOSSES: list[LossConfig] = [Ipo(), Ipo(kl_tau=1e-3), IcePop(), Dppo(), Unmasked()]
ids: Callable[[LossConfig], str] = repr

logprob = st.one_of(st.floats(-100.0, 0.0), st.floats(-4.0, 0.0), st.sampled_from([0.0, -2.0, -91.0]))
impossible = st.one_of(logprob, st.just(-math.inf))
advantage = st.one_of(st.floats(-2.0, 2.0), st.sampled_from([0.0, 1.0, -1.0]))
configs = st.one_of(
    st.builds(Ipo, epsilon=st.floats(0.01, 1.0), kl_tau=st.floats(0.0, 0.1)),
    st.builds(IcePop, alpha=st.floats(0.01, 1.0), beta=st.floats(1.0, 50.0)),
    st.builds(
        Dppo, delta_low=st.floats(0.01, 1.0), delta_high=st.floats(0.01, 1.0), kl_tau=st.floats(0.0, 0.1)
    ),
    st.just(Unmasked()),
)


def action_tokens(tokens: Sequence[Token], dtype: torch.dtype = torch.float32) -> ActionTokens:
    columns = torch.tensor(tokens, dtype=dtype).reshape(-1, 3)
    return ActionTokens(columns[:, 0].clone().requires_grad_(), columns[:, 1], columns[:, 2])


def probabilities(pi: float, mu: float, advantage: float = 1.0) -> ActionTokens:
    return action_tokens([(math.log(pi), math.log(mu), advantage)])


def loss_and_gradient(
    tokens: Sequence[Token], config: LossConfig, dtype: torch.dtype = torch.float32
) -> tuple[float, list[float]]:
    made = action_tokens(tokens, dtype)
    loss = policy_loss(made, config, global_actions=7)
    loss.backward()
    assert made.logprobs.grad is not None
    return float(loss.detach()), made.logprobs.grad.tolist()


def reference(token: Token, config: LossConfig) -> float:
    """One token's loss from the table of definitions, in Python floats, without the cap."""
    log_pi, log_mu, adv = token
    pi, mu, log_r = math.exp(log_pi), math.exp(log_mu), log_pi - log_mu
    match config:
        case Ipo():
            keep, tau = abs(pi - mu) <= config.epsilon, config.kl_tau
        case IcePop():
            keep, tau = config.alpha <= math.exp(log_r) <= config.beta, 0.0
        case Dppo():
            too_high, too_low = (
                adv > 0 and pi - mu > config.delta_high,
                adv < 0 and pi - mu < -config.delta_low,
            )
            keep, tau = not (too_high or too_low), config.kl_tau
        case Unmasked():
            keep, tau = True, 0.0
    return (-math.exp(log_r) * adv if keep else 0.0) + tau * log_r**2


def reference_slope(token: Token, config: LossConfig, step: float = 1e-6) -> float:
    """By log π, from differences. The mask is a constant of the gradient, hence those of a fixed mask."""
    log_pi, log_mu, adv = token
    lower, upper = (reference((log_pi + sign * step, log_mu, adv), config) for sign in (-1, 1))
    return (upper - lower) / (2 * step)


def near_a_bound(token: Token, config: LossConfig, margin: float = 1e-4) -> bool:
    """Rounding, or a difference's step, may decide such a token."""
    log_pi, log_mu, _ = token
    shift, log_r = math.exp(log_pi) - math.exp(log_mu), log_pi - log_mu
    bounds = [abs(abs(log_r) - LOG_RATIO_CAP)]
    match config:
        case Ipo():
            bounds.append(abs(abs(shift) - config.epsilon))
        case IcePop():
            bounds += [abs(log_r - math.log(config.alpha)), abs(log_r - math.log(config.beta))]
        case Dppo():
            bounds += [abs(shift - config.delta_high), abs(shift + config.delta_low)]
        case Unmasked():
            pass
    return min(bounds) < margin


@given(tokens=st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=6), config=configs)
@settings(max_examples=300, deadline=None)
def test_a_loss_is_what_its_definition_says(tokens: list[Token], config: LossConfig) -> None:
    assume(not any(near_a_bound(token, config) for token in tokens))
    within = [token for token in tokens if abs(token[0] - token[1]) <= LOG_RATIO_CAP]
    expected = sum(reference(token, config) for token in within) / 7
    assert loss_and_gradient(tokens, config, torch.float64)[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(token=st.tuples(logprob, logprob, advantage), config=configs)
@settings(max_examples=200, deadline=None)
def test_a_gradient_is_the_slope_of_the_loss(token: Token, config: LossConfig) -> None:
    assume(not near_a_bound(token, config))
    expected = reference_slope(token, config) / 7 if abs(token[0] - token[1]) <= LOG_RATIO_CAP else 0.0
    gradient = loss_and_gradient([token], config, torch.float64)[1]
    assert gradient == pytest.approx([expected], rel=1e-5, abs=1e-7)


@given(tokens=st.lists(st.tuples(logprob, logprob, advantage), max_size=6), config=configs)
@settings(max_examples=100, deadline=None)
def test_float32_is_enough(tokens: list[Token], config: LossConfig) -> None:
    assume(not any(near_a_bound(token, config) for token in tokens))
    exact, gradient = loss_and_gradient(tokens, config, torch.float64)
    assert loss_and_gradient(tokens, config)[1] == pytest.approx(gradient, rel=1e-4, abs=1e-6)
    scale = sum(abs(one) for one in gradient)
    assert loss_and_gradient(tokens, config)[0] == pytest.approx(exact, rel=1e-4, abs=1e-4 * scale + 1e-6)


@given(tokens=st.lists(st.tuples(impossible, impossible, advantage), max_size=6), config=configs)
@settings(max_examples=300, deadline=None)
def test_loss_and_gradient_are_finite_whatever_the_log_probabilities(
    tokens: list[Token], config: LossConfig
) -> None:
    loss, gradient = loss_and_gradient(tokens, config)
    assert all(map(math.isfinite, [loss, *gradient]))


@pytest.mark.parametrize("config", LOSSES, ids=ids)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "pair",
    [(-2.0, -91.0), (-91.0, -2.0), (0.0, 0.0), (-math.inf, -2.0), (-2.0, -math.inf), (-math.inf, -math.inf)],
)
def test_extreme_pairs_are_harmless(pair: tuple[float, float], sign: float, config: LossConfig) -> None:
    """Case T25: with (-2, -91) IPO keeps the token, as |π - μ| is 0.135, and r = e^89 overflows float32."""
    loss, gradient = loss_and_gradient([(*pair, sign)], config)
    assert math.isfinite(loss)
    assert gradient == [0.0 if pair != (0.0, 0.0) else pytest.approx(-sign / 7)]


@pytest.mark.parametrize("config", LOSSES, ids=ids)
def test_an_extreme_token_leaves_the_gradient_of_the_others_alone(config: LossConfig) -> None:
    ordinary = [(-1.0, -1.1, 1.0), (-0.2, -0.1, -1.0)]
    alone = loss_and_gradient(ordinary, config)[1]
    assert loss_and_gradient([*ordinary, (-2.0, -91.0, 1.0)], config)[1] == [*alone, 0.0]


@pytest.mark.parametrize("config", LOSSES, ids=ids)
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_nan_is_not_masked_away(column: int, config: LossConfig) -> None:
    """It says that the model or the record is broken."""
    token = [-1.0, -1.0, 1.0]
    token[column] = math.nan
    assert math.isnan(loss_and_gradient([(token[0], token[1], token[2])], config)[0])


def test_a_likely_token_that_became_less_so_separates_the_masks() -> None:
    token = probabilities(0.5, 0.9)
    assert dropped(token, Ipo()).item()
    assert not dropped(token, IcePop()).item()


def test_a_rare_token_that_became_less_rare_separates_the_masks() -> None:
    token = probabilities(0.05, 0.005)
    assert not dropped(token, Ipo()).item()
    assert dropped(token, IcePop()).item()


@pytest.mark.parametrize(
    ("pi", "mu", "sign", "drops"),
    [
        (0.9, 0.5, 1.0, True),  # pushed up, and up already
        (0.9, 0.5, -1.0, False),  # pushed back
        (0.5, 0.9, -1.0, True),  # pushed down, and down already
        (0.5, 0.9, 1.0, False),
        (0.9, 0.5, 0.0, False),  # pushed nowhere
    ],
)
def test_dppo_drops_only_what_is_pushed_further_away(pi: float, mu: float, sign: float, drops: bool) -> None:
    assert dropped(probabilities(pi, mu, sign), Dppo()).item() is drops


@pytest.mark.parametrize(("pi", "mu", "epsilon"), [(0.5, 0.2, 0.3), (0.2, 0.5, 0.3), (0.13, 0.03, 0.1)])
def test_ipos_bound_is_inclusive(pi: float, mu: float, epsilon: float) -> None:
    """In float32 0.13 - 0.03 is more than 0.1."""
    assert not dropped(probabilities(pi, mu), Ipo(epsilon=epsilon)).item()


@pytest.mark.parametrize(("pi", "mu"), [(0.5, 0.1), (0.1, 0.5), (0.034, 0.17), (0.17, 0.034)])
def test_icepops_bounds_are_inclusive(pi: float, mu: float) -> None:
    """In float32 the logarithms of 0.17 and 0.034 differ by more than that of 5."""
    assert not dropped(probabilities(pi, mu), IcePop(alpha=0.2, beta=5.0)).item()


@pytest.mark.parametrize(("pi", "mu", "sign"), [(0.27, 0.07, 1.0), (0.07, 0.27, -1.0)])
def test_dppos_bounds_are_inclusive(pi: float, mu: float, sign: float) -> None:
    assert not dropped(probabilities(pi, mu, sign), Dppo()).item()


def test_the_pull_back_reaches_tokens_that_the_mask_drops() -> None:
    token = (math.log(0.9), math.log(0.5), 1.0)
    gradient = loss_and_gradient([token], Dppo(kl_tau=0.5))[1]
    assert gradient == [pytest.approx(2 * 0.5 * math.log(0.9 / 0.5) / 7)]


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    tokens = [(-1.0, -1.2, 1.0), (-0.5, -0.4, 1.0), (-2.0, -2.5, -0.5)]
    whole = policy_loss(action_tokens(tokens), Ipo(), global_actions=3)
    parts = [policy_loss(action_tokens(part), Ipo(), global_actions=3) for part in (tokens[:1], tokens[1:])]
    assert sum(float(part.detach()) for part in parts) == pytest.approx(float(whole.detach()))


@pytest.mark.parametrize("config", LOSSES, ids=ids)
def test_no_tokens_are_a_loss_of_zero_with_a_gradient(config: LossConfig) -> None:
    """An empty micro-batch takes part in the backward pass like any other."""
    assert loss_and_gradient([], config) == (0.0, [])


def test_a_batch_without_action_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no loss: skip the step"):
        policy_loss(action_tokens([]), Ipo(), global_actions=0)


def test_each_loss_has_a_function_of_its_own() -> None:
    tokens = action_tokens([(-1.0, -1.2, 1.0), (-0.1, -2.5, -0.5)])
    assert policy_loss(tokens, Ipo(), global_actions=2) == ipo(tokens, Ipo(), global_actions=2)
    assert policy_loss(tokens, IcePop(), global_actions=2) == icepop(tokens, IcePop(), global_actions=2)
    assert policy_loss(tokens, Dppo(), global_actions=2) == dppo(tokens, Dppo(), global_actions=2)
    assert policy_loss(tokens, Unmasked(), global_actions=2) == unmasked(tokens, global_actions=2)


def test_a_configuration_names_its_loss() -> None:
    adapter: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)
    assert adapter.validate_python({"kind": "icepop", "beta": 2.0}) == IcePop(beta=2.0)
    with pytest.raises(ValidationError, match="epsilon"):
        adapter.validate_python({"kind": "icepop", "epsilon": 0.3})
