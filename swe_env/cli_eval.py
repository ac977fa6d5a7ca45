"""`swe-env eval`, `grade` and `tasks validate`: patches judged, and the judges judged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import trio
import typer

from sandboxes.backends import Backend
from swe_env.display import Board, console, show_evaluation
from swe_env.grading import Mode
from swe_env.request import RunRequest, names, read_request
from swe_env.sources import find_tasks
from swe_env.terminal import guard, run_async, say


def evaluate(
    dataset: Annotated[
        str, typer.Option(help="verified, lite, full, multilingual, a hub id, or a path.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Run directory; asked again, does what is missing.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory: its agent plays every instance.")
    ] = None,
    gold: Annotated[bool, typer.Option("--gold", help="Grade the reference patches.")] = False,
    predictions: Annotated[Path | None, typer.Option(help="Grade this file of predictions.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file, as for run.")] = None,
    split: Annotated[str | None, typer.Option(help="Of the dataset [test].")] = None,
    instances: Annotated[str | None, typer.Option(help="Only these, separated by commas.")] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="official [default]: as the harness does; strict: tampering forfeits.")
    ] = None,
    n: Annotated[int | None, typer.Option(help="Attempts an instance [1].")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Instances at once [8].")] = None,
    url: Annotated[str | None, typer.Option(help="vLLM server that has --model already.")] = None,
    sandbox: Annotated[Backend | None, typer.Option(help="auto [default], oci or docker.")] = None,
    repo_mirror: Annotated[Path | None, typer.Option(help="Clones from which images are built here.")] = None,
    mirror: Annotated[str | None, typer.Option(help="Registry that stands in for Docker Hub.")] = None,
    python: Annotated[Path | None, typer.Option(help="Interpreter to copy into those images.")] = None,
    quarantine: Annotated[Path | None, typer.Option(help="List of `tasks validate`, counted apart.")] = None,
    reproduce: Annotated[Path | None, typer.Option(help="Say what differs from this evaluation now.")] = None,
) -> None:
    """Evaluate a model, or patches that are there already, on SWE-bench."""
    if reproduce is not None:
        _reproduce(reproduce)
        return
    sources = [bool(model), gold, bool(predictions)]
    if sum(sources) > 1 or not (any(sources) or config) or not (dataset or config):
        typer.echo("swe-env: give --dataset and one of --model, --gold and --predictions", err=True)
        raise typer.Exit(2)
    policy = "predictions:gold" if gold else f"predictions:{predictions}" if predictions else "vllm"
    options = {
        "tasks": f"swebench:{dataset}" if dataset else None,
        "policy": policy,
        "out": out,
        "split": split,
        "instances": names(instances),
        "mode": mode,
        "n": n,
        "concurrency": concurrency,
        "url": url,
        "model": model,
        "sandbox": sandbox,
        "repo_mirror": repo_mirror,
        "mirror": mirror,
        "python": python,
    }
    _evaluate(guard(lambda: read_request(config, options, {"mode": "official"})), quarantine)


def grade(
    predictions: Annotated[Path, typer.Option(help="Official format, .jsonl or .json.")],
    dataset: Annotated[str, typer.Option(help="What they were made for.")],
    out: Annotated[Path, typer.Option(help="Run directory.")],
    mode: Annotated[Mode, typer.Option(help="official or strict.")] = "official",
    concurrency: Annotated[int | None, typer.Option(help="Instances at once [8].")] = None,
    sandbox: Annotated[Backend | None, typer.Option(help="auto [default], oci or docker.")] = None,
    repo_mirror: Annotated[Path | None, typer.Option(help="Clones from which images are built here.")] = None,
) -> None:
    """Grade predictions that somebody else made: `eval --predictions`, for short."""
    options = {
        "tasks": f"swebench:{dataset}",
        "policy": f"predictions:{predictions}",
        "out": out,
        "mode": mode,
        "concurrency": concurrency,
        "sandbox": sandbox,
        "repo_mirror": repo_mirror,
    }
    _evaluate(guard(lambda: read_request(None, options)))


def validate_tasks(
    source: Annotated[str, typer.Argument(help="As for run --tasks.")],
    out: Annotated[Path, typer.Option(help="Run directory; quarantine.json is written there.")],
    n: Annotated[int, typer.Option(help="Gradings of each kind a task.")] = 3,
    instances: Annotated[str | None, typer.Option(help="Only these, separated by commas.")] = None,
    mode: Annotated[Mode, typer.Option(help="strict or official.")] = "strict",
    concurrency: Annotated[int | None, typer.Option(help="Gradings at once [8].")] = None,
    sandbox: Annotated[Backend | None, typer.Option(help="auto [default], oci or docker.")] = None,
    repo_mirror: Annotated[Path | None, typer.Option(help="Clones from which images are built here.")] = None,
) -> None:
    """Grade each task with its gold patch and without a fix, several times; list those not to be trusted."""
    from swe_env.validate import validate

    options = {
        "tasks": source,
        "policy": "gold",
        "out": out,
        "n": n,
        "instances": names(instances),
        "mode": mode,
        "concurrency": concurrency,
        "sandbox": sandbox,
        "repo_mirror": repo_mirror,
    }
    request = guard(lambda: read_request(None, options))
    found = run_async(lambda: validate(request, Board.live, say))
    for name, reason in found.reasons.items():
        console.print(f"{name}: {reason}", markup=False, soft_wrap=True)
    console.print(f"{len(found.reasons)} tasks quarantined: {out / 'quarantine.json'}", soft_wrap=True)
    if found.no_verdict:
        lost = len(found.no_verdict)
        typer.echo(f"swe-env: {lost} tasks have no verdict: run the same command again", err=True)
        raise typer.Exit(1)


def _evaluate(request: RunRequest, quarantine: Path | None = None) -> None:
    """Run, write everything official, show. Exit code 1 if attempts have no verdict."""
    from swe_env.evaluation import write_results
    from swe_env.report import write_report
    from swe_env.run import run as play
    from swe_env.validate import load_quarantine

    listed = guard(lambda: load_quarantine(quarantine).reasons) if quarantine else None
    rundir = run_async(lambda: play(request, Board.live, say))
    tasks = guard(lambda: find_tasks(request.tasks, request.instances, request.split))
    summary = guard(lambda: write_results(rundir, tasks, listed))
    page = guard(lambda: write_report(rundir))
    show_evaluation(summary)
    console.print(f"\neverything  {rundir.path}\nreport      {page}", soft_wrap=True)
    if summary.no_verdict:
        lost = len(summary.no_verdict)
        typer.echo(f"swe-env: {lost} attempts have no verdict: run the same command again", err=True)
        raise typer.Exit(1)


def _reproduce(path: Path) -> None:
    """Say what differs between an evaluation and the same request now. Exit code 1 if anything does."""
    from swe_env.reproduce import compare

    found = guard(lambda: trio.run(compare, path))
    for name, (then, now) in found.differences.items():
        console.print(f"{name}: then {then}, now {now}", markup=False, soft_wrap=True)
    for name in found.absent:
        console.print(f"{name}: not here now, its digest cannot be compared", markup=False, soft_wrap=True)
    if found.differences:
        typer.echo(f"swe-env: {len(found.differences)} things differ from {path}", err=True)
        raise typer.Exit(1)
    console.print(f"nothing differs from {path}: the same command, with another --out, repeats it")
