"""`swe-env sft` as seen from outside: what it is asked for, and the process that does it.

Training needs torch, which stays in `trainer`: it runs as `python -m trainer.sft CONFIG.json`, and says
what it does in lines of JSON. This side shows them, and ends that process when it is interrupted.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents.tokenizer import TextTokenizer, TokenizerError
from swe_env.child import child
from swe_env.rundir import RunError, draft_of
from swe_env.where import parse_where


class SftConfig(BaseModel):
    """Everything that supervised training can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    episodes: Path
    """Run directory."""
    where: str = ""
    """Which of its episodes (:mod:`swe_env.where`); empty for all."""
    model: Path
    """Model directory to begin with."""
    out: Path
    """Model directory to make, with `metrics.jsonl` in it. It must not exist."""
    epochs: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=1e-5, gt=0)
    """The largest; it rises over the first twentieth of the steps and falls linearly to a tenth."""
    batch_tokens: int = Field(default=16_384, ge=2)
    """Tokens of an optimiser step, of all ranks: at least those of the longest stream."""
    micro_batch_tokens: int | None = Field(default=None, ge=2)
    """Tokens in a forward pass; None for all of a step's. Less takes less memory."""
    other_weight: float = Field(default=0.0, ge=0, le=1)
    """Weight of the loss on tokens that the policy did not sample; a small one helps a small model."""
    seed: int = 0
    """Of the order of episodes."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    shard: bool = False


class Progress(BaseModel):
    """One optimiser step, as `trainer.sft` tells of it: a line of `metrics.jsonl`."""

    model_config = ConfigDict(frozen=True)

    step: int
    """From 0."""
    steps: int
    """In all."""
    epoch: int
    loss: float
    action_nll: float
    """Mean of -log π over action tokens [nats]."""
    grad_norm: float
    learning_rate: float
    tokens: int
    action_tokens: int
    seconds: float
    skipped: bool
    """The loss or the gradient was not finite, and no weight was changed."""


def read_config(options: dict[str, object]) -> SftConfig:
    """What the command line's options make, those that are None left out. Raises :class:`RunError`.

    Everything that can be refused without reading episodes is refused here, before torch is loaded.
    """
    try:
        config = SftConfig.model_validate(
            {name: value for name, value in options.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"])).replace("_", "-")
        raise RunError(f"--{name}: {first['msg'].lower()}") from None
    parse_where(config.where)
    if not (config.model / "config.json").is_file():
        raise RunError(f"{config.model} has no config.json: give the directory of a model")
    if not (config.episodes / "episodes").is_dir():
        raise RunError(f"{config.episodes} is not a run directory: give the --out of `swe-env run`")
    if config.out.exists():
        raise RunError(f"{config.out} exists: choose another --out, or remove it")
    return config


async def train(config: SftConfig, show: Callable[[Progress], None]) -> None:
    """Train in a process of its own, and call `show` for every step. Returns when `config.out` is there.

    Cancellation ends that process, which removes what it had begun to write; at most 10 seconds.
    Raises :class:`RunError` with the reason if it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, errors = Path(scratch) / "sft.json", Path(scratch) / "training.log"
        asked.write_text(config.model_dump_json())
        try:
            async with child("trainer.sft", asked, errors=errors) as process:
                while (line := await process.line()) is not None:
                    with suppress(ValidationError):  # what a library prints is not for us
                        show(Progress.model_validate_json(line))
        finally:
            shutil.rmtree(draft_of(config.out), ignore_errors=True)  # if it had to be killed


def tokenizer_sha256(model: Path) -> str:
    """Which tokenizer a model directory has, as episodes record it. Raises :class:`RunError`."""
    try:
        return TextTokenizer(model).sha256
    except TokenizerError as error:
        raise RunError(str(error)) from None
