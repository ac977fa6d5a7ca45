"""The picture in docs/losses.md, and what the text beside it says of four tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from trainer.loss import ActionTokens, Dppo, IcePop, Ipo, LossConfig, dropped
from trainer.mask_plot import EXAMPLES, draw

DOCS = Path(__file__).parent.parent.parent / "docs"
DROPPED_BY: dict[tuple[float, float], list[str]] = {
    (0.9, 0.5): ["ipo", "dppo"],
    (0.9, 0.2): ["ipo", "dppo"],
    (0.005, 0.05): ["icepop"],
    (0.01, 0.06): ["icepop"],
}
"""(μ, π) -> masks that drop such a token if Â pushes it on."""


@pytest.mark.parametrize(("mu", "pi"), EXAMPLES)
def test_masks_drop_the_examples_that_the_text_says_they_drop(mu: float, pi: float) -> None:
    token = ActionTokens(*torch.tensor([[math.log(pi)], [math.log(mu)], [math.copysign(1, pi - mu)]]))
    masks: list[LossConfig] = [Ipo(), IcePop(), Dppo()]
    assert [mask.kind for mask in masks if dropped(token, mask).item()] == DROPPED_BY[mu, pi]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "masks.png")
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_picture_is_small() -> None:
    assert (DOCS / "masks.png").stat().st_size < 150_000
