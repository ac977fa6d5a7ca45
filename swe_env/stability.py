"""`swe-env stability`: at which learning rates a loss still trains, the further off-policy its tokens are.

A map over losses, staleness and learning rates, with the same seeds for each, on a task that needs no
sandbox, server or model (:mod:`trainer.stability`). The losses are the ones that train real policies.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, ValidationError
from rich.console import Console
from rich.table import Table

from swe_env.child import child
from swe_env.display import console
from swe_env.rundir import RunError, write_atomic

Kind = Literal["ipo", "icepop", "dppo", "unmasked"]


class StabilityConfig(BaseModel):
    """What is mapped."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    losses: list[Kind] = Field(default=["ipo", "icepop", "dppo", "unmasked"], min_length=1)
    """Each at its default bounds."""
    kl_tau: float | None = Field(default=None, ge=0)
    """Weight of (log r)² in the losses that have it, in place of their own: with 0 only the masks differ."""
    staleness: list[NonNegativeInt] = Field(default=[0, 8, 32, 64], min_length=1)
    """Optimiser steps between the weights that sample and those that learn, always exactly that many."""
    lrs: list[PositiveFloat] = Field(default=[1e-3, 3e-3, 1e-2, 3e-2, 1e-1], min_length=1)
    seeds: int = Field(default=5, ge=1)
    """Policies and tasks drawn from a seed are the same for every loss, staleness and learning rate."""
    steps: int = Field(default=400, ge=10)


class Run(BaseModel):
    """One training in the map."""

    model_config = ConfigDict(frozen=True)

    loss: Kind
    staleness: int
    lr: float
    seed: int
    stable: bool
    """It ended about where it was best and well above where it began, and every gradient was finite."""
    reward: float
    """Mean over the last fifth of the steps."""
    best: float
    """Of the five fifths."""
    kl_early: float
    """Mismatch KL per token (k3) over the first tenth of the steps that are as stale as asked for [nats]."""
    kl_late: float
    """Over the last tenth."""
    masked: float
    """Share of tokens that the loss dropped, over the last fifth."""
    skipped: int
    """Steps whose gradient was not finite."""


class Step(BaseModel):
    """The trainings, all side by side, have taken a step."""

    model_config = ConfigDict(frozen=True)

    step: int
    steps: int


class Cell(BaseModel):
    """One loss at one staleness."""

    model_config = ConfigDict(frozen=True)

    loss: Kind
    staleness: int
    largest: float | None
    """Largest learning rate at which all seeds are stable; None if there is none."""
    reward: float | None
    """There, at the median of the seeds."""
    best_lr: float
    """With the highest median reward, stable or not."""
    best_reward: float
    masked: float
    kl_growth: float
    """Late over early KL; this and `masked` at `best_lr`, medians."""


def read_stability(options: dict[str, object]) -> StabilityConfig:
    """What the command line's options make. Raises :class:`RunError` that names the option."""
    try:
        return StabilityConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RunError(f"--{first['loc'][0]}: {first['msg'].lower()}") from None


async def measure(config: StabilityConfig, show: Callable[[Step], None]) -> list[Run]:
    """Train them all. Cancellation ends it. Raises :class:`RunError`."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as scratch:
        asked, errors = Path(scratch) / "stability.json", Path(scratch) / "training.log"
        asked.write_text(config.model_dump_json())
        async with child("trainer.stability", asked, errors=errors) as process:
            while (line := await process.line()) is not None:
                with suppress(ValidationError):
                    show(Step.model_validate_json(line))
                with suppress(ValidationError):
                    runs.append(Run.model_validate_json(line))
    return runs


def cells(runs: Sequence[Run]) -> list[Cell]:
    """What the map comes to, in the order of `runs`."""
    found: list[Cell] = []
    every: dict[tuple[Kind, int], None] = dict.fromkeys((run.loss, run.staleness) for run in runs)
    for loss, staleness in every:
        own = [run for run in runs if (run.loss, run.staleness) == (loss, staleness)]
        by_lr = {lr: [run for run in own if run.lr == lr] for lr in sorted({run.lr for run in own})}
        rewards = {lr: median(run.reward for run in of) for lr, of in by_lr.items()}
        largest = max((lr for lr, of in by_lr.items() if all(run.stable for run in of)), default=None)
        best = max(rewards, key=rewards.__getitem__)
        found.append(
            Cell(
                loss=loss,
                staleness=staleness,
                largest=largest,
                reward=None if largest is None else rewards[largest],
                best_lr=best,
                best_reward=rewards[best],
                masked=median(run.masked for run in by_lr[best]),
                kl_growth=median(run.kl_late / max(run.kl_early, 1e-12) for run in by_lr[best]),
            )
        )
    return found


def write(config: StabilityConfig, runs: Sequence[Run], out: Path) -> None:
    """`runs.csv`, `map.png`, and `asked.json` beside them. Raises :class:`RunError`."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(Run.model_fields), lineterminator="\n")
    table.writeheader()
    table.writerows(run.model_dump() for run in runs)
    picture = draw(runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "runs.csv", text.getvalue().encode())
        write_atomic(out / "asked.json", json.dumps(config.model_dump(), indent=1).encode())
        write_atomic(out / "map.png", picture)
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}; choose another --out") from None


def show_map(runs: Sequence[Run], out: Console = console) -> None:
    """One row a loss and staleness."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    names = ("loss", "staleness", "largest stable lr", "reward there", "best lr", "reward there")
    for name in (*names, "masked", "KL late / early"):
        table.add_column(name, justify="left" if name == "loss" else "right")
    for cell in cells(runs):
        table.add_row(
            cell.loss,
            str(cell.staleness),
            "none" if cell.largest is None else f"{cell.largest:g}",
            "" if cell.reward is None else f"{cell.reward:.3f}",
            f"{cell.best_lr:g}",
            f"{cell.best_reward:.3f}",
            f"{cell.masked:.2%}",
            f"{cell.kl_growth:.1f}",
        )
    out.print(table)


COLORS = {"ipo": "C0", "icepop": "C3", "dppo": "C2", "unmasked": "C7"}


def draw(runs: Sequence[Run]) -> bytes:
    """Reward against learning rate, a panel a staleness; then the largest stable learning rate. A PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("matplotlib is not installed: pip install 'swe-env[plots]'") from None
    stale = sorted({run.staleness for run in runs})
    figure: Any = Figure(figsize=(4 * (len(stale) + 1), 4), layout="constrained")
    panels: list[Any] = figure.subplots(1, len(stale) + 1).flatten().tolist()
    losses = list(dict.fromkeys(run.loss for run in runs))
    for panel, staleness in zip(panels, stale, strict=False):
        for loss in losses:
            own = [run for run in runs if (run.loss, run.staleness) == (loss, staleness)]
            lrs = sorted({run.lr for run in own})
            rewards = [[run.reward for run in own if run.lr == lr] for lr in lrs]
            panel.plot(lrs, [median(of) for of in rewards], color=COLORS[loss], label=loss)
            low, high = [min(of) for of in rewards], [max(of) for of in rewards]
            panel.fill_between(lrs, low, high, color=COLORS[loss], alpha=0.15, linewidth=0)
            unstable = [run for run in own if not run.stable]
            at, of = [run.lr for run in unstable], [run.reward for run in unstable]
            panel.plot(at, of, "x", color=COLORS[loss], markersize=4)
        panel.set_title(f"{staleness} steps stale", fontsize=10)
        panel.set_xscale("log")
        panel.set_ylim(0, 1.02)
        panel.set_xlabel("learning rate", fontsize=9)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("reward at the end: median, range; x: not stable", fontsize=9)
    for loss in losses:
        own = [cell for cell in cells(runs) if cell.loss == loss and cell.largest is not None]
        at, of = [cell.staleness for cell in own], [cell.largest for cell in own]
        panels[-1].plot(at, of, "o-", color=COLORS[loss], label=loss)
    panels[-1].set_yscale("log")
    panels[-1].set_title("largest learning rate stable for all seeds", fontsize=10)
    panels[-1].set_xlabel("steps stale", fontsize=9)
    panels[-1].grid(alpha=0.25)
    panels[-1].legend(fontsize=8)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=120)
    return written.getvalue()
