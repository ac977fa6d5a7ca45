"""The command line. Each command is a few lines: the work is in the module that it names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import trio
import typer
from rich.markup import escape

from agents.chat import Family
from sandboxes.backends import Backend
from sandboxes.engine import ensure_base_image, ensure_engine
from swe_env import cli_eval, cli_images, cli_train
from swe_env.display import Board, console, program, show_episode, show_table
from swe_env.policies import doubtful
from swe_env.request import RunRequest, names, read_request
from swe_env.rundir import RunDir, RunError
from swe_env.sources import FORMS, find_tasks
from swe_env.terminal import guard, run_async, say

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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of runs.")] = Path("runs/demo"),
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 8,
    sandbox: Annotated[Backend, typer.Option(help="auto, oci or docker.")] = "auto",
) -> None:
    """From nothing to a table: gold, no-op and a served model on every shipped task."""
    from swe_env.demo import run_demo

    run_async(lambda: run_demo(out, concurrency, sandbox))


@app.command()
def run(
    tasks: Annotated[str | None, typer.Option(help=f"Which tasks: {FORMS}.")] = None,
    policy: Annotated[str | None, typer.Option(help="Who plays: vllm, gold, noop or replay:EPISODE.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; asked again, does what is missing.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML of these options: see configs/run/.")] = None,
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
    sandbox: Annotated[Backend | None, typer.Option(help="auto [default], oci or docker.")] = None,
    setup_once: Annotated[
        bool | None, typer.Option("--setup-once", help="Set a task up once, not for every sandbox.")
    ] = None,
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
                "instances": names(instances),
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
                "sandbox": sandbox,
                "setup_once": setup_once,
                "repo_mirror": repo_mirror,
                "python": python,
            },
        )

    request = guard(ask)
    _finish(run_async(lambda: play(request, Board.live, say)))


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

    guard(read)


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
        ensure_engine(say)
        say(f"base image {ensure_base_image(say)} is here")

    guard(bring_up)


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
            model, log_path=log, port=port, dtype=dtype, max_model_len=max_model_len, say=say
        ) as server:
            console.print(f"serving {model} at {server.url}; Ctrl-C ends it")
            while True:
                server.check_alive()
                await trio.sleep(1)

    run_async(forever)


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

    guard(list_them)


app.add_typer(tasks_app, name="tasks")
app.add_typer(cli_images.images_app, name="images")
app.command("eval")(cli_eval.evaluate)
app.command("grade")(cli_eval.grade)
app.command("sft")(cli_train.sft)
app.command("train")(cli_train.train)
app.command("plan")(cli_train.plan)
app.command("plot")(cli_train.plot)
app.command("stability")(cli_train.stability)
app.command("export")(cli_train.export)
tasks_app.command("validate")(cli_eval.validate_tasks)


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


def _finish(rundir: RunDir) -> None:
    """Show what a run came to. Exit code 1 if it lost episodes, or has tasks that cannot be right."""
    from swe_env.report import write_report

    episodes = rundir.episodes()
    page = guard(lambda: write_report(rundir))
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
