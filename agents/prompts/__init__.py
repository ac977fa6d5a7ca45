"""The words the policy reads: four files a set, for people to edit.

`system.txt` and `task.txt` ({workdir}, {problem_statement} are filled in), `tools.json` (JSON schemas in
the OpenAI shape; as `{"announce": false, "tools": [...]}` the tools are there, but prompts do not describe
them, for a policy that was trained on them), `feedback.toml` (what a turn that cannot be carried out is
answered). `default` is for models that can read; `tiny` says the least, for policies with a thousand-token
vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

_HERE = Path(__file__).parent
_FILES = ("system.txt", "task.txt", "tools.json", "feedback.toml")
_FEEDBACK = {"missing", "truncated", "malformed", "unknown_tool", "bad_arguments"}


class PromptError(Exception):
    """A prompt set cannot be used. One line: file, cause, cure."""


class Prompts(BaseModel):
    """One set of texts."""

    model_config = ConfigDict(frozen=True)

    system: str
    task: str
    tools: list[dict[str, Any]]
    announce_tools: bool
    """Prompts describe the tools."""
    feedback: dict[str, str]
    sha256: str
    """Of all four files: two runs with the same digest said the same words."""

    def opening(self, *, workdir: str, problem_statement: str) -> list[dict[str, Any]]:
        """The first two messages of an episode."""
        # not str.format: a problem statement may hold braces, and so may an edited task.txt
        task = self.task.replace("{workdir}", workdir)
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": task.replace("{problem_statement}", problem_statement)},
        ]

    def answer(self, kind: str, details: str = "") -> str:
        """Feedback of one kind, with its details filled in."""
        return self.feedback[kind].replace("{details}", details)


def load_prompts(name_or_dir: str = "default") -> Prompts:
    """A shipped set by name, or else any directory with the four files. Raises :class:`PromptError`."""
    directory = _HERE / name_or_dir
    if not (directory / _FILES[0]).is_file():
        directory = Path(name_or_dir)
    if not directory.is_dir():
        shipped = ", ".join(sorted(path.parent.name for path in _HERE.glob("*/system.txt")))
        raise PromptError(f"no prompts named {name_or_dir!r}: give a directory, or one of {shipped}")
    texts: dict[str, str] = {}
    for file in _FILES:
        try:
            texts[file] = (directory / file).read_text(encoding="utf-8").rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"{directory / file}: {error}; copy it from the default set") from None
    try:
        content: Any = json.loads(texts["tools.json"])
        announce = isinstance(content, list) or bool(content["announce"])
        tools = cast("list[dict[str, Any]]", content if isinstance(content, list) else content["tools"])
        _ = [tool["function"]["parameters"]["properties"] for tool in tools]
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{directory / 'tools.json'}: not a list of tool schemas ({error!r})") from None
    try:
        feedback = tomllib.loads(texts["feedback.toml"])
    except tomllib.TOMLDecodeError as error:
        raise PromptError(f"{directory / 'feedback.toml'}: {error}") from None
    if missing := _FEEDBACK - feedback.keys():
        raise PromptError(f"{directory / 'feedback.toml'}: lacks {sorted(missing)[0]!r}")
    digest = hashlib.sha256("\0".join(texts[file] for file in _FILES).encode()).hexdigest()
    return Prompts(
        system=texts["system.txt"],
        task=texts["task.txt"],
        tools=tools,
        announce_tools=announce,
        feedback=feedback,
        sha256=digest,
    )
