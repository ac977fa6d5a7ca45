"""`swe-env train` and `swe-env sft`: a policy that gets better, and one that does as it was shown."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from sandboxes.backends import Backend
from swe_env.display import console
from swe_env.export import export_model
from swe_env.footprint_table import measure, show_footprint
from swe_env.plot import draw_runs
from swe_env.rundir import RunError
from swe_env.sft import Progress, read_config
from swe_env.sft import train as fine_tune
from swe_env.stability import measure as measure_stability
from swe_env.stability import read_stability, show_map, write
from swe_env.terminal import guard, run_async, say
from swe_env.train import describe
from swe_env.train import train as reinforce
from swe_env.train_dir import TrainDir
from swe_env.train_screen import TrainScreen, show_shares
from swe_env.training import TrainConfig, read_training


def sft(
    episodes: Annotated[Path, typer.Option(help="Run directory, of any policy.")],
    model: Annotated[Path, typer.Option(help="Model directory to begin with.")],
    out: Annotated[Path, typer.Option(help="Model directory to make; it must not exist.")],
    where: Annotated[
        str, typer.Option(help="Which episodes, such as 'reward == 1 and turns < 20'; empty for all.")
    ] = "",
    epochs: Annotated[int | None, typer.Option(help="Times that each episode is seen [1].")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The largest [1e-5].")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of an optimiser step [16384].")] = None,
    micro_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a forward pass, for less memory [all of a step's].")
    ] = None,
    other_weight: Annotated[
        float | None, typer.Option(help="Weight of tokens that the policy did not sample [0].")
    ] = None,
    compute_dtype: Annotated[str | None, typer.Option(help="float32 [default] or bfloat16.")] = None,
    activation_checkpointing: Annotated[
        bool | None, typer.Option("--activation-checkpointing", help="Less memory, a third more time.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of episodes [0].")] = None,
) -> None:
    """Train a model on the episodes of a run (rejection-sampling fine-tuning)."""
    config = guard(
        lambda: read_config(
            {
                "episodes": episodes,
                "where": where,
                "model": model,
                "out": out,
                "epochs": epochs,
                "learning_rate": learning_rate,
                "batch_tokens": batch_tokens,
                "micro_batch_tokens": micro_batch_tokens,
                "other_weight": other_weight,
                "compute_dtype": compute_dtype,
                "activation_checkpointing": activation_checkpointing,
                "seed": seed,
            }
        )
    )
    say(f"training {config.model} on {config.episodes}")
    with _live() as show:
        run_async(lambda: fine_tune(config, show), interrupted="stopping: nothing is written")
    console.print(f"model     {config.out}", soft_wrap=True)
    console.print(f"metrics   {config.out / 'metrics.jsonl'}", soft_wrap=True)


def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file: see configs/.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the training; asked again, it goes on.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on in this directory, with what it was begun with.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="In place of the file's.")] = None,
    steps: Annotated[int | None, typer.Option(help="In place of the file's.")] = None,
    sandbox: Annotated[Backend | None, typer.Option(help="auto, oci or docker.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Such as loss.kind=icepop, in place of the file's.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be started, and stop.")] = False,
) -> None:
    """Train a policy by reinforcement learning on the tasks it plays."""
    options = {"seed": seed, "steps": steps, "sandbox": sandbox}
    asked, directory = guard(lambda: _asked(config, out, resume, options, settings or []))
    if dry_run:
        for line in guard(lambda: describe(asked, directory)):
            console.print(line, markup=False, soft_wrap=True)
        return
    with TrainScreen.live() as screen:
        where = run_async(
            lambda: reinforce(asked, directory, screen, say),
            interrupted="stopping: the same command goes on from here",
        )
    show_shares(where.rows())
    console.print(f"model     {where.weights(asked.steps)}", soft_wrap=True)
    console.print(f"metrics   {where.metrics}", soft_wrap=True)


def _asked(
    config: Path | None, out: Path | None, resume: Path | None, options: dict[str, Any], settings: list[str]
) -> tuple[TrainConfig, Path]:
    """What is to be trained, and in which directory (absolute). Raises `RunError`."""
    if resume is not None:
        if config or out or settings or any(value is not None for value in options.values()):
            raise RunError("--resume goes on with what the training was begun with: give nothing else")
        return TrainDir(resume).config(), resume.absolute()
    if config is None or out is None:
        raise RunError("give a TOML file and --out, or --resume")
    return read_training(config, options, settings), out.absolute()


def _bar(out: Console) -> Bar:
    """Steps done, the time left, what is said of the last step; nothing where there is no terminal."""
    return Bar(
        TextColumn("[bold]steps"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )


@contextmanager
def _live(out: Console = console) -> Generator[Callable[[Progress], None]]:
    """A bar with loss and speed, or about ten lines where there is no terminal; the last step's is kept."""
    last: Progress | None = None

    def line(step: Progress) -> str:
        speed = step.tokens / max(step.seconds, 1e-9)
        return f"loss {step.loss:.4f}   actions {step.action_nll:.4f}   {speed:,.0f} tokens/s"

    with _bar(out) as bar:
        task = bar.add_task("loading the model", total=None)

        def show(step: Progress) -> None:
            nonlocal last
            bar.update(task, total=step.steps, completed=step.step + 1, description=line(step))
            if step.skipped:
                out.print(
                    f"step {step.step} is skipped: its loss is {step.loss} and its gradient {step.grad_norm}",
                    style="bold red",
                )
            elif not out.is_terminal and step.step % max(1, step.steps // 10) == 0:
                out.print(f"step {step.step + 1} of {step.steps}   {line(step)}", markup=False)
            last = step

        yield show
    if last is not None:
        out.print(f"{last.steps} steps, {last.epoch + 1} epochs   {line(last)}", markup=False)


def plan(
    config: Annotated[Path, typer.Argument(help="TOML file of a training: see configs/.")],
    model: Annotated[
        Path | None, typer.Option(help="Directory with the model's config.json, if it is not the file's.")
    ] = None,
    gpu: Annotated[
        list[int] | None, typer.Option(help="Memory of a GPU [GB]; 80 and 141 without it.")
    ] = None,
) -> None:
    """Whether a training fits: memory on each GPU, how many of them, about how fast."""
    asked = guard(lambda: read_training(config, {"model": None if model is None else str(model)}))
    size = run_async(lambda: measure(asked), interrupted="stopping")
    sizes = gpu or [80, 141]
    refusals = show_footprint(size, asked, sizes)
    for refusal in refusals:
        typer.echo(f"swe-env: {refusal}", err=True)
    if len(refusals) == len(sizes):  # nothing of what was asked about is enough
        raise typer.Exit(1)


def stability(
    out: Annotated[Path, typer.Option(help="Directory for the table and the picture.")],
    losses: Annotated[str | None, typer.Option(help="Such as ipo,icepop [all four].")] = None,
    staleness: Annotated[str | None, typer.Option(help="Optimiser steps, such as 0,64 [0,8,32,64].")] = None,
    lrs: Annotated[str | None, typer.Option(help="Learning rates, such as 1e-3,1e-2.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each, paired [5].")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps of each [400].")] = None,
    kl_tau: Annotated[
        float | None, typer.Option(help="Weight of (log r)²; with 0 only the masks differ [each loss's own].")
    ] = None,
) -> None:
    """Map at which learning rates a loss trains, the staler its tokens are: a small task, some minutes."""
    lists = {"losses": losses, "staleness": staleness, "lrs": lrs}
    asked: dict[str, object] = {name: text.split(",") for name, text in lists.items() if text}
    numbers = {"seeds": seeds, "steps": steps, "kl_tau": kl_tau}
    asked |= {name: number for name, number in numbers.items() if number is not None}
    config = guard(lambda: read_stability(asked))
    with _bar(console) as bar:
        task = bar.add_task("", total=config.steps)
        runs = run_async(
            lambda: measure_stability(config, lambda step: bar.update(task, completed=step.step + 1)),
            interrupted="stopping: nothing is written",
        )
    guard(lambda: write(config, runs, out))
    show_map(runs)
    console.print(f"\nruns      {out / 'runs.csv'}", soft_wrap=True)
    console.print(f"picture   {out / 'map.png'}", soft_wrap=True)


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Directories of trainings.")],
    out: Annotated[Path | None, typer.Option(help="Where to draw; the first of them if not given.")] = None,
) -> None:
    """Draw the curves of trainings: a picture, and a page with it."""
    for file in guard(lambda: draw_runs(runs, out or runs[0])):
        console.print(f"wrote {file}", soft_wrap=True)


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a training.")],
    out: Annotated[Path, typer.Option(help="Model directory to make; it must not exist.")],
    version: Annotated[int | None, typer.Option(help="Steps done [the best on held-out tasks].")] = None,
) -> None:
    """Copy a trained policy out of its training, as a directory that vLLM and transformers load."""
    chosen = guard(lambda: export_model(TrainDir(run), out, version))
    console.print(f"version {chosen}: {out}", soft_wrap=True)
