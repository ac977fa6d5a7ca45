"""What the trainer's weights say of a micro-batch: a log-probability for every action token.

Models are transformers' own classes. Streams lie end to end in one row and must not read each other. Under
`sdpa`, the default, each is attended to by itself (:mod:`trainer.attention`). Under `eager` and
FlashAttention transformers keeps them apart: given position ids that start again and neither attention mask
nor cache, it makes a block-diagonal mask, or finds the boundaries. With a cache it would not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainer import attention
from trainer.logprobs import token_logprobs
from trainer.packing import MicroBatch


@dataclass(frozen=True)
class Scores:
    """Of the action tokens of a micro-batch, in its order [actions]."""

    logprobs: Tensor
    """log π at the given temperature, float32, with a gradient (also of no tokens at all: zeros)."""
    entropies: Tensor
    """Of the distributions that they are from [nats], float32, without a gradient."""


class Scorer(nn.Module):
    """A causal language model that answers with :class:`Scores` instead of logits.

    It is a module so that FSDP can gather what its own `forward` touches, the head among it: shard layers
    first, then the scorer, as root and without resharding after forward (the head is needed again).
    """

    def __init__(self, model: nn.Module) -> None:
        """`model` is one of transformers' `...ForCausalLM`; its attention, if `sdpa`, is replaced.

        Raises ValueError if its head is more than a matrix: a bias, or an adapter on it, would be ignored.
        """
        super().__init__()
        self.model: Any = model
        if self.model.config._attn_implementation == "sdpa":
            self.model.set_attn_implementation(attention.NAME)
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters()):
            raise ValueError(
                f"the head of {type(model).__name__} is more than a matrix ({head}): "
                "log-probabilities would be wrong; leave adapters off it"
            )

    def forward(self, batch: MicroBatch, *, temperature: float = 1.0) -> Scores:
        """Score the action tokens of `batch` at the sampler's `temperature`.

        Only rows that predict an action token meet the head, which for agents is a small part of all.
        """
        by_stream = self.model.config._attn_implementation == attention.NAME
        hidden: Tensor = self.model.get_decoder()(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            **({"stream_lengths": batch.boundaries.diff().tolist()} if by_stream else {}),
        ).last_hidden_state[0]
        actions = batch.is_action.nonzero()[:, 0]
        logprobs, entropies = token_logprobs(
            hidden[actions - 1],
            self.model.get_output_embeddings().weight,
            batch.token_ids[actions],
            temperature=temperature,
        )
        return Scores(logprobs, entropies)
