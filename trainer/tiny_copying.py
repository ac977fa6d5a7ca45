"""A tiny GLM-shaped model that begins life able to copy: "... a b ... a" makes it expect b.

An agent copies names out of what it has read. Large models learned it long ago; a model of a million random
weights spends most of its training on finding out how. So two layers begin as an induction circuit (C. Olsson
and others, "In-context Learning and Induction Heads", arXiv 2209.11895), which training then bends to its
needs: the first layer's heads look at the token before, and write down what it was; the second layer's look
for a place that has the present token written down, and say what stands there.
"""

from __future__ import annotations

from typing import Any

import torch

SHARPNESS = 8.0
"""Of the first layer's look at the token before: the length of each query and key, by frequency."""
MATCH = 3.5
"""Of the second layer's comparison of tokens."""
WIDTH = 0.3
"""Standard deviation of embeddings, and of the copies made of them."""


@torch.no_grad()
def prepare_to_copy(model: Any) -> None:
    """Set embeddings, head and the attention of layers 0 and 1 of a `Glm4MoeForCausalLM`.

    Its heads must leave some of their dimensions unrotated, its linear maps have biases. Uses the global
    random generator.
    """
    config, layers = model.config, model.model.layers
    hidden, size = config.hidden_size, config.head_dim
    rotated = int(size * config.rope_parameters["partial_rotary_factor"])
    free = size - rotated
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    model.model.embed_tokens.weight.normal_(std=WIDTH)
    read = _orthonormal(size * groups, hidden)
    """What of a token is read, by group of heads [groups x size, hidden]."""
    write = _orthonormal(size * groups, hidden)
    """Where the first layer writes it down, in the same order."""
    say = _orthonormal(size * groups, hidden)
    """Where the second layer says it, and the head listens."""
    model.lm_head.weight.copy_(model.model.embed_tokens.weight @ read.T @ say)

    first = layers[0].self_attn
    steps = config.rope_parameters["rope_theta"] ** -(torch.arange(0, rotated, 2) / rotated)
    here = torch.cat([torch.ones_like(steps), torch.zeros_like(steps), torch.zeros(free)])
    before = torch.cat([steps.cos(), steps.sin(), torch.zeros(free)])
    for linear in (first.q_proj, first.k_proj):
        linear.weight.mul_(0.1)
    first.q_proj.bias.copy_(SHARPNESS * here.repeat(heads))
    first.k_proj.bias.copy_(SHARPNESS * before.repeat(groups))
    first.v_proj.weight.copy_(read)
    first.v_proj.bias.zero_()
    share = heads // groups
    """Heads that read the same keys and values: each writes its share."""
    outward = write.T.reshape(hidden, groups, 1, size).expand(-1, -1, share, -1) / share
    first.o_proj.weight.copy_(WIDTH * outward.reshape(hidden, heads * size))

    second = layers[1].self_attn
    for linear in (second.q_proj, second.k_proj):
        linear.weight.mul_(0.1)
        linear.bias.zero_()
    for group in range(groups):
        chosen = slice(group * size, group * size + free)
        second.k_proj.weight[group * size + rotated : (group + 1) * size] = MATCH * write[chosen]
        for head in range(group * share, (group + 1) * share):
            second.q_proj.weight[head * size + rotated : (head + 1) * size] = MATCH * read[chosen]
    second.v_proj.weight.copy_(read)
    second.v_proj.bias.zero_()
    back = say.T.reshape(hidden, groups, 1, size).expand(-1, -1, share, -1) / share
    second.o_proj.weight.copy_(2 * WIDTH * back.reshape(hidden, heads * size))


def _orthonormal(rows: int, columns: int) -> torch.Tensor:
    linear: Any = torch.linalg
    return linear.qr(torch.randn(2 * [max(rows, columns)])).Q[:rows, :columns]
