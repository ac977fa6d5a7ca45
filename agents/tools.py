"""The tools an agent acts with: a shell, an editor, and `submit`.

What a tool answers is text for the model; nothing a model can write raises here. Only the loss of the
sandbox does (:class:`~sandboxes.protocol.SandboxLost`), because that is not the model's doing.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any, NamedTuple

import trio
from pydantic import BaseModel, ConfigDict, ValidationError

from agents.chat import Call, Turn
from agents.prompts import Prompts
from sandboxes.protocol import Sandbox, SandboxError, SandboxLost

_NO_NETWORK = re.compile(
    rb"Temporary failure in name resolution|Could not resolve host|Network is unreachable"
    rb"|Name or service not known|nodename nor servname"
)


class ToolLimits(BaseModel):
    """Bounds of one tool call."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout: float = 60.0
    """Default deadline of a command [seconds]."""
    max_timeout: float = 600.0
    """Longest deadline the model may ask for [seconds]."""
    output: int = 24 << 10
    """Most bytes of output that an observation shows."""


class Outcome(BaseModel):
    """What a turn's calls came to."""

    messages: list[dict[str, Any]] = []
    """One answer a call, in order; or one for a turn that called nothing."""
    executed: int = 0
    submitted: bool = False
    network_attempts: int = 0
    """Commands whose output shows that they tried to reach a network (there is none)."""
    command_seconds: float = 0.0
    """For which shell commands ran, measured in the sandbox."""


class _Answer(NamedTuple):
    """What one call came to."""

    content: str
    networked: bool = False
    seconds: float = 0.0


async def execute(
    turn: Turn,
    *,
    truncated: bool,
    sandbox: Sandbox,
    prompts: Prompts,
    limits: ToolLimits,
    deadline: float,
) -> Outcome:
    """Carry out a turn's calls in order, until one submits or `deadline` (trio's clock) has passed.

    Raises `SandboxLost`.
    """
    outcome = Outcome()
    if not turn.calls:
        kind = "truncated" if truncated else "missing"
        outcome.messages.append({"role": "user", "content": prompts.answer(kind)})
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in prompts.tools}
    for call in turn.calls:
        content = _refuse(call, known, prompts)
        if content is None and call.name == "submit":
            outcome.executed += 1
            outcome.submitted = True
            break
        left = deadline - trio.current_time()
        if content is None and left <= 0:
            break
        if content is None:
            bounded = limits.model_copy(update={"max_timeout": min(limits.max_timeout, left)})
            content, networked, seconds = await _act(call, sandbox, bounded)
            outcome.executed += 1
            outcome.network_attempts += networked
            outcome.command_seconds += seconds
        outcome.messages.append({"role": "tool", "name": call.name, "content": content})
    return outcome


def _refuse(call: Call, known: dict[str, Any], prompts: Prompts) -> str | None:
    """Why a call cannot be carried out, in the words of the prompt set; None when it can."""
    if call.problem == "unknown_tool" or (call.problem is None and call.name not in known):
        return prompts.answer("unknown_tool", ", ".join(known))
    if call.problem is not None:
        return prompts.answer(call.problem)
    schema = known[call.name]
    complaints = [f"{name!r} is missing" for name in schema.get("required", []) if name not in call.arguments]
    complaints += [f"there is no {name!r}" for name in call.arguments if name not in schema["properties"]]
    for name, value in call.arguments.items():
        property_schema = schema["properties"].get(name, {})
        if not _fits(value, property_schema.get("type")):
            complaints.append(f"{name!r} is not of type {property_schema['type']}")
        elif "enum" in property_schema and value not in property_schema["enum"]:
            complaints.append(f"{name!r} is not one of {', '.join(property_schema['enum'])}")
    return prompts.answer("bad_arguments", "; ".join(complaints)) if complaints else None


def _fits(value: Any, json_type: str | None) -> bool:
    match json_type:
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case _:
            return True


async def _act(call: Call, sandbox: Sandbox, limits: ToolLimits) -> _Answer:
    if call.name == "bash":
        return await _bash(sandbox, limits, **call.arguments)
    try:
        edit = _Edit(**call.arguments)
        return _Answer(await _edit(sandbox, edit))
    except ValidationError as error:
        return _Answer(f"Error: {error.errors()[0]['msg']}.")
    except OSError as error:
        return _Answer(f"Error: {call.arguments['path']}: {error.strerror}.")
    except ValueError:  # a NUL in the path
        return _Answer("Error: there can be no file of that name.")
    except SandboxLost:
        raise
    except SandboxError as error:
        return _Answer(f"Error: {error}.")


async def _bash(sandbox: Sandbox, limits: ToolLimits, command: str, timeout: float | None = None) -> _Answer:
    deadline = max(1.0, min(timeout or limits.timeout, limits.max_timeout))
    script = command.replace("\0", "")
    result = await sandbox.run(script, timeout=deadline, output_limit=limits.output)
    text = result.text.rstrip("\n")
    notes: list[str] = []
    if result.timed_out:
        notes.append(f"[killed after {deadline:g} seconds, with everything it had started]")
    elif result.exit_code != 0:
        notes.append(f"[exit code {result.exit_code}]")
    content = "\n".join(filter(None, [text, *notes]))
    return _Answer(content, bool(_NO_NETWORK.search(result.output)), result.seconds)


class _Edit(BaseModel):
    command: str
    path: str
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | None = None
    view_range: list[int] | None = None


async def _edit(sandbox: Sandbox, edit: _Edit) -> str:
    path = posixpath.join(sandbox.workdir, edit.path)
    match edit.command:
        case "view":
            return await _view(sandbox, path, edit.view_range)
        case "create":
            if edit.file_text is None:
                return "Error: create needs file_text."
            await sandbox.write(path, edit.file_text.encode())
            return f"Wrote {edit.path}."
        case "str_replace":
            return await _replace(sandbox, path, edit)
        case "insert":
            return await _insert(sandbox, path, edit)
        case _:
            return "Error: command is view, create, str_replace or insert."


async def _view(sandbox: Sandbox, path: str, view_range: list[int] | None) -> str:
    try:
        content = await sandbox.read(path, limit=4 << 20)
    except IsADirectoryError:
        listing = await sandbox.run('ls -Ap "$VIEW"', env={"VIEW": path}, session=False, timeout=20)
        return listing.text.rstrip("\n") or "[empty directory]"
    lines = content.decode("utf-8", "replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    first, last = view_range if view_range and len(view_range) == 2 else (1, len(lines))
    last = len(lines) if last == -1 else min(last, len(lines))
    if not lines:
        return "[empty file]"
    if not 1 <= first <= last:
        return f"Error: view_range must lie within 1 and {len(lines)}."
    return "\n".join(f"{number:6}\t{lines[number - 1]}" for number in range(first, last + 1))


async def _replace(sandbox: Sandbox, path: str, edit: _Edit) -> str:
    if not edit.old_str or edit.new_str is None:
        return "Error: str_replace needs old_str (not empty) and new_str."
    content, old = await sandbox.read(path), edit.old_str.encode()
    found = content.count(old)
    if found != 1:
        return f"Error: old_str occurs {found} times in {edit.path}; it must occur exactly once."
    await sandbox.write(path, content.replace(old, edit.new_str.encode()))
    return f"Edited {edit.path}."


async def _insert(sandbox: Sandbox, path: str, edit: _Edit) -> str:
    if edit.insert_line is None or edit.new_str is None:
        return "Error: insert needs insert_line and new_str."
    lines = (await sandbox.read(path)).splitlines(keepends=True)
    if not 0 <= edit.insert_line <= len(lines):
        return f"Error: insert_line must lie within 0 and {len(lines)}."
    new = edit.new_str.encode()
    at = edit.insert_line
    if at and not lines[at - 1].endswith((b"\n", b"\r")):
        new = b"\n" + new
    if not new.endswith(b"\n") and (at < len(lines) or (lines and lines[-1].endswith(b"\n"))):
        new += b"\n"
    await sandbox.write(path, b"".join([*lines[:at], new, *lines[at:]]))
    return f"Edited {edit.path}."
