"""Everything that training needs to go on as if it had never stopped, whole on disk or not at all.

    checkpoints/step-12/.metadata, __0_0.distcp, ...   weights and optimiser, by torch.distributed.checkpoint
                       /rng-0.pt                       generators of each rank
                       /state.json                     place in the schedule and in the data

Each rank writes its own shards; any number of ranks reads them again. A killed process leaves at most
directories whose names begin with a dot, which the next save removes.

Not done: saving in the background. A step waits until its checkpoint is on disk.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from swe_env.rundir import appearing, draft_of, write_atomic
from trainer.model import barrier, rank, ranks
from trainer.step import Trainer


class CheckpointError(Exception):
    """A checkpoint cannot be gone on from. One line: cause, then cure."""


class State(BaseModel):
    """What is not a tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int
    """Optimiser steps done, skipped ones included."""
    skipped: int
    optimised: bool
    """The optimiser has moments; before the first step that was not skipped it has none."""
    ranks: int
    position: dict[str, JsonValue]
    """The caller's: what of the data comes next."""


def save_checkpoint(
    trainer: Trainer, directory: Path, position: Mapping[str, JsonValue], *, keep: int
) -> Path:
    """Write `directory`/step-N, N being the steps done, and remove all but the `keep` newest.

    A collective: every rank calls it, with the same `position`. If the checkpoint of that step is there
    already, it stays as it is. Raises OSError where the disk does not take it; older ones are then kept.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep} would remove the checkpoint just made: keep at least 1")
    final = directory / f"step-{trainer.steps}"
    there = final.exists()
    barrier()  # all have looked before one of them writes
    if there:
        return final
    if rank() == 0:
        _remove_leftovers(directory)
    with appearing(final) if rank() == 0 else nullcontext():
        barrier()  # the draft is there
        draft = draft_of(final)
        with _one_rank_is_fine():
            state_dict_saver.save(_tensors(trainer), checkpoint_id=draft)
        with (draft / f"rng-{rank()}.pt").open("wb") as file:  # given a path, torch hides why it cannot write
            torch.save(_generators(), file)
        if rank() == 0:
            state = State(
                steps=trainer.steps,
                skipped=trainer.skipped,
                optimised=bool(trainer.optimiser.state),
                ranks=ranks(),
                position=dict(position),
            )
            write_atomic(draft / "state.json", state.model_dump_json(indent=1).encode())
        barrier()  # all have written
    if rank() == 0:
        for old in checkpoints(directory)[:-keep]:
            # first no longer a checkpoint, then gone: a kill in between leaves no half of one
            shutil.rmtree(old.rename(old.with_name(f".old.{old.name}")), ignore_errors=True)
    barrier()
    return final


def load_checkpoint(trainer: Trainer, directory: Path) -> dict[str, JsonValue] | None:
    """Put `trainer` where the newest checkpoint of `directory` was; returns its position, None without one.

    A collective. The number of ranks may be another than when it was saved; generators are then left as
    they are, because there is no right state for them. Raises :class:`CheckpointError` if it is of another
    model, or cannot be read.
    """
    found = checkpoints(directory)
    if not found:
        return None
    path = found[-1]
    try:
        state = State.model_validate_json((path / "state.json").read_bytes())
        tensors = _tensors(trainer, optimised=state.optimised)
        with _one_rank_is_fine():
            state_dict_loader.load(tensors, checkpoint_id=path)
        set_model_state_dict(trainer.scorer, tensors["model"], options=_options(trainer))
        if state.optimised:
            set_optimizer_state_dict(trainer.scorer, trainer.optimiser, tensors["optimiser"])
        if state.ranks == ranks():
            _restore(torch.load(path / f"rng-{rank()}.pt", weights_only=True))
    except (OSError, ValidationError, RuntimeError, ValueError, CheckpointException) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise CheckpointError(
            f"cannot go on from {path}: {why}; remove it to go on from the one before, "
            "or give the model that it was made with"
        ) from None
    trainer.steps, trainer.skipped = state.steps, state.skipped
    return state.position


def checkpoints(directory: Path) -> list[Path]:
    """The whole ones, oldest first."""
    found = [path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _options(trainer: Trainer) -> StateDictOptions:
    """Leave out what is frozen: it is in the model that training began with. All else must be there."""
    frozen = any(not one.requires_grad for one in trainer.scorer.parameters())
    return StateDictOptions(ignore_frozen_params=True, strict=not frozen)


def _tensors(trainer: Trainer, *, optimised: bool | None = None) -> dict[str, Any]:
    """Weights, buffers and moments by name, sharded as they are.

    An optimiser without moments is left out: to be asked for them would make it begin to count steps.
    """
    found: dict[str, Any] = {"model": get_model_state_dict(trainer.scorer, options=_options(trainer))}
    if bool(trainer.optimiser.state) if optimised is None else optimised:
        found["optimiser"] = get_optimizer_state_dict(trainer.scorer, trainer.optimiser)
    return found


@contextmanager
def _one_rank_is_fine() -> Generator[None]:
    """Without a group of processes torch warns that it takes the work for that of one process. It is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _generators() -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
    }


def _restore(generators: dict[str, Any]) -> None:
    random.setstate(generators["python"])
    torch.set_rng_state(generators["torch"])
    if generators["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])


def _remove_leftovers(directory: Path) -> None:
    for pattern in (".step-*.draft", ".old.step-*"):
        for leftover in directory.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
