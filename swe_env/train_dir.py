"""The directory of a training: all that its processes share, and all that is left of it when they are killed.

    runs/x/train.json            what was asked for; a second call must ask for the same, and goes on
    runs/x/cold_start/           run directory of the demonstrations
    runs/x/weights/step-N/       model directory: the policy of version N, after N optimiser steps
    runs/x/rollouts/group-G/     run directory of the episodes of one task that are compared with each other
                           /group.json   appears when they have been played
    runs/x/batches/step-N.json   the groups that step N learns from: the trainer waits for it
    runs/x/probes/streams.json   token streams on which trainer and server are compared
                 /step-N.json    what the trainer's weights of version N say of them
    runs/x/evaluations/step-N/   run directory of the held-out episodes of version N
    runs/x/checkpoints/step-N/   what the trainer goes on from
    runs/x/metrics.jsonl         one row a step, one an evaluation

Everything appears by rename, whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from swe_env.pool import Batch, Group
from swe_env.rundir import RunDir, RunError, write_atomic
from swe_env.training import TrainConfig


class StepRow(BaseModel):
    """One optimiser step."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["step"] = "step"
    step: int
    """From 0: the version of the weights before it."""
    episodes: int
    invalid: int
    """Episodes that infrastructure ended: in no baseline, not trained on."""
    reward: float
    """Mean over groups played for the step, also those left out for want of a spread."""
    turns: float
    """Mean over episodes."""
    groups: int
    without_spread: int
    """Groups all of whose members did equally well: not trained on."""
    tokens: int
    """Trained on, prompts and observations included."""
    action_tokens: int
    loss: float
    action_nll: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    """No weight changed: nothing to learn from, or a loss or gradient that is not finite."""
    losses: dict[str, Any] = {}
    """:class:`trainer.loss_report.LossReport`; empty where nothing was trained on."""
    mismatch: float = 0.0
    """Mean over tokens of |log π of the trainer - log π of the server|, same weights, after the step."""
    mismatch_max: float = 0.0
    dropped: dict[str, int] = {}
    """Groups that no step learns from, since the step before: stale, lost to infrastructure, no spread."""
    shares: dict[str, float] = {}
    """Of its episodes' wall time: start, model, commands, environment (all else of a turn), grade."""
    overhead: float = 0.0
    """Of the environment, for each turn [s]."""
    at_once: int = 0
    """Episodes that might be in flight: see :mod:`swe_env.flow`."""
    rollout_seconds: float = 0.0
    """For which the step waited for its batch."""
    idle_seconds: float = 0.0
    """For which the trainer did nothing before the step, but wait for its batch."""
    train_seconds: float
    publish_seconds: float = 0.0


class EvaluationRow(BaseModel):
    """The held-out tasks, played by one version."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["evaluation"] = "evaluation"
    step: int
    """Version of the weights."""
    solved: float
    """Mean reward over valid episodes."""
    episodes: int
    invalid: int
    seconds: float


class Ready(BaseModel):
    """The trainer's first line: it has weights, and goes on from here."""

    model_config = ConfigDict(frozen=True)

    ready: int
    """Steps done."""
    last: StepRow | None = None
    """Of the step before: no step is taken again that a checkpoint has, so its row may not have been seen."""


@dataclass(frozen=True)
class Groups:
    """Of a training that goes on."""

    step: int
    """The first that has no batch."""
    next: int
    """Number of the group that is begun next."""
    begun: list[int]
    """Not in any batch, played or not, and not dropped."""
    finished: list[Group]
    """Those of them that have been played."""


Row = Annotated[StepRow | EvaluationRow, Field(discriminator="kind")]
_ROW: TypeAdapter[StepRow | EvaluationRow] = TypeAdapter(Row)


class TrainDir:
    """Reads and writes one training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.cold_start = path / "cold_start"
        self.checkpoints = path / "checkpoints"
        self.streams = path / "probes" / "streams.json"

    def begin(self, config: TrainConfig) -> None:
        """Make the directory, or check that it is this training's. Raises :class:`RunError`."""
        file, asked = self.path / "train.json", config.model_dump(mode="json")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                write_atomic(file, json.dumps(asked, indent=1).encode())
                return
            before = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"cannot use {self.path} as the directory of a training: {error}") from None
        for name in (asked.keys() | before.keys()) - {"trackers"}:
            if asked.get(name) != before.get(name):
                raise RunError(
                    f"{self.path} was begun with {name} = {json.dumps(before.get(name))}, "
                    f"not {json.dumps(asked.get(name))}: choose another --out"
                )

    def config(self) -> TrainConfig:
        """What the training was begun with. Raises :class:`RunError`: there is none."""
        file = self.path / "train.json"
        try:
            return TrainConfig.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            why = str(error).split("\n", 1)[0]
            raise RunError(f"{self.path} is no directory of a training ({why}): give an --out") from None

    def weights(self, version: int) -> Path:
        return self.path / "weights" / f"step-{version}"

    def versions(self) -> list[int]:
        """Whose weights are there."""
        numbers = [path.name.removeprefix("step-") for path in self.weights(0).parent.glob("step-*")]
        return sorted(int(number) for number in numbers if number.isdigit())

    def group(self, number: int) -> RunDir:
        return RunDir(self.path / "rollouts" / f"group-{number:06d}")

    def group_file(self, number: int) -> Path:
        """There when the group has been played."""
        return self.group(number).path / "group.json"

    def batch(self, step: int) -> Path:
        """There when it is known what `step` learns from."""
        return self.path / "batches" / f"step-{step}.json"

    def read_batch(self, step: int) -> Batch:
        return Batch.model_validate_json(self.batch(step).read_bytes())

    def groups(self) -> Groups:
        """What was played so far."""
        step, taken = 0, set[int]()
        while self.batch(step).exists():
            batch = self.read_batch(step)
            taken |= {*batch.groups, *batch.dropped}
            step += 1
        every = [int(path.name.split("-")[1]) for path in (self.path / "rollouts").glob("group-*")]
        waiting = sorted(set(every) - taken)
        files = [file for number in waiting if (file := self.group_file(number)).exists()]
        finished = [Group.model_validate_json(file.read_bytes()) for file in files]
        return Groups(step=step, next=max(every, default=-1) + 1, begun=waiting, finished=finished)

    def evaluation(self, version: int) -> RunDir:
        return RunDir(self.path / "evaluations" / f"step-{version}")

    def probe(self, version: int) -> Path:
        return self.path / "probes" / f"step-{version}.json"

    def rows(self) -> list[StepRow | EvaluationRow]:
        """What was measured so far, in the order in which it was. Raises :class:`RunError`."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # killed while it was written: it is measured again
            write_atomic(self.metrics, b"".join(lines[:-1]))
            lines.pop()
        try:
            return [_ROW.validate_json(line) for line in lines]
        except ValidationError as error:
            raise RunError(f"{self.metrics} is not of this program: {error.errors()[0]['msg']}") from None

    def add(self, row: StepRow | EvaluationRow) -> None:
        """Append a row. Raises :class:`RunError` where the disk does not take it."""
        try:
            with self.metrics.open("a") as file:
                file.write(row.model_dump_json() + "\n")
        except OSError as error:
            raise RunError(f"cannot write to {self.metrics}: {error.strerror}; free some space") from None

    def remove_weights(self, *, below: int, but: Collection[int]) -> None:
        """Remove the weights of all versions below `below` that are not in `but`.

        Those above may be of a process before this one: the trainer, which takes its steps again and finds
        them there, does not write them again.
        """
        for version in self.versions():
            if version < below and version not in but:
                # first no longer weights, then gone: a kill in between leaves no half of them
                path = self.weights(version)
                shutil.rmtree(path.rename(path.with_name(f".old.{path.name}")), ignore_errors=True)
        for left in self.weights(0).parent.glob(".old.step-*"):
            shutil.rmtree(left, ignore_errors=True)
