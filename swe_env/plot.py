"""`swe-env plot`: the curves of a training, or of several, as a picture and as one self-contained page.

What is drawn is what `metrics.jsonl` holds. matplotlib is an extra (`pip install 'swe-env[plots]'`).
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swe_env.rundir import RunError, write_atomic
from swe_env.train_dir import EvaluationRow, StepRow, TrainDir

PICTURE, PAGE = "curves.png", "curves.html"

Value = Callable[[StepRow], float]


def draw_runs(runs: Sequence[Path], out: Path) -> tuple[Path, Path]:
    """Draw these directories of trainings into `out`; returns the picture and the page.

    Raises :class:`RunError` for a directory without metrics, and without matplotlib.
    """
    found = {run.name: TrainDir(run).rows() for run in runs}
    for run in runs:
        if not found[run.name]:
            raise RunError(f"{run} has no metrics.jsonl with rows: give the --out of `swe-env train`")
    picture = _picture(found)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / PICTURE, picture)
    write_atomic(out / PAGE, _page(found, picture).encode())
    return out / PICTURE, out / PAGE


PANELS: list[tuple[str, list[tuple[str, Value]], bool]] = [
    ("mismatch KL, per token [nats]", [("", lambda row: row.losses.get("kl", 0.0))], True),
    (
        "share of tokens each mask drops",
        [
            (name, lambda row, name=name: row.losses.get("drop_rates", {}).get(name, {}).get("all", 0.0))
            for name in ("ipo", "icepop", "dppo")
        ],
        False,
    ),
    ("entropy, per token [nats]", [("", lambda row: row.losses.get("entropy", 0.0))], False),
    ("gradient norm", [("", lambda row: row.grad_norm)], True),
    (
        "seconds a step",
        [
            ("rollout", lambda row: row.rollout_seconds),
            ("training", lambda row: row.train_seconds),
            ("publishing", lambda row: row.publish_seconds),
        ],
        False,
    ),
]
"""Title, curves (name, value), logarithmic. The first panel, solve rates, is drawn apart."""

STYLES = ("-", "--", ":")


def _picture(runs: dict[str, list[StepRow | EvaluationRow]]) -> bytes:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("matplotlib is not installed: pip install 'swe-env[plots]'") from None
    figure: Any = Figure(figsize=(11, 9), layout="constrained")
    panels: list[Any] = figure.subplots(3, 2).flatten().tolist()
    for number, (name, rows) in enumerate(runs.items()):
        color = f"C{number}"
        steps = [row for row in rows if isinstance(row, StepRow)]
        held_out = [row for row in rows if isinstance(row, EvaluationRow)]
        at = [row.step for row in steps]
        panels[0].plot(at, [row.reward for row in steps], color=color, alpha=0.35, linewidth=1)
        panels[0].plot(
            [row.step for row in held_out], [row.solved for row in held_out], "o-", color=color, label=name
        )
        for panel, (title, curves, logarithmic) in zip(panels[1:], PANELS, strict=True):
            for (curve, value), style in zip(curves, STYLES, strict=False):
                label = f"{name} {curve}".strip() if curve and number == 0 else None
                panel.plot(at, [value(row) for row in steps], style, color=color, linewidth=1.2, label=label)
            panel.set_title(title, fontsize=10)
            if logarithmic and any(value(row) > 0 for row in steps for _, value in curves):
                panel.set_yscale("log")
    panels[0].set_title("held-out solve rate (dots), reward of rollouts (pale)", fontsize=10)
    panels[0].set_ylim(-0.02, 1.02)
    for panel in panels:
        panel.set_xlabel("step", fontsize=9)
        panel.grid(alpha=0.25)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=130)
    return written.getvalue()


def _page(runs: dict[str, list[StepRow | EvaluationRow]], picture: bytes) -> str:
    image = base64.b64encode(picture).decode()
    tables = "".join(_table(name, rows) for name, rows in runs.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>training</title><style>"
        "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1150px;padding:0 1rem}"
        "img{max-width:100%}table{border-collapse:collapse;margin:.5rem 0 2rem}"
        "td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}"
        "@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}td,th{border-color:#333}"
        "img{background:#fff}}</style>"
        f"<h1>Training</h1><img alt='curves' src='data:image/png;base64,{image}'>{tables}</html>"
    )


def _table(name: str, rows: Sequence[StepRow | EvaluationRow]) -> str:
    held_out = [row for row in rows if isinstance(row, EvaluationRow)]
    steps = [row for row in rows if isinstance(row, StepRow)]
    body = "".join(
        f"<tr><td>{row.step}<td>{row.solved:.3f}<td>{row.episodes}<td>{row.invalid}" for row in held_out
    )
    skipped, invalid = sum(row.skipped for row in steps), sum(row.invalid for row in steps)
    total = sum(row.rollout_seconds + row.train_seconds + row.publish_seconds for row in steps)
    return (
        f"<h2>{html.escape(name)}</h2><p>{len(steps)} steps, {skipped} of them skipped; "
        f"{sum(row.episodes for row in steps)} episodes, {invalid} lost to infrastructure; "
        f"{total:.0f} s of playing, training and publishing."
        f"<table><tr><th>version<th>held out<th>episodes<th>lost{body}</table>"
    )
