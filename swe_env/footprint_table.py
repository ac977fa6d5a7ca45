"""The bill of `swe-env plan`, as a table."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import trio
from rich.table import Table

from swe_env.cold_start import make_tiny
from swe_env.display import console
from swe_env.footprint import (
    MFU,
    SERVED,
    USABLE,
    Footprint,
    fewest_ranks,
    fewest_servers,
    refusal,
    serving_bytes,
    tokens_per_second,
    total,
    training_bytes,
)
from swe_env.rundir import RunError
from swe_env.training import TrainConfig


async def measure(config: TrainConfig) -> Footprint:
    """The model of a training in numbers, by a process that has torch. Raises :class:`RunError`."""
    lora = config.trainer.lora
    with tempfile.TemporaryDirectory() as scratch:
        model = await make_tiny(config, Path(scratch) / "tiny") or Path(config.model)
        if not (model / "config.json").is_file():
            raise RunError(f"{model} has no config.json: give --model, a directory that has the model's")
        command = [sys.executable, "-m", "trainer.footprint", str(model), *(lora.targets if lora else [])]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode != 0:
        raise RunError(done.stderr.decode(errors="replace").strip().splitlines()[-1])
    return Footprint.model_validate_json(done.stdout)


def show_footprint(model: Footprint, config: TrainConfig, gpus: Sequence[int]) -> list[str]:
    """Print the bill for GPUs of these sizes [GB]; returns why it does not fit, a line for each size."""
    ranks = config.trainer.ranks
    console.print(
        f"{model.parameters / 1e9:.4g} billion parameters, {model.active / 1e9:.3g} active for a token"
    )
    servers = {size: fewest_servers(model, config, size * 10**9) for size in gpus}
    table = Table(title=f"on each GPU [GB]: training on {ranks}, serving one copy on as few as can")
    table.add_column("what")
    table.add_column("training", justify="right")
    for size in gpus:
        table.add_column(f"serving on {servers[size] or 16} x {size} GB", justify="right")
    for part in training_bytes(model, config, ranks):
        if part.bytes:
            what = part.what if part.exact else f"{part.what} (estimate)"
            table.add_row(what, _gb(part.bytes), *("" for _ in gpus))
    for number, part in enumerate(serving_bytes(model, config, 1)):
        each = [serving_bytes(model, config, servers[size] or 16)[number].bytes for size in gpus]
        table.add_row(part.what, "", *map(_gb, each))
    sums = [total(serving_bytes(model, config, servers[size] or 16)) for size in gpus]
    table.add_row("together", _gb(total(training_bytes(model, config, ranks))), *map(_gb, sums), style="bold")
    console.print(table)
    console.print(f"of a GPU's memory {USABLE:.0%} are for training, {SERVED:.0%} for serving", style="dim")
    for size in gpus:
        enough = fewest_ranks(model, config, size * 10**9)
        said = f"needs at least {enough}" if enough else "fits on no number"
        serving = servers[size] or "more than 16"
        console.print(f"GPUs of {size} GB: training {said}, serving at least {serving}")
    speed = tokens_per_second(model, config, ranks)
    console.print(
        f"about {speed:,.0f} tokens/s of training on {ranks} H100 or H200, if {MFU:.0%} of their "
        "arithmetic is used (an assumption, not a measurement)"
    )
    return [reason for size in gpus if (reason := refusal(model, config, size * 10**9))]


def _gb(count: int) -> str:
    return f"{count / 1e9:,.2f}" if count < 10e9 else f"{count / 1e9:,.0f}"
