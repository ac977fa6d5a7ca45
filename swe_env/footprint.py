"""`swe-env plan`: whether a training fits on the machines that it is to run on, and about how fast it is.

Bytes of weights, gradients and moments are exact. Activations and speed are estimates, made of what is said
here, to be wrong by a third and not by three.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from swe_env.training import TrainConfig

GIB = 1 << 30
USABLE = 0.92
"""Of a GPU's memory: the rest is CUDA's, NCCL's and fragmentation."""
SERVED = 0.9
"""Of a GPU's memory that vLLM takes (its --gpu-memory-utilization)."""
HEAD_ROWS = 1024
"""Action tokens whose logits are there at once (:mod:`trainer.logprobs`)."""
PEAK = 989e12
"""Of an H100 or H200 in bfloat16, dense [FLOP/s]."""
MFU = 0.3
"""Share of it that training of mixtures of experts reaches on one node or a few. An assumption."""


class Footprint(BaseModel):
    """A model in numbers (:mod:`trainer.footprint`)."""

    model_config = ConfigDict(frozen=True)

    parameters: int
    active: int
    """That one token meets."""
    largest_layer: int
    """Parameters of it."""
    outside_layers: int
    """Parameters of embedding, head and last norm."""
    layers: int
    hidden: int
    attention: int
    """Width of queries: heads times their size."""
    vocabulary: int
    adapter_width: int
    """Sum of inputs and outputs of the layers that adapters are put beside."""
    kv_bytes: int
    """Of one token in the server's cache, in bfloat16."""
    layer_bytes: int
    """That one layer keeps of a token for its backward pass, in bfloat16; an estimate."""


class Part(BaseModel):
    """One line of the bill."""

    model_config = ConfigDict(frozen=True)

    what: str
    bytes: int
    """On each GPU."""
    exact: bool = False


def training_bytes(model: Footprint, config: TrainConfig, ranks: int) -> list[Part]:
    """What each of `ranks` GPUs holds while it trains."""
    trainer = config.trainer
    sharded = trainer.shard or ranks > 1
    share = math.ceil(model.parameters / ranks)
    half = 2 if trainer.compute_dtype == "bfloat16" else 4
    tokens = trainer.micro_batch_tokens
    kept = (
        model.layers * tokens * (model.hidden * 2 if trainer.activation_checkpointing else model.layer_bytes)
    )
    working = tokens * model.layer_bytes * (2 if trainer.activation_checkpointing else 1)
    learnt = math.ceil(trained_parameters(model, config) / ranks)
    parts = [
        Part(what="frozen weights", bytes=half * share if trainer.lora else 0, exact=True),
        Part(what="trained weights (float32)", bytes=4 * learnt, exact=True),
        Part(what="gradients (float32)", bytes=4 * learnt, exact=True),
        Part(what="AdamW's moments (float32)", bytes=8 * learnt, exact=True),
        Part(what="activations", bytes=(kept + working) * half // 2),
        Part(what="logits of a chunk", bytes=2 * 4 * HEAD_ROWS * model.vocabulary),
    ]
    if sharded:  # a layer and the next, its gradient before it is scattered, embedding and head
        gathered = 3 * model.largest_layer + 2 * model.outside_layers
        parts.append(Part(what="gathered layers", bytes=gathered * half))
    return parts


def trained_parameters(model: Footprint, config: TrainConfig) -> int:
    """All of them, or those of the adapters."""
    lora = config.trainer.lora
    return model.parameters if lora is None else lora.rank * model.adapter_width


def serving_bytes(model: Footprint, config: TrainConfig, gpus: int) -> list[Part]:
    """What each of `gpus` GPUs holds that serve one copy of the model, one longest episode in its cache."""
    context = config.rollout.budget.context_tokens
    return [
        Part(what="weights (bfloat16)", bytes=math.ceil(2 * model.parameters / gpus), exact=True),
        Part(what="cache of one episode", bytes=math.ceil(context * model.kv_bytes / gpus)),
    ]


def total(parts: list[Part]) -> int:
    """Bytes on each GPU."""
    return sum(part.bytes for part in parts)


def fewest_ranks(model: Footprint, config: TrainConfig, gpu_bytes: int) -> int | None:
    """Fewest GPUs, a power of two, on which it can be trained; None if no number of them is enough."""
    for power in range(15):
        if total(training_bytes(model, config, 1 << power)) <= USABLE * gpu_bytes:
            return 1 << power
    return None


def fewest_servers(model: Footprint, config: TrainConfig, gpu_bytes: int) -> int | None:
    """Fewest GPUs, a power of two up to 16, that can serve one copy of it."""
    for power in range(5):
        if total(serving_bytes(model, config, 1 << power)) <= SERVED * gpu_bytes:
            return 1 << power
    return None


def training_flops(model: Footprint, config: TrainConfig) -> float:
    """FLOPs to train on one token: 2 a parameter forward and 4 backward, 2 more where activations are
    computed again, and attention to half of the context (PaLM, arXiv 2204.02311, appendix B)."""
    passes = 8 if config.trainer.activation_checkpointing else 6
    attention = passes * model.layers * model.attention * config.rollout.budget.context_tokens
    return passes * model.active + attention


def tokens_per_second(model: Footprint, config: TrainConfig, ranks: int) -> float:
    """Of training, on `ranks` GPUs."""
    return ranks * PEAK * MFU / training_flops(model, config)


def refusal(model: Footprint, config: TrainConfig, gpu_bytes: int) -> str:
    """Why the configuration does not fit on GPUs of that size, and the knob; "" if it does."""
    ranks, size = config.trainer.ranks, gpu_bytes / 1e9
    parts = training_bytes(model, config, ranks)
    if total(parts) > USABLE * gpu_bytes:
        largest = max(parts, key=lambda part: part.bytes)
        needs = f"training takes {total(parts) / 1e9:.0f} GB on each of {ranks} GPUs of {size:.0f} GB"
        enough = fewest_ranks(model, config, gpu_bytes)
        if not largest.exact and largest.what == "activations":
            knob = "lower trainer.micro_batch_tokens"
            if not config.trainer.activation_checkpointing:
                knob = "set trainer.activation_checkpointing = true"
        elif enough is not None:
            knob = f"set trainer.ranks = {enough}"
        else:
            knob = "lower trainer.micro_batch_tokens: no number of GPUs is enough"
        return f"{needs}, most of it {largest.what}: {knob}"
    if fewest_servers(model, config, gpu_bytes) is None:
        return (
            f"no 16 GPUs of {size:.0f} GB serve the model with an episode of "
            f"{config.rollout.budget.context_tokens} tokens: lower rollout.budget.context_tokens"
        )
    return ""
