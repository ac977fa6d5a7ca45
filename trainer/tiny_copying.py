"""A tiny GLM-shaped model that begins life able to copy: "... a b c ... a b" makes it expect c.

An agent copies out of what it has read. Large models learned it long ago; a model of a million random
weights spends most of its training on finding out how. So two layers begin as an induction circuit (C. Olsson
and others, "In-context Learning and Induction Heads", arXiv 2209.11895), which training then bends to its
needs. Each head of the first layer looks at one place before a token: one back, two back and so on. It writes
down what stands there; those of the second layer look for the place whose past is most like the present one,
and say what stands there. A file is copied whole, and copying goes on after a token that was changed.

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
LOUDNESS = 1.0
"""Of what is copied, beside what is there."""
WIDTH = 0.3
"""Standard deviation of embeddings."""


@torch.no_grad()
def prepare_to_copy(model: Any) -> None:
    """Set embeddings, head and the attention of layers 0 and 1 of a `Glm4MoeForCausalLM`.

    Some dimensions of its heads must not be rotated, and a head be as wide as half of the model. Uses the
    global random generator.
    """
    config, layers = model.config, model.model.layers
    size, heads, groups = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    share = heads // groups
    """Heads that read the same keys and values."""
    rotated = int(size * config.rope_parameters["partial_rotary_factor"])
    square: Any = torch.linalg
    basis: Tensor = square.qr(torch.randn(config.hidden_size, config.hidden_size)).Q
    what, before = basis[:size], basis[size:]
    """What the token is, and what came before it [size, hidden]."""
    part = (size - rotated) // heads
    """Dimensions in which a head compares two tokens."""
    digest = groups * part
    """Dimensions of `what` that are remembered of a token."""
    places = [before[at : at + size // heads] for at in range(0, size, size // heads)]
    """Where is remembered what stood one place back, two, three ... [size / heads, hidden]."""

    # of one length in all that is compared, so that every token matches itself equally well
    blocks = torch.randn(config.vocab_size, size // part, part)
    tokens: Tensor = square.norm(blocks, dim=-1, keepdim=True).reciprocal().mul(part**0.5).mul(blocks)
    tokens = tokens.flatten(1)
    model.model.embed_tokens.weight.copy_(WIDTH * 2**0.5 * tokens @ what)
    model.lm_head.weight.copy_(WIDTH * 2**0.5 * tokens @ before)
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
        first.k_proj.bias[keys][: rotated // 2] = SHARPNESS
        first.v_proj.weight[keys][:digest] = what[:digest]
        compared = slice(group * part, (group + 1) * part)
        remembered = [place[compared] for place in places]
        second.k_proj.weight[keys][rotated:] = MATCH * torch.cat(remembered)
        second.v_proj.weight[keys] = what
        for head in range(group * share, (group + 1) * share):
            queries = slice(head * size, (head + 1) * size)
            back = -(head + 1) * steps
            first.q_proj.bias[queries][:rotated] = SHARPNESS * torch.cat([back.cos(), back.sin()])
            first.o_proj.weight[:, queries][:, :digest] = WIDTH * places[head][:digest].T
            present = torch.cat([what[compared], *remembered[:-1]])
            second.q_proj.weight[queries][rotated:] = MATCH * present
            second.o_proj.weight[:, queries] = LOUDNESS * WIDTH / heads * before.T
