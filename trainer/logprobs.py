"""Log-probabilities of given tokens, without ever holding the logits of all of them.

At 8,000 tokens and a vocabulary of 151,000 the logits alone are 5 GB in float32, and the naive way holds
three times that. Here a few hundred tokens' logits exist at a time; what the backward pass needs of them is
computed again. That costs a fourth product with the head beside the usual three, and saves traffic of
memory. `benchmarks/logprobs.py` measures both.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 2**26
"""Logits that exist at a time: 256 MiB in float32. Two buffers of that size are in use."""


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of the distribution it was drawn from [nats].

    Both come from softmax(`hidden` @ `head`.T / `temperature`). The product is taken in the dtype of
    `hidden` and `head`, everything after it in float32: an engine that has its head in bfloat16 is matched
    by tensors in bfloat16, one that has it in float32 by tensors in float32.

    Args:
        hidden: [tokens, hidden]; row i is what predicts target i.
        head: [vocabulary, hidden], of the same dtype.
        targets: [tokens], int64.
        temperature: the sampler's.
        chunk_logits: most logits to hold at a time; at least one token's are held.

    Returns:
        Log-probabilities [tokens], with gradients for `hidden` and `head`; entropies [tokens], without.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: greedy sampling has no log-probabilities to train on")
    rows = max(1, chunk_logits // head.shape[0])
    return cast(Any, _TokenLogprobs).apply(hidden, head, targets, temperature, rows)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        logits, every = _buffers(hidden, head, rows, count=2)
        logprobs = logits.new_empty(len(targets))
        entropies = torch.empty_like(logprobs)
        for part in _chunks(len(targets), rows):
            chunk = _logits(hidden[part], head, temperature, out=logits)
            log_p = torch.log_softmax(chunk, dim=1, out=every[: len(chunk)])
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropies[part] = -torch.exp(log_p, out=chunk).mul_(log_p).sum(dim=1)
        ctx.save_for_backward(hidden, head, targets)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator has no types)
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """d log p(y) / d logits = onehot(y) - softmax(logits), then through the product, chunk by chunk."""
        grad: Tensor = grad_outputs[0]
        hidden, head, targets = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        logits, slopes = _buffers(hidden, head, ctx.rows, count=2)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # in float32, because chunks are added up
        grad_head = torch.zeros_like(head, dtype=logits.dtype) if needs_head else None
        for part in _chunks(len(targets), ctx.rows):
            chunk = _logits(hidden[part], head, ctx.temperature, out=logits)
            slope = torch.softmax(chunk, dim=1, out=slopes[: len(chunk)])
            slope[torch.arange(len(chunk), device=slope.device), targets[part]] -= 1
            slope = slope.to(head.dtype)
            scale = -grad[part, None] / ctx.temperature
            if grad_hidden is not None:
                grad_hidden[part] = (slope @ head) * scale
            if grad_head is not None:
                scaled = (hidden[part] * scale).to(head.dtype)
                if grad_head.dtype == head.dtype:
                    grad_head.addmm_(slope.T, scaled)
                else:
                    grad_head += slope.T @ scaled
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None


def _buffers(hidden: Tensor, head: Tensor, rows: int, *, count: int) -> list[Tensor]:
    """Memory for `rows` rows of logits, made once: to the CPU's allocator each new piece is a page fault."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return [hidden.new_empty(min(rows, len(hidden)), len(head), dtype=dtype) for _ in range(count)]


def _logits(hidden: Tensor, head: Tensor, temperature: float, *, out: Tensor) -> Tensor:
    """[rows, vocabulary], in the first rows of `out`."""
    out = out[: len(hidden)]
    if out.dtype == hidden.dtype:
        torch.mm(hidden, head.T, out=out)
    else:
        out.copy_(hidden @ head.T)
    return out if temperature == 1.0 else out.div_(temperature)


def _chunks(count: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, count, rows)]
