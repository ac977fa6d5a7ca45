"""`swe-env sft` as seen from outside: what it is asked for, and the process that does it.

Training needs torch, which stays in `trainer`: it runs as `python -m trainer.sft CONFIG.json`, and says
what it does in lines of JSON. This side shows them, and ends that process when it is interrupted.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

import trio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents.tokenizer import TextTokenizer, TokenizerError
from swe_env.rundir import RunError, draft_of
from swe_env.vllm_launcher import PARENT
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
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as errors:
        file = Path(scratch) / "sft.json"
        file.write_text(config.model_dump_json())
        # from this thread: the kernel tells a child when the thread that began it ends
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "trainer.sft", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, PARENT: str(os.getpid()), "HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # Ctrl-C reaches this process only, which ends that one
        )
        try:
            async for line in _lines(process):
                with suppress(ValidationError):  # what a library prints is not for us
                    show(Progress.model_validate_json(line))
            while process.poll() is None:  # noqa: ASYNC110 - nothing to await
                await trio.sleep(0.02)
        finally:
            await _end(process)
            shutil.rmtree(draft_of(config.out), ignore_errors=True)  # if it had to be killed
        if process.returncode != 0:
            raise RunError(_reason(errors, process.returncode))


async def _lines(process: subprocess.Popen[bytes]) -> AsyncGenerator[bytes]:
    assert process.stdout is not None
    async with trio.lowlevel.FdStream(os.dup(process.stdout.fileno())) as stream:
        rest = b""
        async for part in stream:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line


async def _end(process: subprocess.Popen[bytes]) -> None:
    """TERM, and KILL after 10 seconds; returns when it is gone."""
    with trio.CancelScope(shield=True):
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, sign)
            with trio.move_on_after(10):
                while process.poll() is None:  # noqa: ASYNC110 - nothing to await
                    await trio.sleep(0.02)
                break
    if process.stdout is not None:
        process.stdout.close()


def _reason(errors: IO[bytes], code: int) -> str:
    """Why training failed, in one line: the last of what it wrote to standard error."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    if code == -signal.SIGKILL:
        return "training was killed, most likely for want of memory: lower micro_batch_tokens"
    return lines[-1] if lines else f"training ended with exit code {code} and no word"


def tokenizer_sha256(model: Path) -> str:
    """Which tokenizer a model directory has, as episodes record it. Raises :class:`RunError`."""
    try:
        return TextTokenizer(model).sha256
    except TokenizerError as error:
        raise RunError(str(error)) from None
