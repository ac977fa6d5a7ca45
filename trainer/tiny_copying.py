"""A tiny GLM-shaped model that begins life able to copy: "... a b c ... a b" makes it expect c.

An agent copies names out of what it has read. Large models learned it long ago; a model of a million random
weights spends most of its training on finding out how. So two layers begin as an induction circuit (C. Olsson
and others, "In-context Learning and Induction Heads", arXiv 2209.11895), which training then bends to its
needs. The first layer's heads look at the token before and at the one before that, and write down what they
were; the second layer's look for a place that has written down what the present one is and has written down,
and say what stands there. Two tokens, because words are apart from the spaces between them here: what came
before a name is most often a space.

The model's width is divided for it: one half holds what a token is, the other what came before, later what
is to be said.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHARPNESS = 8.0
"""Of the first layer's look back: the length of each query and key, by frequency."""
MATCH = 3.0
"""Of the second layer's comparison of tokens."""
LOUDNESS = 2.0
"""Of what is copied, beside what is there."""
WIDTH = 0.3
"""Standard deviation of embeddings."""


@torch.no_grad()
def prepare_to_copy(model: Any) -> None:
    """Set embeddings, head and the attention of layers 0 and 1 of a `Glm4MoeForCausalLM`.

    It must have two groups of heads with biases, some of whose dimensions are not rotated, each head as wide
    as half of the model. Uses the global random generator.
    """
    config, layers = model.config, model.model.layers
    size, groups = config.head_dim, config.num_key_value_heads
    share = config.num_attention_heads // groups
    """Heads that read the same keys and values: each writes its share."""
    rotated = int(size * config.rope_parameters["partial_rotary_factor"])
    square: Any = torch.linalg
    basis: Tensor = square.qr(torch.randn(config.hidden_size, config.hidden_size)).Q
    what, before = basis[:size], basis[size:]
    """What the token is, and what came before it [size, hidden]: a half of that for each group."""
    half = size // 2
    digest: Tensor = square.qr(torch.randn(size, size)).Q[:half] @ what
    """What is remembered of a token [half, hidden]."""

    model.model.embed_tokens.weight.copy_(WIDTH * 2**0.5 * torch.randn(config.vocab_size, size) @ what)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight @ what.T @ before)
    for layer in layers:
        for name, parameter in layer.mlp.named_parameters():
            if "down_proj" in name:
                parameter.mul_(0.3)

    first, second = layers[0].self_attn, layers[1].self_attn
    for attention in (first, second):
        for linear in (attention.q_proj, attention.k_proj):
            linear.weight.mul_(0.1)
            linear.bias.zero_()
        for linear in (attention.v_proj, attention.o_proj):
            linear.weight.zero_()
        attention.v_proj.bias.zero_()
    steps = config.rope_parameters["rope_theta"] ** -(torch.arange(0, rotated, 2) / rotated)
    for group in range(groups):
        keys = slice(group * size, (group + 1) * size)
        back = (group + 1) * steps  # the first group looks one token back, the second two
        first.k_proj.bias[keys][:rotated] = SHARPNESS * torch.cat([back.cos(), back.sin()])
        first.v_proj.weight[keys][:half] = digest
        written = before[group * half : (group + 1) * half]
        # the first half of a comparison is of the present token with what came before the other, the
        # second of what came before the present one with what came before that
        part = half // 2
        remembered = slice(group * part, (group + 1) * part)
        now, once = before[:half][remembered], before[half:][remembered]
        second.k_proj.weight[keys][rotated:] = MATCH * torch.cat([now, once])
        second.v_proj.weight[keys] = what
        for head in range(group * share, (group + 1) * share):
            queries = slice(head * size, (head + 1) * size)
            first.q_proj.bias[queries][: rotated // 2] = SHARPNESS
            first.o_proj.weight[:, queries][:, :half] = WIDTH / share * written.T
            second.q_proj.weight[queries][rotated:] = MATCH * torch.cat([digest[remembered], now])
            second.o_proj.weight[:, queries] = LOUDNESS * WIDTH / (share * groups) * before.T
