"""Episodes an hour: playing while the trainer learns, against taking turns?

    python benchmarks/async.py --model runs/tiny/weights/step-0 [--steps N] [--repeats R] [--stale K]

Both train the same policy (of `configs/tiny.toml`) on the same tasks with the same settings, in turns, each
in a directory of its own: `async.max_off_policy_steps` 0, and K. Counted from the end of the first step to
the end of the last: starting vLLM and filling the first batch are left out. Printed are medians over the
repeats: episodes that a step learnt from, an hour; what the environment took of each turn; the share of the
machine's cores that stood idle, which bounds what can be gained where the same cores do both; the trainer's
idle share; where the episodes' wall time went. Run it alone. Exit code 1 if asynchronous is not 1.6 times as
fast.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import trio
import typer
from rich.console import Console
from rich.table import Table

from swe_env.runner import Watcher
from swe_env.sft import Progress
from swe_env.terminal import say
from swe_env.train import train
from swe_env.train_dir import EvaluationRow, StepRow
from swe_env.train_screen import TrainScreen
from swe_env.training import TrainConfig, read_training

GOAL = 1.6
CONFIG = Path(__file__).parent.parent / "configs" / "tiny.toml"


class Clock:
    """A screen that remembers when each step was done, and how long the cores had been idle by then."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, StepRow]] = []
        self._shown = TrainScreen(Console(stderr=True))

    def begins(self, stage: str, total: int) -> Watcher:
        return self._shown.begins(stage, total)

    def learns(self, progress: Progress) -> None:
        pass

    def row(self, row: StepRow | EvaluationRow, total_steps: int) -> None:
        self._shown.row(row, total_steps)
        if isinstance(row, StepRow):
            self.steps.append((trio.current_time(), idle(), row))


def idle() -> float:
    """Seconds that this machine's cores have been idle, all together."""
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(ticks[4]) + int(ticks[5])) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for a disk


def measured(config: TrainConfig, out: Path) -> dict[str, float]:
    """Train, and say how fast it was."""
    clock = Clock()
    trio.run(train, config, out, clock, say)
    (began, unused, _), *rest = clock.steps
    seconds = rest[-1][0] - began
    rows = [row for _, _, row in rest]
    return {
        "episodes/hour": 3600 * sum(row.episodes for row in rows) / seconds,
        "seconds a step": seconds / len(rows),
        "ms a turn": 1000 * median(row.overhead for row in rows),
        "cores idle": (rest[-1][1] - unused) / seconds / (os.cpu_count() or 1),
        "trainer idle": sum(row.idle_seconds for row in rows) / seconds,
        **{name: median(row.shares[name] for row in rows) for name in rows[0].shares},
        "stale": sum(row.dropped.get("stale", 0) for row in rows) / max(1, sum(r.groups for r in rows)),
    }


def main(
    model: Annotated[Path, typer.Option(help="Model directory of a policy that solves some tasks.")],
    steps: int = 8,
    repeats: int = 3,
    stale: Annotated[int, typer.Option(help="async.max_off_policy_steps.")] = 8,
) -> None:
    without: dict[str, Any] = {"cold_start": None, "evaluation": None, "steps": steps, "model": str(model)}
    asked = read_training(CONFIG).model_copy(update=without)
    kinds = {"synchronous": 0, "asynchronous": stale}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(repeats):
            for kind, most in kinds.items():
                config = TrainConfig.model_validate(
                    {
                        **asked.model_dump(by_alias=True),
                        "async": {"max_off_policy_steps": most},
                        "seed": repeat,
                    }
                )
                found[kind].append(measured(config, Path(scratch) / f"{kind}-{repeat}"))
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("", *found["synchronous"][0]):
        table.add_column(name, justify="right" if name else "left")
    for kind, of in found.items():
        middle = {name: median(one[name] for one in of) for name in of[0]}
        shares = [f"{value:.1%}" for value in list(middle.values())[3:]]
        numbers = [f"{middle['episodes/hour']:,.0f}", f"{middle['seconds a step']:.1f}"]
        table.add_row(kind, *numbers, f"{middle['ms a turn']:.1f}", *shares)
    Console(width=140).print(table)
    ratios = [
        later["episodes/hour"] / first["episodes/hour"]
        for first, later in zip(found["synchronous"], found["asynchronous"], strict=True)
    ]
    bound = 1 / (1 - median(one["cores idle"] for one in found["synchronous"]))
    print(f"asynchronous is {median(ratios):.2f} times as fast (of {repeats}; goal {GOAL})")
    print(f"with the cores that taking turns leaves idle it could be {bound:.2f} times as fast")
    if median(ratios) < GOAL:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
