"""Attention within streams that lie end to end in one row, in time and memory of the streams, not of the row.

What transformers makes of a packed row under `sdpa` is right, but it is a mask of [tokens, tokens]: attention
in a row of 40 streams costs 40 times that of its streams, and at 131,072 tokens the mask alone is 17 GB.
Here each stream goes through `sdpa` by itself, causally and without a mask, which is also what lets PyTorch
choose its fast kernels. FlashAttention, where it is installed, does the same in one kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention

NAME = "sdpa_by_stream"
"""As transformers' `attn_implementation`. Models that have it must be told `stream_lengths` in each call."""


def attend_by_stream(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stream_lengths: list[int],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention. `query` is [1, heads, tokens, size], `key` and `value` have their own heads.

    Returns [1, tokens, heads, size]. Raises ValueError for layers in which a token sees only a window.
    """
    if attention_mask is not None or kwargs.get("sliding_window") is not None:
        raise ValueError(
            f"{NAME} has neither masks nor windows: load the model with flash_attention_2 or eager"
        )
    sdpa = cast(Any, sdpa_attention).sdpa_attention_forward
    parts = zip(
        query.split_with_sizes(stream_lengths, dim=2),
        key.split_with_sizes(stream_lengths, dim=2),
        value.split_with_sizes(stream_lengths, dim=2),
        strict=True,
    )
    attended: list[Tensor] = [sdpa(module, *part, None, **kwargs)[0] for part in parts]
    return torch.cat(attended, dim=1), None


# without a mask function of that name transformers makes no mask
AttentionInterface.register(NAME, attend_by_stream)
