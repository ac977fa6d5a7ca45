"""Metrics to where people already look: trackio, Weights & Biases, TensorBoard; beside `metrics.jsonl`.

Each is an extra (`pip install 'swe-env[wandb]'`). What they are told is what `metrics.jsonl` holds, as flat
numbers; a row that was there when the training was asked again is not told twice.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import trio

from swe_env.rundir import RunError
from swe_env.runner import Watcher
from swe_env.sft import Progress
from swe_env.train_dir import EvaluationRow, StepRow, TrainDir
from swe_env.train_screen import Screen
from swe_env.training import Tracker, TrainConfig

PROJECT = "swe-env"

FINISH_SECONDS = 30.0
"""For a service to take what it was told last."""

Log = Callable[[int, Mapping[str, float]], None]
"""Is told a step and its numbers."""


@dataclass(frozen=True)
class Tracking:
    """A run in a tracker."""

    log: Log
    finish: Callable[[], None]


@asynccontextmanager
async def tracked(screen: Screen, config: TrainConfig, where: TrainDir) -> AsyncGenerator[Screen]:
    """`screen`, whose rows also go to `config.trackers`, as a run of the directory's name.

    Raises :class:`RunError` for a tracker that is not installed or cannot be begun.
    """
    told = {(row.kind, row.step) for row in where.rows()}
    begun: list[Tracking] = []
    try:
        for tracker in config.trackers:
            begun.append(await trio.to_thread.run_sync(_begin, tracker, config, where.path))
        yield _Tracked(screen, [tracking.log for tracking in begun], told)
    finally:
        with trio.CancelScope(shield=True):
            for tracking in begun:
                with trio.move_on_after(FINISH_SECONDS):
                    await trio.to_thread.run_sync(tracking.finish, abandon_on_cancel=True)


class _Tracked:
    """A :class:`Screen` that passes rows on."""

    def __init__(self, screen: Screen, logs: Sequence[Log], told: set[tuple[str, int]]) -> None:
        self._screen = screen
        self._logs = logs
        self._told = told

    def begins(self, stage: str, total: int) -> Watcher:
        return self._screen.begins(stage, total)

    def learns(self, progress: Progress) -> None:
        self._screen.learns(progress)

    def row(self, row: StepRow | EvaluationRow, total_steps: int) -> None:
        self._screen.row(row, total_steps)
        if (row.kind, row.step) not in self._told:
            self._told.add((row.kind, row.step))
            for log in self._logs:
                log(row.step, numbers(row))


def numbers(row: StepRow | EvaluationRow) -> dict[str, float]:
    """All numbers of a row by name: `step/reward`, `step/losses/drop_rates/ipo/all`, `evaluation/solved`."""
    return dict(_flat(row.kind, row.model_dump(exclude={"kind", "step"})))


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[str, Any]", value).items():
            yield from _flat(f"{name}/{key}", part)
    elif isinstance(value, int | float):
        yield name, float(value)


def _begin(tracker: Tracker, config: TrainConfig, out: Path) -> Tracking:
    asked = config.model_dump(mode="json")
    try:
        match tracker:
            case "tensorboard":
                return _tensorboard(out)
            case "wandb":
                return _wandb(out, asked)
            case "trackio":
                return _trackio(out, asked)
    except ImportError as error:
        raise RunError(f"{error.name} is not installed: pip install 'swe-env[{tracker}]'") from None
    except Exception as error:  # whatever a service has to say
        said = " ".join(str(error).split())
        raise RunError(f"{tracker} does not begin: {said}; leave it out of `trackers`") from None


def _tensorboard(out: Path) -> Tracking:
    events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
    summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    files: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    writer = files.EventFileWriter(str(out / "tensorboard"))

    def log(step: int, values: Mapping[str, float]) -> None:
        scalars = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = summaries.Summary(value=scalars)
        writer.add_event(events.Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()

    return Tracking(log, writer.close)


def _wandb(out: Path, config: dict[str, Any]) -> Tracking:
    wandb: Any = importlib.import_module("wandb")
    quiet = wandb.Settings(silent=True)
    run = wandb.init(project=PROJECT, name=out.name, config=config, dir=out, settings=quiet)
    return Tracking(lambda step, values: run.log(dict(values), step=step), run.finish)


def _trackio(out: Path, config: dict[str, Any]) -> Tracking:
    trackio: Any = importlib.import_module("trackio")
    with redirect_stdout(io.StringIO()):  # the terminal is the table's
        run = trackio.init(project=PROJECT, name=out.name, config=config, resume="allow")
    return Tracking(lambda step, values: run.log(dict(values), step=step), run.finish)
