"""Scoring: packed streams do not read each other, in any family; an empty micro-batch is one like others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from trainer import attention
from trainer.packing import MicroBatch, Stream, micro_batch
from trainer.scoring import Scorer

SMALL: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
SHAPES = ["glm", "qwen", "llama"]


def stream(length: int, *, seed: int, actions: float = 0.6) -> Stream:
    draw = torch.Generator().manual_seed(seed)
    is_action = (torch.rand(length, generator=draw) < actions).tolist()
    return Stream(
        token_ids=torch.randint(900, (length,), generator=draw).tolist(),
        is_action=[False, *is_action[1:]],
        logprobs=[0.0] * length,
        policy_versions=[-1] * length,
        advantage=1.0,
        name=f"e{seed}",
    )


STREAMS = [stream(length, seed=seed) for seed, length in enumerate([37, 1, 2, 90, 12])]


def load(tiny_models: Path, shape: str) -> Scorer:
    return Scorer(AutoModelForCausalLM.from_pretrained(tiny_models / shape))


def naive(scorer: Scorer, batch: MicroBatch, temperature: float) -> Tensor:
    """Of the action tokens of a single stream, from transformers' own attention and logits."""
    scorer.model.set_attn_implementation("sdpa")
    logits = scorer.model(input_ids=batch.token_ids[None]).logits[0]
    every = torch.log_softmax(logits.float() / temperature, -1)
    return every[:-1].gather(1, batch.token_ids[1:, None])[:, 0][batch.is_action[1:]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", [attention.NAME, "sdpa", "eager"])
def test_packed_streams_score_as_they_do_alone(tiny_models: Path, shape: str, implementation: str) -> None:
    scorer = load(tiny_models, shape)
    scorer.model.set_attn_implementation(implementation)
    with torch.no_grad():
        packed = scorer(micro_batch(STREAMS))
        alone = [scorer(micro_batch([one])) for one in STREAMS]
    torch.testing.assert_close(packed.logprobs, torch.cat([one.logprobs for one in alone]), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        packed.entropies, torch.cat([one.entropies for one in alone]), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_what_the_models_own_logits_say(tiny_models: Path, shape: str) -> None:
    scorer, batch = load(tiny_models, shape), micro_batch([STREAMS[3]])
    with torch.no_grad():
        torch.testing.assert_close(
            scorer(batch, temperature=0.7).logprobs, naive(scorer, batch, 0.7), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_packed_streams_are_the_sum_of_those_alone(tiny_models: Path, shape: str) -> None:
    scorer = load(tiny_models, shape)
    scorer(micro_batch(STREAMS)).logprobs.sum().backward()
    packed = gradients(scorer)
    scorer.zero_grad()
    for one in STREAMS:
        naive(scorer, micro_batch([one]), 1.0).sum().backward()
    for name, gradient in gradients(scorer).items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(packed[name], gradient, rtol=0, atol=1e-5 * max(1.0, scale), msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_empty_micro_batch_gives_every_parameter_a_gradient_of_zero(tiny_models: Path, shape: str) -> None:
    """None would leave a rank's part out of a reduction that the others wait for."""
    scorer = load(tiny_models, shape)
    scores = scorer(micro_batch([]))
    scores.logprobs.sum().backward()
    assert scores.logprobs.shape == (0,)
    assert all(parameter.grad is not None for parameter in scorer.parameters())
    assert all(not gradient.any() for gradient in gradients(scorer).values())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sharded_scorer_scores_as_a_whole_one(tiny_models: Path, shape: str) -> None:
    whole, sharded, batch = load(tiny_models, shape), load(tiny_models, shape), micro_batch(STREAMS)
    with one_rank() as mesh:
        for layer in sharded.model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh, reshard_after_forward=False)
        for scorer in (whole, sharded):
            scorer(batch).logprobs.sum().backward()
        gathered = {name: gradient.full_tensor() for name, gradient in gradients(sharded).items()}
    torch.testing.assert_close(gathered, gradients(whole))


def test_recomputed_activations_change_nothing(tiny_models: Path) -> None:
    plain, checkpointed, batch = load(tiny_models, "glm"), load(tiny_models, "glm"), micro_batch(STREAMS)
    checkpointed.train()
    checkpointed.model.gradient_checkpointing_enable()
    for scorer in (plain, checkpointed):
        scorer(batch).logprobs.sum().backward()
    torch.testing.assert_close(gradients(checkpointed), gradients(plain))


def test_a_window_of_attention_is_refused() -> None:
    config = MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=4)
    scorer = Scorer(MistralForCausalLM(config))
    with pytest.raises(ValueError, match="has neither masks nor windows"):
        scorer(micro_batch([Stream([1, 2], [False, True], [0.0, 0.0], [-1, 0], 1.0, "e")]))


def test_a_head_with_a_bias_is_refused() -> None:
    config = LlamaConfig(**SMALL)
    model = LlamaForCausalLM(config)
    model.lm_head = nn.Linear(8, 8, bias=True)
    with pytest.raises(ValueError, match="is more than a matrix"):
        Scorer(model)


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def gradients(scorer: Scorer) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in scorer.named_parameters()
        if parameter.grad is not None
    }
