"""What a person watching a training sees: a table that grows by a row a step, and what goes on now."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swe_env.display import Board, console
from swe_env.runner import Watcher
from swe_env.sft import Progress
from swe_env.train_dir import EvaluationRow, StepRow

ROWS = 12
"""Latest steps that are shown."""
WIDE = 118
"""Columns of a terminal that has room for all that there is of a step."""
DETAILS = {"gradient", "mismatch", "ms/turn"}
"""What is left out on a narrower one."""


class Screen(Protocol):
    """Is told what happens, for a person to see."""

    def begins(self, stage: str, total: int) -> Watcher:
        """A stage of `total` episodes begins."""
        ...

    def learns(self, progress: Progress) -> None:
        """A step of the cold start is done."""
        ...

    def row(self, row: StepRow | EvaluationRow, total_steps: int) -> None:
        """A step or an evaluation is done."""
        ...


class TrainScreen:
    """A :class:`Screen` on a terminal, or in a log."""

    def __init__(self, out: Console = console) -> None:
        self._out = out
        self._steps: list[StepRow] = []
        self._held_out: list[EvaluationRow] = []
        self._board: Board | None = None
        self._stage = ""
        self._total = 0

    @classmethod
    @contextmanager
    def live(cls, out: Console = console) -> Generator[TrainScreen]:
        """A screen that is shown while the block runs; a line a step where there is no terminal."""
        screen = cls(out)
        if not out.is_terminal:
            yield screen
            return
        with Live(get_renderable=screen._render, console=out, refresh_per_second=4) as live:
            yield screen
            live.update(screen._table())

    def begins(self, stage: str, total: int) -> Watcher:
        self._stage = f"{stage}: {total} episodes"
        self._board = Board(total, self._out)
        return self._board

    def learns(self, progress: Progress) -> None:
        self._board = None
        line = f"cold start: step {progress.step + 1} of {progress.steps}   actions {progress.action_nll:.4f}"
        self._stage = line
        if not self._out.is_terminal and progress.step % max(1, progress.steps // 10) == 0:
            self._out.print(line, markup=False)

    def row(self, row: StepRow | EvaluationRow, total_steps: int) -> None:
        self._total, self._board, self._stage = total_steps, None, ""
        if isinstance(row, EvaluationRow):
            self._held_out.append(row)
            line = f"version {row.step}   held out {row.solved:.3f} of {row.episodes} episodes"
            line += f"   {row.seconds:.0f} s"
        else:
            self._steps.append(row)
            self._stage = "learning and publishing"
            line = f"step {row.step + 1} of {total_steps}   " + "   ".join(
                f"{name} {value}" for name, value in _cells(row).items()
            )
        if not self._out.is_terminal:
            self._out.print(line, markup=False, soft_wrap=True)

    def _render(self) -> Group:
        now = [Text(self._stage, style="bold")]
        return Group(self._table(), *now, *([self._board.rendered()] if self._board is not None else []))

    def _table(self) -> Table:
        done = self._steps[-1].step + 1 if self._steps else 0
        title = f"{done} of {self._total} steps" if self._total else None
        table = Table(title=title, header_style="bold", box=None, pad_edge=False)
        solved = {row.step: f"{row.solved:.3f}" for row in self._held_out}
        shown = _cells(self._steps[-1]) if self._steps else {}
        names = [name for name in shown if self._out.width >= WIDE or name not in DETAILS]
        for name in ("step", "held out", *names):
            table.add_column(name, justify="right", vertical="bottom", no_wrap=True)
        for row in self._steps[-ROWS:]:
            cells = _cells(row)
            table.add_row(str(row.step), solved.get(row.step, ""), *(cells[name] for name in names))
        if self._held_out and (not self._steps or self._held_out[-1].step > self._steps[-1].step):
            last = self._held_out[-1]
            table.add_row(str(last.step), f"{last.solved:.3f}")
        return table


def _cells(row: StepRow) -> dict[str, str]:
    """What of a step is shown, under its name."""
    masked = row.losses.get("drop_rates", {}).get("ipo", {}).get("all", 0.0)
    seconds = max(1e-9, row.train_seconds)
    return {
        "reward": f"{row.reward:.3f}",
        "spread": f"{row.groups - row.without_spread}/{row.groups}",
        "turns": f"{row.turns:.1f}",
        "kl": f"{row.losses.get('kl', 0.0):.1e}",
        "masked": f"{masked:.2%}",
        "gradient": f"{row.grad_norm:.2f}" + (" skipped" if row.skipped else ""),
        "mismatch": f"{row.mismatch:.0e}",
        "tokens/s": f"{row.tokens / seconds:,.0f}",
        "ms/turn": f"{1000 * row.overhead:.0f}",
        "wait, train, publish s": ", ".join(
            f"{one:.1f}" for one in (row.rollout_seconds, row.train_seconds, row.publish_seconds)
        ),
    }


def show_shares(rows: Sequence[StepRow | EvaluationRow], out: Console = console) -> None:
    """Where the time of a training went: that of its episodes, and that of its trainer."""
    steps = [row for row in rows if isinstance(row, StepRow)]
    if not steps:
        return
    parts = [f"{name} {mean(row.shares.get(name, 0.0) for row in steps):.0%}" for name in steps[0].shares]
    overhead = 1000 * mean(row.overhead for row in steps)
    out.print(f"episodes  {', '.join(parts)} of their wall time; environment {overhead:.0f} ms a turn")
    idle = sum(row.idle_seconds for row in steps)
    whole = idle + sum(row.train_seconds + row.publish_seconds for row in steps)
    out.print(f"trainer   idle for {idle / max(1e-9, whole):.0%} of its time")
