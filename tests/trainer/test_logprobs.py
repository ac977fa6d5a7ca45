"""Log-probabilities in chunks: the naive values and gradients, whatever the chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.logprobs import token_logprobs


def naive(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax((hidden @ head.T).float() / temperature, dim=-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def case(tokens: int, size: int, vocabulary: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    hidden, head = torch.randn(tokens, size) * 2, torch.randn(vocabulary, size)
    return hidden.requires_grad_(), head.requires_grad_(), torch.randint(vocabulary, (tokens,))


def gradients(logprobs: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a sum in which every token has a weight of its own, as advantages and ratios give it."""
    return torch.autograd.grad((logprobs * torch.linspace(-1, 2, len(logprobs))).sum(), inputs)


@given(
    tokens=st.integers(1, 40),
    size=st.integers(1, 12),
    vocabulary=st.integers(1, 50),
    chunk=st.integers(1, 600),
    temperature=st.floats(0.2, 3.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_values_and_gradients_are_those_of_the_naive_way(
    tokens: int, size: int, vocabulary: int, chunk: int, temperature: float, seed: int
) -> None:
    hidden, head, targets = case(tokens, size, vocabulary, seed=seed)
    expected, expected_entropy = naive(hidden, head, targets, temperature)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=temperature, chunk_logits=chunk)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=2e-5)
    wanted, found = gradients(expected, hidden, head), gradients(logprobs, hidden, head)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_are_the_slopes_of_the_values() -> None:
    hidden, head, targets = case(5, 3, 7)
    wide = (hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_())

    def logprobs(hidden: Tensor, head: Tensor) -> Tensor:
        return token_logprobs(hidden, head, targets, temperature=0.7, chunk_logits=14)[0]

    assert torch.autograd.gradcheck(logprobs, wide)


def test_logits_never_exist_whole() -> None:
    """No tensor that is made along the way has more than the chunk's number of elements."""
    hidden, head, targets = case(64, 4, 1000)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            sizes.extend(
                one.numel()
                for one in (result if isinstance(result, tuple) else (result,))
                if isinstance(one, Tensor)
            )
            return result

    with Watch():
        gradients(token_logprobs(hidden, head, targets, chunk_logits=8000)[0], hidden, head)
    assert max(sizes) == 8000


def test_huge_logits_are_no_trouble() -> None:
    hidden, head = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [0.0], [-1.0]])
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([0, 0]))
    assert logprobs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]


def test_a_bfloat16_head_gives_float32_log_probabilities_of_its_own_logits() -> None:
    hidden, head, targets = case(20, 8, 30)
    narrow = hidden.detach().bfloat16().requires_grad_(), head.detach().bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(*narrow, targets, chunk_logits=90)
    assert logprobs.dtype == torch.float32
    expected, _ = naive(*narrow, targets, 1.0)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    found, wanted = gradients(logprobs, *narrow), gradients(expected, *narrow)
    assert {one.dtype for one in found} == {torch.bfloat16}
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


def test_no_tokens_are_no_trouble() -> None:
    hidden, head, targets = case(0, 4, 9)
    logprobs, _ = token_logprobs(hidden, head, targets)
    assert [one.abs().sum() for one in torch.autograd.grad(logprobs.sum(), (hidden, head))] == [0, 0]


def test_a_frozen_head_is_given_no_gradient() -> None:
    hidden, head, targets = case(6, 4, 9)
    token_logprobs(hidden, head.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_sampling_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="greedy sampling has no log-probabilities"):
        token_logprobs(*case(2, 2, 2), temperature=temperature)
