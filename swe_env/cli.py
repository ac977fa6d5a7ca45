"""The command line. Each command is a few lines: the work is in the module that it names."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import trio
import typer
from rich.markup import escape

from agents.chat import Family
from agents.policy import PolicyError
from agents.prompts import PromptError
from agents.tokenizer import TokenizerError
from sandboxes.engine import ensure_base_image, ensure_engine
from sandboxes.protocol import SandboxError
from swe_env.display import Board, console, program, show_episode, show_evaluation, show_table
from swe_env.grading import Mode
from swe_env.policies import doubtful
from swe_env.request import RunRequest, read_request
from swe_env.rundir import RunDir, RunError
from swe_env.serve import ServerFailed
from swe_env.sources import FORMS, find_tasks
from tasks.jsonl import TaskFileError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="An environment in which a language model learns software engineering by doing it.",
)
tasks_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List tasks, or find out which to trust."
)
app.add_typer(tasks_app, name="tasks")
T = TypeVar("T")

EXPECTED = (
    RunError, TaskFileError, PromptError, TokenizerError, PolicyError, SandboxError, ServerFailed,
)  # fmt: skip
"""Errors that are the world's or the user's: one line, no stack trace."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of runs.")] = Path("runs/demo"),
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 8,
) -> None:
    """From nothing to a table: gold, no-op and a served model on every shipped task."""
    from swe_env.demo import run_demo

    _run(lambda: run_demo(out, concurrency))


@app.command()
def run(
    tasks: Annotated[str | None, typer.Option(help=f"Which tasks: {FORMS}.")] = None,
    policy: Annotated[str | None, typer.Option(help="Who plays: vllm, gold, noop or replay:EPISODE.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; asked again, does what is missing.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of these options (see configs/).")] = None,
    instances: Annotated[str | None, typer.Option(help="Only these task ids, separated by commas.")] = None,
    n: Annotated[int | None, typer.Option(help="Episodes a task [1].")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Episodes at once [8].")] = None,
    url: Annotated[str | None, typer.Option(help="vLLM server that has --model already.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory; served here unless --url is given.")
    ] = None,
    family: Annotated[Family | None, typer.Option(help="Chat format, if config.json does not tell.")] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompts: default, tiny, or a directory.")] = None,
    turns: Annotated[int | None, typer.Option(help="Most turns an episode [50].")] = None,
    context_tokens: Annotated[int | None, typer.Option(help="Longest token stream [32768].")] = None,
    turn_tokens: Annotated[int | None, typer.Option(help="Most tokens sampled in a turn [4096].")] = None,
    seconds: Annotated[float | None, typer.Option(help="Wall clock an episode [1800].")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling [1.0].")] = None,
    repo_mirror: Annotated[
        Path | None, typer.Option(help="Clones from which SWE-bench images are built here.")
    ] = None,
    python: Annotated[Path | None, typer.Option(help="Interpreter to copy into those images.")] = None,
) -> None:
    """Play episodes: many at once, resumable, graded."""
    from swe_env.run import run as play

    def ask() -> RunRequest:
        return read_request(
            config,
            {
                "tasks": tasks,
                "policy": policy,
                "out": out,
                "instances": _names(instances),
                "n": n,
                "concurrency": concurrency,
                "url": url,
                "model": model,
                "family": family,
                "prompts": prompts,
                "budget": {
                    "turns": turns,
                    "context_tokens": context_tokens,
                    "turn_tokens": turn_tokens,
                    "seconds": seconds,
                },
                "sampling": {"temperature": temperature},
                "repo_mirror": repo_mirror,
                "python": python,
            },
        )

    request = _guard(ask)
    _finish(_run(lambda: play(request, Board.live, _say)))


@app.command("eval")
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
        Mode, typer.Option(help="official: as the harness does; strict: tampering forfeits.")
    ] = "official",
    n: Annotated[int | None, typer.Option(help="Attempts an instance [1].")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Instances at once [8].")] = None,
    url: Annotated[str | None, typer.Option(help="vLLM server that has --model already.")] = None,
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
    if sum(sources) != 1 or not dataset:
        typer.echo("swe-env: give --dataset and one of --model, --gold and --predictions", err=True)
        raise typer.Exit(2)
    policy = "vllm" if model else "predictions:gold" if gold else f"predictions:{predictions}"
    options = {
        "tasks": f"swebench:{dataset}",
        "policy": policy,
        "out": out,
        "split": split,
        "instances": _names(instances),
        "mode": mode,
        "n": n,
        "concurrency": concurrency,
        "url": url,
        "model": model,
        "repo_mirror": repo_mirror,
        "mirror": mirror,
        "python": python,
    }
    _evaluate(_guard(lambda: read_request(config, options)), quarantine)


@app.command()
def grade(
    predictions: Annotated[Path, typer.Option(help="Official format, .jsonl or .json.")],
    dataset: Annotated[str, typer.Option(help="What they were made for.")],
    out: Annotated[Path, typer.Option(help="Run directory.")],
    mode: Annotated[Mode, typer.Option(help="official or strict.")] = "official",
    concurrency: Annotated[int | None, typer.Option(help="Instances at once [8].")] = None,
    repo_mirror: Annotated[Path | None, typer.Option(help="Clones from which images are built here.")] = None,
) -> None:
    """Grade predictions that somebody else made: `eval --predictions`, for short."""
    options = {
        "tasks": f"swebench:{dataset}",
        "policy": f"predictions:{predictions}",
        "out": out,
        "mode": mode,
        "concurrency": concurrency,
        "repo_mirror": repo_mirror,
    }
    _evaluate(_guard(lambda: read_request(None, options)))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    episode: Annotated[str | None, typer.Argument(help="Episode id (a unique beginning is enough).")] = None,
) -> None:
    """The results of a run, or one episode turn by turn."""

    def read() -> None:
        episodes = RunDir(run).episodes()
        if not episodes:
            raise RunError(f"{run} has no episodes: is it a run directory?")
        if episode is None:
            show_table(episodes)
            return
        matching = [one for one in episodes if one.id.startswith(episode)]
        exact = [one for one in matching if one.id == episode] or matching
        if len(exact) != 1:
            names = ", ".join(one.id for one in (matching or episodes)[:4])
            raise RunError(f"{episode!r} matches {len(matching)} episodes of {run}: give one of {names}, ...")
        show_episode(exact[0])

    _guard(read)


@app.command()
def doctor() -> None:
    """What is missing on this machine, and how to get it."""
    from swe_env.doctor import examine_machine

    findings = examine_machine()
    for finding in findings:
        mark = "[green]ok     [/]" if finding.ok else "[red]missing[/]"
        console.print(f"{mark} [bold]{finding.what}[/]: {escape(finding.detail)}", soft_wrap=True)
        if not finding.ok:
            console.print(
                f"        to get it: {escape(finding.cure)}  (for {finding.needed_for})", soft_wrap=True
            )
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


@app.command()
def engine() -> None:
    """Bring up a Docker engine and the base image, installing Debian's package if root and missing."""

    def bring_up() -> None:
        ensure_engine(_say)
        _say(f"base image {ensure_base_image(_say)} is here")

    _guard(bring_up)


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="Model directory.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    dtype: Annotated[str | None, typer.Option()] = None,
    max_model_len: Annotated[int | None, typer.Option(min=64)] = None,
    log: Annotated[Path, typer.Option(help="vLLM's output.")] = Path("runs/vllm.log"),
) -> None:
    """Serve a model with vLLM, set up as this package needs it, until Ctrl-C."""
    from swe_env.serve import serve as serving

    async def forever() -> None:
        async with serving(
            model, log_path=log, port=port, dtype=dtype, max_model_len=max_model_len, say=_say
        ) as server:
            console.print(f"serving {model} at {server.url}; Ctrl-C ends it")
            while True:
                server.check_alive()
                await trio.sleep(1)

    _run(forever)


@tasks_app.command("list")
def list_tasks(
    source: Annotated[str, typer.Argument(help="As for run --tasks.")] = "shipped",
    out: Annotated[Path | None, typer.Option(help="Write them to this .jsonl file.")] = None,
) -> None:
    """List tasks, or write generated ones to a file."""
    from tasks.jsonl import save_tasks

    def list_them() -> None:
        found = find_tasks(source)
        if out is not None:
            save_tasks(out, found)
            console.print(f"wrote {len(found)} tasks to {out}", markup=False)
            return
        for task in found:
            level, problem = task.metadata.get("difficulty", ""), task.problem_statement.splitlines()[0]
            console.print(f"[bold]{task.id}[/] {level} {escape(problem)}", soft_wrap=True)

    _guard(list_them)


@tasks_app.command("validate")
def validate_tasks(
    source: Annotated[str, typer.Argument(help="As for run --tasks.")],
    out: Annotated[Path, typer.Option(help="Run directory; quarantine.json is written there.")],
    n: Annotated[int, typer.Option(help="Gradings of each kind a task.")] = 3,
    instances: Annotated[str | None, typer.Option(help="Only these, separated by commas.")] = None,
    mode: Annotated[Mode, typer.Option(help="strict or official.")] = "strict",
    concurrency: Annotated[int | None, typer.Option(help="Gradings at once [8].")] = None,
    repo_mirror: Annotated[Path | None, typer.Option(help="Clones from which images are built here.")] = None,
) -> None:
    """Grade each task with its gold patch and without a fix, several times; list those not to be trusted."""
    from swe_env.validate import validate

    options = {
        "tasks": source,
        "policy": "gold",
        "out": out,
        "n": n,
        "instances": _names(instances),
        "mode": mode,
        "concurrency": concurrency,
        "repo_mirror": repo_mirror,
    }
    request = _guard(lambda: read_request(None, options))
    found = _run(lambda: validate(request, Board.live, _say))
    for name, reason in found.reasons.items():
        console.print(f"{name}: {reason}", markup=False, soft_wrap=True)
    console.print(f"{len(found.reasons)} tasks quarantined: {out / 'quarantine.json'}", soft_wrap=True)


def main() -> None:
    """Entry point of `swe-env`."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except USAGE_ERROR as error:
        context: Any = getattr(error, "ctx", None)
        command = context.command_path if context else "swe-env"
        said = cast("Any", error).format_message().rstrip(".")
        typer.echo(f"swe-env: {said}: see `{command} --help`", err=True)
        code = 2
    sys.exit(code)


USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""What the command line library raises for bad arguments."""


def _evaluate(request: RunRequest, quarantine: Path | None = None) -> None:
    """Run, write everything official, show. Exit code 1 if attempts have no verdict."""
    from swe_env.evaluation import write_results
    from swe_env.report import write_report
    from swe_env.run import run as play
    from swe_env.validate import load_quarantine

    listed = _guard(lambda: load_quarantine(quarantine).reasons) if quarantine else None
    rundir = _run(lambda: play(request, Board.live, _say))
    tasks = _guard(lambda: find_tasks(request.tasks, request.instances, request.split))
    summary = write_results(rundir, tasks, listed)
    page = write_report(rundir)
    show_evaluation(summary)
    console.print(f"\neverything  {rundir.path}\nreport      {page}", soft_wrap=True)
    if summary.no_verdict:
        lost = len(summary.no_verdict)
        typer.echo(f"swe-env: {lost} attempts have no verdict: run the same command again", err=True)
        raise typer.Exit(1)


def _reproduce(path: Path) -> None:
    """Say what differs between an evaluation and the same request now. Exit code 1 if anything does."""
    from swe_env.reproduce import differences

    found = _guard(lambda: trio.run(differences, path))
    for name, (then, now) in found.items():
        console.print(f"{name}: then {then}, now {now}", markup=False, soft_wrap=True)
    if found:
        typer.echo(f"swe-env: {len(found)} things differ from {path}", err=True)
        raise typer.Exit(1)
    console.print(f"nothing differs from {path}: the same command, with another --out, repeats it")


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name for name in text.split(",") if name]


def _finish(rundir: RunDir) -> None:
    """Show what a run came to. Exit code 1 if it lost episodes, or has tasks that cannot be right."""
    from swe_env.report import write_report

    episodes = rundir.episodes()
    page = write_report(rundir)
    show_table(episodes)
    console.print(f"\nepisodes  {rundir.episodes_path}\nreport    {page}", soft_wrap=True)
    console.print(f"next      {program()} show {rundir.path} {episodes[0].id}", soft_wrap=True)
    lost = sum(episode.end.is_infrastructure for episode in episodes)
    if lost:
        typer.echo(
            f"swe-env: {lost} episodes were lost to infrastructure: run the same command again", err=True
        )
    wrong = [complaint for episode in episodes if (complaint := doubtful(episode))]
    for complaint in wrong:
        typer.echo(f"swe-env: {complaint}", err=True)
    if lost or wrong:
        raise typer.Exit(1)


def _say(line: str) -> None:
    console.print(line, style="dim", markup=False, soft_wrap=True)


def _run(work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` under trio. The first Ctrl-C (or SIGTERM) cancels it and waits for its cleaning up;
    a second one is Python's own."""

    async def under_signals() -> tuple[bool, T | None]:
        interrupted, result = False, None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal interrupted
                with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    async for _ in signals:
                        interrupted = True
                        console.print("[yellow]stopping: removing sandboxes, finished episodes are kept")
                        nursery.cancel_scope.cancel()
                        return

            nursery.start_soon(watch)
            result = await work()
            nursery.cancel_scope.cancel()
        return interrupted, result

    interrupted, result = _guard(lambda: trio.run(under_signals))
    if interrupted:
        raise typer.Exit(130)
    return cast("T", result)


def _guard(work: Callable[[], T]) -> T:
    """Turn expected errors into one line and exit code 2."""
    try:
        return work()
    except EXPECTED as error:
        message = str(error)
    except BaseExceptionGroup as group:
        expected, rest = group.split(EXPECTED)
        if rest is not None or expected is None:
            raise
        leaf: BaseException = expected
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        message = str(leaf)
    typer.echo(f"swe-env: {message}", err=True)
    raise typer.Exit(2)
