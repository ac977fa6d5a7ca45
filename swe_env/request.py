"""What a run is asked for: a TOML file, options of the command line over it, defaults under both."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents.chat import Family
from agents.loop import Budget
from agents.policy import Sampling
from sandboxes.backends import Backend
from swe_env.grading import Mode
from swe_env.rundir import RunError


class RunRequest(BaseModel):
    """Everything `swe-env run` can be told. The fields' defaults are the command line's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: str
    """`shipped`, `synthetic:train:N`, `synthetic:heldout:N`, `swebench:SET` or a task file."""
    policy: str
    """`vllm`, `gold`, `noop`, `replay:EPISODE`, or `predictions:FILE` to grade patches made elsewhere."""
    out: Path
    split: str = "test"
    """Of a published dataset."""
    instances: list[str] = []
    """Only these task ids; empty for all."""
    n: int = Field(default=1, ge=1)
    """Episodes a task."""
    concurrency: int = Field(default=8, ge=1)
    url: str | None = None
    """A vLLM server that has `model` already; None starts one."""
    model: Path | None = None
    family: Family | None = None
    prompts: str = "default"
    budget: Budget = Budget()
    sampling: Sampling = Sampling()
    mode: Mode = "strict"
    """How patches are graded."""
    graded: bool = True
    """False for demonstrations that are only to be learnt from: nothing is graded or earned."""
    retries: int = Field(default=2, ge=0)
    """Further attempts at an episode that infrastructure ended."""
    sandbox: Backend = "auto"
    """Where sandboxes come from: `oci` (no daemon, faster), `docker`, or the first of them that can."""
    setup_once: bool = False
    """Lay out, set up and seal a task's inline repository once, and start its sandboxes from there."""
    repo_mirror: Path | None = None
    """Clones from which SWE-bench images are built here; None if they are here already."""
    mirror: str | None = None
    """Host (and path) of a registry that stands in for Docker Hub."""
    python: Path | None = None
    """Interpreter to copy into those images; None finds one."""


def read_request(
    file: Path | None, options: dict[str, Any], under: dict[str, Any] | None = None
) -> RunRequest:
    """The request that a TOML file and the options given (those not None) make together.

    Tables of the file are nested dicts among the options. `under`: defaults of the command.
    Raises :class:`RunError` that names the field.
    """
    content: dict[str, Any] = {}
    if file is not None:
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read {file}: {error}") from None
    try:
        return RunRequest.model_validate({**(under or {}), **_over(content, options)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise RunError(f"--{name} is missing: give it, or a --config that has it") from None
        where = f"{file}: " if file is not None else ""
        raise RunError(f"{where}{name}: {first['msg'].lower()}") from None


def names(text: str | None) -> list[str] | None:
    """`a,b` as a list."""
    return None if text is None else [name for name in text.split(",") if name]


def _over(content: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    merged = dict(content)
    for name, value in options.items():
        if isinstance(value, dict):
            below = merged.setdefault(name, {})
            if isinstance(below, dict):  # else it is refused as what it is
                merged[name] = _over(cast("dict[str, Any]", below), cast("dict[str, Any]", value))
        elif value is not None:
            merged[name] = value
    return merged
