"""Training of adapters: little is trained, and what is saved is a whole model like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from swe_env.rundir import RunError
from swe_env.training import LoraConfig, ModelConfig, OptimiserConfig
from tests.trainer.processes import together
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.model import load_scorer, save_model
from trainer.packing import Stream, micro_batch
from trainer.scoring import Scorer
from trainer.step import Trainer, make_trainer, supervised_step
from trainer.tiny_model import make_tiny_model

LORA = ModelConfig(lora=LoraConfig(rank=4, alpha=8))
STREAM = Stream(list(range(10, 60)), [False] + [True] * 49, [0.0] * 50, [0] * 50, 1.0, "stream")
BATCH = micro_batch([STREAM])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "glm"
    make_tiny_model(out)
    return out


def logprobs(scorer: Scorer) -> torch.Tensor:
    with torch.no_grad():
        return scorer(BATCH).logprobs


def trained(model: Path, config: ModelConfig = LORA, steps: int = 3) -> Trainer:
    trainer = make_trainer(load_scorer(model, config), OptimiserConfig(learning_rate=1e-2), config)
    for _ in range(steps):
        supervised_step(trainer, [BATCH])
    return trainer


def test_adapters_begin_as_nothing_and_alone_are_trained(model: Path) -> None:
    whole = load_scorer(model, ModelConfig())
    adapted = load_scorer(model, LORA)
    assert torch.equal(logprobs(adapted), logprobs(whole))
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * 4 * 3  # two matrices, four layers, three times
    assert all("lora_" in name for name in names)


def test_what_is_saved_is_a_whole_model_with_the_adapters_in_it(model: Path, tmp_path: Path) -> None:
    trainer = trained(model)
    save_model(trainer.scorer, model, tmp_path)
    with (
        safe_open(tmp_path / "model.safetensors", "pt") as new,
        safe_open(model / "model.safetensors", "pt") as old,
    ):
        assert set(new.keys()) == set(old.keys())
    again = load_scorer(tmp_path, ModelConfig())
    assert not torch.allclose(logprobs(again), logprobs(load_scorer(model, ModelConfig())), atol=1e-2)
    assert torch.allclose(logprobs(again), logprobs(trainer.scorer), atol=1e-4)


def test_frozen_weights_are_kept_in_half_precision_and_adapters_whole(model: Path) -> None:
    config = LORA.model_copy(update={"compute_dtype": "bfloat16"})
    scorer = load_scorer(model, config)
    kinds = {parameter.requires_grad: parameter.dtype for parameter in scorer.parameters()}
    assert kinds == {False: torch.bfloat16, True: torch.float32}
    trainer = make_trainer(scorer, OptimiserConfig(learning_rate=1e-2), config)
    before = supervised_step(trainer, [BATCH]).action_nll
    for _ in range(5):
        after = supervised_step(trainer, [BATCH]).action_nll
    assert after < before


def test_a_checkpoint_holds_the_adapters_and_goes_on_from_them(model: Path, tmp_path: Path) -> None:
    trainer = trained(model)
    path = save_checkpoint(trainer, tmp_path, {}, keep=1)
    size = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert size < (model / "model.safetensors").stat().st_size / 4  # weights and two moments of few
    other = make_trainer(load_scorer(model, LORA), OptimiserConfig(learning_rate=1e-2), LORA)
    load_checkpoint(other, tmp_path)
    assert torch.equal(logprobs(other.scorer), logprobs(trainer.scorer))
    assert supervised_step(other, [BATCH]).loss == supervised_step(trainer, [BATCH]).loss


def _on_ranks(rank: int, model: Path, out: Path) -> None:
    trainer = trained(model)
    save_model(trainer.scorer, model, out)


def test_two_ranks_train_the_adapters_that_one_does(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "saved"
    out.mkdir()
    together(2, _on_ranks, tmp_path / "meet", model, out)
    alone = trained(model)
    assert torch.allclose(logprobs(load_scorer(out, ModelConfig())), logprobs(alone.scorer), atol=1e-3)


def test_targets_that_the_model_lacks_are_refused(model: Path) -> None:
    with pytest.raises(RunError, match="no layers in_proj"):
        load_scorer(model, ModelConfig(lora=LoraConfig(targets=["in_proj"])))
