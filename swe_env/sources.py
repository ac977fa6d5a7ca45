"""`--tasks`: from a word on the command line to tasks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from swe_env.rundir import RunError
from tasks.jsonl import load_tasks
from tasks.model import Task
from tasks.published import load_rows
from tasks.swebench import load_swebench
from tasks.synthetic import generate_many, shipped_tasks

FORMS = (
    "shipped, synthetic:train:N, synthetic:heldout:N (or FIRST-END), swebench:SET (verified, lite, full, "
    "multilingual, a file, a directory or a hub id), or a task file (.jsonl)"
)


def find_tasks(source: str, instances: Sequence[str] = (), split: str = "test") -> list[Task]:
    """Tasks by name; `instances` keeps only these ids. Raises `TaskFileError` and :class:`RunError`."""
    if source.startswith("swebench:"):
        return load_swebench(load_rows(source.removeprefix("swebench:"), split), list(instances) or None)
    if source == "shipped":
        tasks = shipped_tasks()
    elif match := re.fullmatch(r"synthetic:(train|heldout):(?:(\d+)-)?(\d+)", source):
        first, end = int(match[2] or 0), int(match[3])
        if first >= end:
            raise RunError(f"{source} has no tasks: they are numbered from 0, and END is not among them")
        tasks = generate_many("train" if match[1] == "train" else "heldout", end, first)
    elif Path(source).suffix == ".jsonl":
        tasks = load_tasks(Path(source))
    else:
        raise RunError(f"no tasks named {source!r}: give {FORMS}")
    known = {task.id: task for task in tasks}
    if unknown := [name for name in instances if name not in known]:
        raise RunError(f"{source} has no task {unknown[0]!r}: it has {', '.join(list(known)[:5])}, ...")
    return [known[name] for name in instances] if instances else tasks


def digest(tasks: Sequence[Task]) -> str:
    """Of all tasks, hidden tests included: two runs with the same digest were asked the same."""
    content = "\n".join(task.model_dump_json() for task in tasks)
    return hashlib.sha256(content.encode()).hexdigest()
