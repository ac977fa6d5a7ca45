"""A model directory that was loaded and saved again is the same, whatever it was held as meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.model import ModelConfig, load_scorer, save_model
from trainer.tiny_model import Shape, make_tiny_model

BIAS = "e_score_correction_bias"


def saved(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("shape", get_args(Shape))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_dtypes_and_files_are_those_of_the_source(
    tmp_path: Path, shape: Shape, dtype: torch.dtype
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_tiny_model(source, shape=shape, dtype=dtype)
    out.mkdir()
    scorer = load_scorer(source, ModelConfig(compute_dtype="bfloat16"))
    assert {one.dtype for one in scorer.parameters()} == {torch.float32}
    save_model(scorer, source, out)
    before, after = saved(source), saved(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name].to(before[name].dtype), one) for name, one in before.items())
    assert all(one.dtype == dtype for name, one in after.items() if BIAS not in name)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            assert (out / file.name).read_bytes() == file.read_bytes()
    assert {one.name for one in out.iterdir()} == {one.name for one in source.iterdir()}


def test_a_routers_correction_is_never_rounded(tmp_path: Path) -> None:
    """It decides between experts; transformers holds it in float32 in a bfloat16 model too."""
    source, out = tmp_path / "source", tmp_path / "out"
    make_tiny_model(source, shape="glm", dtype=torch.bfloat16)
    out.mkdir()
    scorer = load_scorer(source, ModelConfig())
    fine = 1 + 2**-20
    for name, buffer in scorer.named_buffers():
        if BIAS in name:
            buffer.fill_(fine)
    save_model(scorer, source, out)
    found = [one for name, one in saved(out).items() if BIAS in name]
    assert len(found) == 2
    assert all((one == fine).all() for one in found)
