"""What `swe-env plan` says of memory is what a training takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swe_env.footprint import fewest_ranks, refusal, total, training_bytes, training_flops
from swe_env.training import LoraConfig, OptimiserConfig, TrainConfig, TrainerConfig
from trainer.footprint import footprint
from trainer.model import load_scorer
from trainer.packing import Stream, micro_batch
from trainer.step import make_trainer, supervised_step
from trainer.tiny_model import Shape, make_tiny_model

AIR = Path(__file__).parents[2] / "configs" / "models" / "glm-4.5-air"
GB = 10**9
BATCH = micro_batch([Stream(list(range(10, 60)), [False] + [True] * 49, [0.0] * 50, [0] * 50, 1.0, "one")])


def config(context: int = 1024, **trainer: object) -> TrainConfig:
    rollout = {
        "tasks": "shipped",
        "tasks_per_step": 1,
        "group_size": 2,
        "budget": {"context_tokens": context},
    }
    asked = TrainerConfig.model_validate({"micro_batch_tokens": context, **trainer})
    return TrainConfig.model_validate({"model": "m", "steps": 1, "rollout": rollout, "trainer": asked})


@pytest.mark.parametrize("shape", ["glm", "qwen", "llama"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_bytes_of_weights_gradients_and_moments_are_those_of_a_real_step(
    tmp_path: Path, shape: Shape, lora: LoraConfig | None
) -> None:
    make_tiny_model(tmp_path, shape=shape)
    asked = config(lora=lora)
    trainer = make_trainer(load_scorer(tmp_path, asked.trainer), OptimiserConfig(), asked.trainer)
    gradients = dict[str, int]()
    for name, parameter in trainer.scorer.named_parameters():
        if parameter.requires_grad:  # the step clears them: note them as they come
            parameter.register_post_accumulate_grad_hook(
                lambda one, name=name: gradients.update({name: one.grad.nbytes})
            )
    supervised_step(trainer, [BATCH])
    parameters = list(trainer.scorer.parameters())
    trained = [one for one in parameters if one.requires_grad]
    moments = [
        value
        for state in trainer.optimiser.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg") and isinstance(value, torch.Tensor)
    ]
    size = footprint(tmp_path, lora.targets if lora else [])
    bill = {part.what: part.bytes for part in training_bytes(size, asked, ranks=1) if part.exact}
    # transformers gives no gradient to an expert that no token of this batch was sent to, and to no other
    assert bill["gradients (float32)"] >= sum(gradients.values())
    assert bill["trained weights (float32)"] == sum(one.nbytes for one in trained)
    assert bill["frozen weights"] + bill["trained weights (float32)"] * (lora is None) == (
        sum(one.nbytes for one in parameters if lora is None or not one.requires_grad)
    )
    assert bill["AdamW's moments (float32)"] == sum(one.nbytes for one in moments)


def test_the_target_model_has_the_parameters_that_it_is_named_for() -> None:
    size = footprint(AIR)
    assert 106e9 < size.parameters < 107e9
    assert 12e9 < size.active < 13e9
    assert size.kv_bytes == 2 * 46 * 8 * 128 * 2


def test_what_does_not_fit_is_refused_with_the_knob_that_helps() -> None:
    size = footprint(AIR, ["q_proj", "k_proj", "v_proj", "o_proj"])
    half = {"compute_dtype": "bfloat16", "activation_checkpointing": True}
    cases = {
        "set trainer.ranks = ": config(16384, ranks=8, **half),
        "set trainer.activation_checkpointing = true": config(16384, ranks=64, compute_dtype="bfloat16"),
        "lower trainer.micro_batch_tokens": config(131072, ranks=64, **half),
        "": config(16384, ranks=32, **half),
    }
    for knob, asked in cases.items():
        said = refusal(size, asked, 141 * GB)
        assert said.endswith(knob) if not knob else knob in said, (knob, said)


def test_the_knob_that_is_named_is_enough() -> None:
    size = footprint(AIR)
    asked = config(16384, compute_dtype="bfloat16", activation_checkpointing=True)
    enough = fewest_ranks(size, asked, 141 * GB)
    assert enough is not None
    assert not refusal(
        size,
        config(
            16384,
            ranks=enough,
            **asked.trainer.model_dump(include={"compute_dtype", "activation_checkpointing"}),
        ),
        141 * GB,
    )
    assert total(training_bytes(size, asked, enough // 2)) > total(training_bytes(size, asked, enough))


def test_a_token_costs_six_flops_a_parameter_and_eight_with_checkpointing() -> None:
    size = footprint(AIR)
    short = training_flops(size, config(64))
    assert 6 * size.active < short < 6.1 * size.active
    again = training_flops(size, config(64, activation_checkpointing=True))
    assert again == pytest.approx(short * 8 / 6)
