"""Do our verdicts agree with swebench's own harness, and how long does each take?

    python benchmarks/swebench_parity.py ROWS.jsonl INSTANCE[,INSTANCE...] [--workers N] [--sandbox BACKEND]

For each instance, whose image must be here, up to eight patches are graded three times on that image: by
swebench's `run_instance`, by us in official mode, by us in strict mode. In official mode every verdict must
be the same; in strict mode only tampered patches may differ, and each must be reported as tampering. One
grading may take no longer than theirs, many at a time must be 1.5 times as fast. Exit code 1 otherwise. Gold
patches come first, one at a time, ours and theirs in turn: those are the times of one grading. The others are
graded `N` at a time, by us and by them in turn for every few instances, so that a busy machine slows both
alike: those are the times of many.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import trio
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from unidiff import PatchSet

from sandboxes.backends import Backend, connect
from sandboxes.engine import BASE_IMAGE
from sandboxes.repository import names_at_start
from swe_env.grading import Grade, Mode, grade
from swe_env.protected import patch_paths
from swe_env.workspace import Workspaces
from tasks.model import SwebenchTests, Task
from tasks.swebench import load_swebench

GROUP = 4
"""Instances whose patches are graded by us, and then by the harness, before the next few are."""
TIMEOUT = 900
"""Of one instance's tests [seconds]."""
GOALS = (1.0, 1.5)
"""Their time over ours, at least: of one grading, and of many at a time."""

FORCE = """import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
KINDS = (
    "gold",
    "empty",
    "hunk dropped",
    "unrelated",
    "tampered",
    "no last newline",
    "CRLF",
    "does not apply",
)
LETTERS = {"resolved": "R", "unresolved": "U", "error": "E", "empty": "-"}
Verdicts = dict[tuple[str, str], tuple[str, float]]
"""(instance, kind of patch) -> verdict, seconds."""


def new_file(path: str, text: str) -> str:
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(text.splitlines())} @@\n{lines}"


def without_last_hunk(patch: str) -> str | None:
    """None for a patch of a single hunk."""
    files = PatchSet(patch)
    if sum(len(file) for file in files) < 2:
        return None
    files[-1].pop()
    return "".join(str(file) for file in files if len(file))


def patches_of(task: Task, existing: set[str]) -> dict[str, str]:
    """Kind -> patch. `existing`: files of the repository."""
    assert isinstance(task.tests, SwebenchTests)
    gold = task.gold_patch
    test = min(patch_paths(task.tests.test_patch))
    folders = ["", *(test[: at + 1] for at, letter in enumerate(test) if letter == "/")]
    conftest = next(f"{folder}conftest.py" for folder in folders if f"{folder}conftest.py" not in existing)
    made = {
        "gold": gold,
        "empty": "",
        "unrelated": new_file("a_note_of_mine.txt", "nothing to do with it\n"),
        "tampered": gold + new_file(conftest, FORCE),
        "no last newline": gold.rstrip("\n"),
        "CRLF": gold.replace("\n", "\r\n"),
        "does not apply": "--- a/absent.py\n+++ b/absent.py\n@@ -1 +1 @@\n-x\n+y\n",
    }
    if (dropped := without_last_hunk(gold)) is not None:
        made["hunk dropped"] = dropped
    return {kind: made[kind] for kind in KINDS if kind in made}


def verdict_of(result: Grade, patch: str) -> str:
    """In the words of swebench's report."""
    if not patch.strip():
        return "empty"
    if not result.patch_applied or result.timed_out:
        return "error"
    return "resolved" if result.reward > 0 else "unresolved"


async def ours(task: Task, patch: str, mode: Mode, workspaces: Workspaces) -> tuple[str, float, Grade]:
    begin = time.monotonic()
    result = await grade(task, patch.encode(), workspaces, mode)
    return verdict_of(result, patch), time.monotonic() - begin, result


def theirs(task: Task, kind: str, patch: str, client: Any) -> tuple[str, float]:
    """The harness's own run of one prediction, below the working directory."""
    from swebench.harness.run_evaluation import run_instance
    from swebench.harness.utils import make_test_spec

    if not patch:
        return "empty", 0.0  # it never runs an empty patch
    name = kind.replace(" ", "-")
    prediction = {"instance_id": task.id, "model_name_or_path": name, "model_patch": patch}
    begin = time.monotonic()
    run_id = f"parity-{name}"
    with contextlib.suppress(Exception):  # an instance that fails has no report: that is the verdict
        run_instance(make_test_spec(task.metadata["row"]), prediction, client, run_id, TIMEOUT)
    seconds = time.monotonic() - begin
    report = Path("logs/run_evaluation") / run_id / name / task.id / "report.json"
    if not report.exists():
        return "error", seconds
    return "resolved" if json.loads(report.read_text())[task.id]["resolved"] else "unresolved", seconds


async def measure(tasks: list[Task], workers: int, sandbox: Backend, progress: Progress) -> dict[str, Any]:
    import docker

    client = await trio.to_thread.run_sync(lambda: docker.from_env(timeout=1800))
    official: Verdicts = {}
    strict: Verdicts = {}
    harness: Verdicts = {}
    tampering: set[tuple[str, str]] = set()
    walls: dict[str, float] = defaultdict(float)
    async with connect(sandbox, run_id="parity", say=progress.console.print) as engine:
        workspaces = Workspaces(engine, BASE_IMAGE)
        patches: dict[str, dict[str, str]] = {}
        for task in tasks:
            async with workspaces.open(task.view()) as workspace:  # seals its image, outside all timing
                existing = await names_at_start(workspace.sandbox, workspace.baseline)
            patches[task.id] = patches_of(task, existing)
        others = [(task, kind) for task in tasks for kind in patches[task.id] if kind != "gold"]
        bar = progress.add_task("graded", total=2 * len(tasks) + 3 * len(others) + len(tasks))

        async def grade_ours(task: Task, kind: str, mode: Mode, into: Verdicts) -> None:
            verdict, seconds, result = await ours(task, patches[task.id][kind], mode, workspaces)
            into[task.id, kind] = verdict, seconds
            if result.tampered:
                tampering.add((task.id, kind))
            progress.advance(bar)

        for task in tasks:
            await grade_ours(task, "gold", "official", official)
            gold = patches[task.id]["gold"]
            harness[task.id, "gold"] = await trio.to_thread.run_sync(theirs, task, "gold", gold, client)
            progress.advance(bar)

        async def many(wanted: list[tuple[Task, str]], mode: Mode, into: Verdicts) -> None:
            places = trio.CapacityLimiter(workers)

            async def placed(task: Task, kind: str) -> None:
                async with places:
                    await grade_ours(task, kind, mode, into)

            async with trio.open_nursery() as nursery:
                for task, kind in wanted:
                    nursery.start_soon(placed, task, kind)

        def many_theirs(wanted: list[tuple[Task, str]]) -> None:
            with ThreadPoolExecutor(workers) as pool:
                running = {
                    (task.id, kind): pool.submit(theirs, task, kind, patches[task.id][kind], client)
                    for task, kind in wanted
                }
                for key, future in running.items():
                    harness[key] = future.result()
                    progress.advance(bar)

        for start in range(0, len(tasks), GROUP):
            group = {task.id for task in tasks[start : start + GROUP]}
            wanted = [(task, kind) for task, kind in others if task.id in group]
            begin = time.monotonic()
            await many(wanted, "official", official)
            middle = time.monotonic()
            await trio.to_thread.run_sync(many_theirs, wanted)
            walls["official"] += middle - begin
            walls["harness"] += time.monotonic() - middle
        await many([(task, kind) for task in tasks for kind in patches[task.id]], "strict", strict)
    return {
        "official": official, "strict": strict, "harness": harness, "tampering": tampering, "walls": walls,
        "many": len(others),
    }  # fmt: skip


def show(found: dict[str, Any], workers: int, console: Console) -> bool:
    """Print everything; whether the claims hold."""
    harness, official, strict = found["harness"], found["official"], found["strict"]
    table = Table(
        "instance", *KINDS, box=None, title="swebench / ours official / ours strict", pad_edge=False
    )
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    wrong: list[str] = []
    for key in harness:
        three = [verdicts[key][0] for verdicts in (harness, official, strict)]
        cells[key[0]][key[1]] = "/".join(LETTERS[one] for one in three)
        if three[0] != three[1]:
            wrong.append(f"{key}: swebench says {three[0]}, official mode {three[1]}")
        if three[1] != three[2] and not (key[1] == "tampered" and key in found["tampering"]):
            wrong.append(f"{key}: official mode says {three[1]}, strict mode {three[2]}")
    missed = [key for key in harness if key[1] == "tampered" and key not in found["tampering"]]
    wrong += [f"{key}: not reported as tampering" for key in missed]
    for instance, row in cells.items():
        table.add_row(instance, *(row.get(kind, "") for kind in KINDS))
    console.print(table)
    console.print("R resolved, U unresolved, E error (does not apply, timed out), - empty patch")
    pairs = [(official[key][1], harness[key][1]) for key in harness if key[1] == "gold"]
    ratios = sorted(theirs_ / ours_ for ours_, theirs_ in pairs)
    one = statistics.median(ratios)
    console.print(
        f"\none gold patch at a time: ours {statistics.median(pair[0] for pair in pairs):.1f} s, swebench "
        f"{statistics.median(pair[1] for pair in pairs):.1f} s (medians); ratio {one:.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    many = found["walls"]["harness"] / found["walls"]["official"]
    console.print(
        f"{found['many']} patches, {workers} at a time: ours {found['walls']['official']:.0f} s, swebench "
        f"{found['walls']['harness']:.0f} s; ratio {many:.2f}"
    )
    console.print(f"{len(harness)} verdicts, {len(wrong)} disagreements")
    for line in wrong:
        console.print(line, markup=False)
    fast = one >= GOALS[0] and many >= GOALS[1]
    if not fast:
        console.print(f"too slow: the ratios are to be at least {GOALS[0]} and {GOALS[1]}")
    return fast and not wrong


def main(
    rows: Path,
    instances: str,
    out: Annotated[Path, typer.Option(help="Where swebench's logs go.")] = Path("runs/parity"),
    workers: Annotated[int, typer.Option(help="Gradings at a time.")] = 4,
    sandbox: Annotated[Backend, typer.Option(help="Where ours are graded: auto, oci or docker.")] = "auto",
) -> None:
    tasks = load_swebench(rows, instances.split(","))
    if (out / "logs").exists():  # swebench would take what it finds there for done, in no time
        sys.exit(f"{out} has logs of a run before: remove it, or give another --out")
    out.mkdir(parents=True, exist_ok=True)
    console = Console(emoji=False, highlight=False, stderr=False)
    if not console.is_terminal:
        console.width = 160
    os.chdir(out)
    with Progress(console=Console(stderr=True)) as progress, contextlib.redirect_stdout(io.StringIO()):
        found = trio.run(measure, tasks, workers, sandbox, progress)
    sys.exit(0 if show(found, workers, console) else 1)


if __name__ == "__main__":
    typer.run(main)
