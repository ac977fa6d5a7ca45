"""What a person watching a run sees: progress while it goes on, tables when it is done."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from swe_env.episode import Episode
from swe_env.evaluation import Summary

console = Console(highlight=False, emoji=False)
if not console.is_terminal:
    console.width = 120  # a log has no width of its own; 80 would break the tables


def program() -> str:
    """What to type to call this program again: `swe-env`, or the path to it where it is not on PATH."""
    called = Path(sys.argv[0])
    found = shutil.which("swe-env")
    if called.name != "swe-env" or (found and Path(found).resolve() == called.resolve()):
        return "swe-env"
    return os.path.relpath(called) if called.resolve().is_relative_to(Path.cwd()) else str(called)


_STAGES = {"start": "starting", "play": "playing", "grade": "grading"}


class Board:
    """Live progress of a run. Implements :class:`swe_env.runner.Watcher`."""

    def __init__(self, total: int, out: Console = console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=out,
        )
        self._bar = self._progress.add_task("episodes", total=total)
        self._stages: dict[str, str] = {}
        self._solved = self._done = 0
        self._retried: Counter[str] = Counter()
        self._out = out

    def stage(self, job_id: str, stage: str) -> None:
        self._stages[job_id] = stage

    def done(self, episode: Episode, *, will_retry: bool) -> None:
        self._stages.pop(episode.id, None)
        if episode.end.is_infrastructure:
            again = "trying again" if will_retry else "given up; run the same command again to retry"
            line = f"{episode.id}: {episode.end}: {episode.error} ({again})"
            self._out.print(line, style="yellow", markup=False, soft_wrap=True)
        if not will_retry:
            self._done += 1
            self._solved += (episode.reward or 0) > 0
            self._progress.advance(self._bar)

    @classmethod
    @contextmanager
    def live(cls, total: int, out: Console = console) -> Generator[Board]:
        """A board that is shown while the block runs (only its messages where there is no terminal)."""
        board = cls(total, out)
        if not out.is_terminal:
            yield board
            return
        with Live(get_renderable=board.rendered, console=out, refresh_per_second=8, transient=True):
            yield board

    def rendered(self) -> Group:
        """As it is now."""
        counts = Counter(self._stages.values())
        now = "   ".join(f"{counts[stage]} {word}" for stage, word in _STAGES.items())
        speed = self._progress.tasks[0].speed
        rate = f"   {60 * speed:.1f} a minute" if speed else ""
        return Group(
            self._progress, Text(f"{now}   {self._solved} of {self._done} solved{rate}", style="dim")
        )


def show_table(episodes: Sequence[Episode], out: Console = console) -> None:
    """Every episode, then what they come to."""
    out.print(episode_table(episodes))
    out.print()
    out.print(summary_table(episodes))


def episode_table(episodes: Sequence[Episode]) -> Table:
    """One row an episode."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("task", "policy", "turns", "tokens", "end", "reward", "seconds"):
        right = name in ("turns", "tokens", "reward", "seconds")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "end")
    for episode in episodes:
        reward = "-" if episode.reward is None else f"{episode.reward:g}"
        style = "yellow" if episode.reward is None else "green" if episode.reward else "default"
        tampered = " (tampered)" if episode.grade and episode.grade.tampered else ""
        table.add_row(
            episode.task_id,
            escape(episode.policy),
            str(len(episode.turns)),
            str(episode.tokens),
            f"{episode.end}{tampered}",
            f"[{style}]{reward}[/]",
            f"{episode.timings.total:.1f}",
        )
    return table


def summary_table(episodes: Sequence[Episode]) -> Table:
    """One row a policy: how many episodes, how many solved, how they ended."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("policy", "episodes", "solved", "mean reward", "infrastructure", "endings"):
        table.add_column(name, justify="left" if name in ("policy", "endings") else "right")
    for policy in dict.fromkeys(episode.policy for episode in episodes):
        own = [episode for episode in episodes if episode.policy == policy]
        rewards = [episode.reward for episode in own if episode.reward is not None]
        ends = Counter(str(episode.end) for episode in own)
        table.add_row(
            escape(policy),
            str(len(own)),
            str(sum(reward > 0 for reward in rewards)),
            f"{sum(rewards) / len(rewards):.3f}" if rewards else "-",
            str(len(own) - len(rewards)),
            ", ".join(f"{end} {count}" for end, count in ends.most_common()),
        )
    return table


def show_evaluation(summary: Summary, out: Console = console) -> None:
    """Resolved by repository and as a whole, pass@k, endings; what has no verdict is said apart."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("repository", "instances", "resolved", "%", "95% interval"):
        table.add_column(name, justify="left" if name == "repository" else "right")
    rows = [*summary.by_repository.items(), ("all", summary.whole)]
    if summary.quarantined is not None:
        rows.append(("of these, quarantined", summary.quarantined))
    for name, share in rows:
        low, high = share.interval
        style = "bold" if name == "all" else ""
        table.add_row(
            escape(name),
            str(share.instances),
            f"{share.resolved:g}",
            f"{100 * share.rate:.1f}",
            f"{100 * low:.1f} to {100 * high:.1f}",
            style=style,
        )
    out.print(table)
    out.print()
    if len(summary.pass_at) > 1:
        shares = (
            f"pass@{k} {100 * share.rate:.1f}% of {share.instances}" for k, share in summary.pass_at.items()
        )
        out.print("   ".join(shares))
    out.print("   ".join(f"{ending}: {count}" for ending, count in summary.endings.items()), markup=False)
    if summary.no_verdict:
        out.print(
            f"{len(summary.no_verdict)} attempts have no verdict (infrastructure) and are in no figure above",
            style="yellow",
        )


def show_episode(episode: Episode, out: Console = console) -> None:
    """One episode, turn by turn, as a person would read it."""
    out.print(
        f"[bold]{episode.id}[/]  policy {escape(episode.policy)}, {len(episode.turns)} turns", soft_wrap=True
    )
    spoken = iter(episode.turns)
    for message in episode.messages:
        role, content = message["role"], str(message.get("content") or "")
        if role == "assistant":
            turn = next(spoken, None)
            size = f"{turn.end - turn.start} tokens, {turn.model_seconds:.1f} s" if turn else ""
            out.rule(f"[bold cyan]policy[/] [dim]{size}", align="left", style="cyan")
            if message.get("reasoning_content"):
                out.print(Text(str(message["reasoning_content"]), style="dim italic"))
            if content.strip():
                out.print(Text(content))
            for call in message.get("tool_calls", []):
                _show_call(call, out)
        else:
            out.rule(f"[bold]{message.get('name') or role}", align="left", style="dim")
            out.print(Text(content))
    out.rule("[bold]result", align="left", style="green" if episode.reward else "red")
    if episode.patch:
        out.print(Text(episode.patch.decode("utf-8", "replace"), style="dim"))
    reward = "none (infrastructure)" if episode.reward is None else f"{episode.reward:g}"
    out.print(f"end {episode.end}, reward [bold]{reward}[/]")
    reason = episode.error or (episode.grade.reason if episode.grade else "")
    if reason:
        out.print(Text(reason))


def _show_call(call: dict[str, Any], out: Console) -> None:
    problem = f" [red]({call['problem']})[/]" if call.get("problem") else ""
    out.print(f"[cyan]▸ {escape(call['name'] or '?')}[/]{problem}")
    if call.get("problem"):
        out.print(Text(str(call.get("raw", "")), style="red"))
        return
    for name, value in call["arguments"].items():
        indented = str(value).replace("\n", "\n    ")
        out.print(Text(f"  {name}: " + ("\n    " + indented if "\n" in indented else indented)))
