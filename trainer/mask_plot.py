"""Draws which (μ, π) pairs each mask drops, as `trainer/loss.py` decides it.

`python -m trainer.mask_plot docs/masks.png` makes the picture of `docs/losses.md` again. It needs matplotlib
(the extra `plots`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from swe_env.training import Dppo, IcePop, Ipo, LossConfig
from trainer.loss import LOG_RATIO_CAP, ActionTokens, dropped

MASKS: list[LossConfig] = [Ipo(), IcePop(), Dppo()]
EXAMPLES = [(0.9, 0.5), (0.9, 0.2), (0.005, 0.05), (0.01, 0.06)]
"""(μ, π) of the tokens in the text."""
SAMPLES = 400
SMALLEST = 1e-6
BLUE, RED, PURPLE, GREY = "#9ec5e8", "#f0a8a0", "#c9a8d8", "#555555"


def draw(out: Path) -> None:
    """Write the picture to `out`: one column a mask; probabilities above, their logarithms below."""
    figure: Any = Figure(figsize=(10.5, 7.4), layout="constrained")
    rows = figure.subplots(2, 3)
    for axes, logarithmic in zip(rows, (False, True), strict=True):
        line = torch.logspace(-6, 0, SAMPLES) if logarithmic else torch.linspace(SMALLEST, 1, SAMPLES)
        for panel, config in zip(axes, MASKS, strict=True):
            _panel(panel, line, config)
            panel.set_title(_title(config), fontsize=10)
            if logarithmic:
                panel.set(xscale="log", yscale="log")
    rows[0][0].set_ylabel("π, the trainer's probability")
    rows[1][0].set_ylabel("π, on logarithmic axes")
    for panel in rows[1]:
        panel.set_xlabel("μ, when it was sampled")
    names = {
        PURPLE: "dropped whatever Â",
        RED: "dropped if Â > 0",
        BLUE: "dropped if Â < 0",
        GREY: f"dropped by all: |log r| > {LOG_RATIO_CAP:g}",
    }
    handles = [Patch(color=color, label=name) for color, name in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(out, dpi=90)


def _panel(panel: Any, line: Tensor, config: LossConfig) -> None:
    # 0 kept, 1 dropped if Â < 0, 2 if Â > 0, 3 both, 4 capped
    pi, mu = (one.reshape(-1).log() for one in torch.meshgrid(line, line, indexing="ij"))
    ones = torch.ones_like(pi)
    up, down = ActionTokens(pi, mu, ones), ActionTokens(pi, mu, -ones)
    region = 2 * dropped(up, config).int() + dropped(down, config).int()
    region[up.capped] = 4
    colors = ListedColormap(["white", BLUE, RED, PURPLE, GREY])
    edges: Any = line.numpy()
    grid: Any = region.reshape(len(line), len(line)).numpy()
    panel.pcolormesh(edges, edges, grid, cmap=colors, vmin=-0.5, vmax=4.5, shading="nearest", rasterized=True)
    panel.plot(edges, edges, color="black", linewidth=0.7, linestyle=":")
    for mu_, pi_ in EXAMPLES:
        panel.plot(mu_, pi_, "o", color="black", markersize=4)
        panel.plot([mu_, mu_], [mu_, pi_], color="black", linewidth=0.7)
    panel.set(xlim=(float(line[0]), 1), ylim=(float(line[0]), 1), aspect="equal")


def _title(config: LossConfig) -> str:
    match config:
        case Ipo():
            return f"IPO: |π - μ| > {config.epsilon:g}"
        case IcePop():
            return f"IcePop: r < {config.alpha:g} or r > {config.beta:g}"
        case Dppo():
            return f"DPPO: moved by {config.delta_low:g} to where Â pushes"
        case _:
            return config.kind


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
