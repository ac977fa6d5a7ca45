"""Tasks in a file: one JSON object a line, read all-or-nothing.

A file with one bad line is a bad file: :func:`load_tasks` returns every task or raises one line that says
where, what and how to mend it, before any sandbox has started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.model import Task


class TaskFileError(Exception):
    """A task file that cannot be used. The message is one line: file, line, field, cure."""


def load_tasks(path: str | Path) -> list[Task]:
    """Every task of a JSONL file, in file order; blank lines are skipped. Raises :class:`TaskFileError`."""
    tasks: list[Task] = []
    line_of: dict[str, int] = {}
    for number, row in read_rows(path):
        try:
            task = Task.model_validate(row)
        except ValidationError as error:
            raise TaskFileError(f"{path}:{number}: {_first_problem(error)}") from error
        if task.id in line_of:
            raise TaskFileError(
                f"{path}:{number}: id {task.id!r} is already on line {line_of[task.id]}: rename one of them"
            )
        line_of[task.id] = number
        tasks.append(task)
    return tasks


def save_tasks(path: str | Path, tasks: Iterable[Task]) -> None:
    """Write tasks so that :func:`load_tasks` returns equal ones; an existing file is replaced at once."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(task.model_dump_json() + "\n" for task in tasks)
        partial.replace(path)
    except OSError as error:
        raise TaskFileError(f"{path}: cannot be written ({error.strerror}): choose another place") from error
    finally:
        partial.unlink(missing_ok=True)


def read_rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, JSON object) of each line that is not blank. Raises :class:`TaskFileError`."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise TaskFileError(f"{path}: cannot be read ({error.strerror}): check the path") from error
    rows: list[tuple[int, dict[str, Any]]] = []
    # Only newlines end a line: JSON text may contain U+2028 and its kind, which str.splitlines would cut at.
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise TaskFileError(
                f"{path}:{number}: byte {error.start + 1} of the line is not UTF-8: save the file as UTF-8"
            ) from error
        except ValueError as error:
            raise TaskFileError(
                f"{path}:{number}: not JSON ({error}): write one JSON object a line (JSONL)"
            ) from error
        except RecursionError as error:
            raise TaskFileError(f"{path}:{number}: JSON nested too deeply: flatten it") from error
        if not isinstance(row, dict):
            raise TaskFileError(
                f"{path}:{number}: a {type(row).__name__}, not an object: write one JSON object a line"
            )
        rows.append((number, row))  # pyright: ignore[reportUnknownArgumentType]
    if not rows:
        raise TaskFileError(f"{path}: has no tasks: write one JSON object a line (JSONL)")
    return rows


def _first_problem(error: ValidationError) -> str:
    """The first complaint as `field 'a.b': what is wrong: cure`, on one line."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = " ".join(first["msg"].split())
    match first["type"]:
        case "extra_forbidden":
            return f"field {field!r} is unknown: remove it, or put it under 'metadata'"
        case "missing":
            return f"field {field!r} is missing: add it"
        case "value_error" if not field:
            return message.removeprefix("Value error, ")
        case _:
            got = type(first["input"]).__name__
            return f"field {field!r} is wrong: {message} (it is a {got}): correct it"
