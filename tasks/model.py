"""What a task is: a repository at a commit, a problem, and hidden tests that decide.

A :class:`Task` is data, frozen, one JSON object in a JSONL file. The rollout side is handed
:meth:`Task.view`, which has no field for the hidden tests or the gold patch: they are unreachable
because they are not there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sandboxes.protocol import Limits


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageRef(_Frozen):
    """A container image that has the repository at `workdir` (SWE-bench, SWE-Gym, your own)."""

    kind: Literal["image"] = "image"
    name: str = Field(min_length=1)


class InlineRepo(_Frozen):
    """A small repository carried by the task itself, laid into the base image when a sandbox starts."""

    kind: Literal["files"] = "files"
    files: dict[str, str] = Field(min_length=1)
    """Path relative to `workdir` -> text."""


class PytestTests(_Frozen):
    """Hidden tests run by pytest and read from its own report, not from its log."""

    kind: Literal["pytest"] = "pytest"
    files: dict[str, str] = Field(min_length=1)
    """Hidden test files: path relative to `workdir` -> text. Written after the patch is applied."""


class SwebenchTests(_Frozen):
    """Hidden tests run by a SWE-bench evaluation script and read by swebench's own parser."""

    kind: Literal["swebench"] = "swebench"
    test_patch: str
    eval_script: str
    log_parser: str
    eval_type: str = "pass_and_fail"
    version: str = ""


class TaskView(_Frozen):
    """What the policy side may know of a task."""

    id: str
    source: str
    repo: str
    base_commit: str | None
    problem_statement: str
    image: Annotated[ImageRef | InlineRepo, Field(discriminator="kind")]
    workdir: str
    setup: str
    activate: str
    limits: Limits


class Task(_Frozen):
    """A task with everything needed to run and grade it."""

    id: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Unique within a run; becomes a file name."""
    source: str
    """Where it comes from: `shipped`, `synthetic`, `swebench`, or a name of yours."""
    repo: str = ""
    base_commit: str | None = None
    """Newest commit the agent may see; None for an inline repository, whose only commit is made at start."""
    problem_statement: str = Field(min_length=1)
    image: Annotated[ImageRef | InlineRepo, Field(discriminator="kind")]
    workdir: str = "/testbed"
    setup: str = ""
    """Shell script run in each new sandbox before the repository is sealed (environment, not secrets)."""
    activate: str = ""
    """Shell command that begins the agent's session (activate the image's environment)."""
    tests: Annotated[PytestTests | SwebenchTests, Field(discriminator="kind")]
    fail_to_pass: list[str] = Field(min_length=1)
    pass_to_pass: list[str] = []
    gold_patch: str
    test_timeout: float = Field(default=1800.0, gt=0)
    """Deadline of the hidden tests [seconds]."""
    limits: Limits = Limits()
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _required_tests_are_distinct(self) -> Task:
        both = set(self.fail_to_pass) & set(self.pass_to_pass)
        if both:
            raise ValueError(f"{sorted(both)[0]} is in both fail_to_pass and pass_to_pass: keep it in one")
        if not self.workdir.startswith("/"):
            raise ValueError(f"workdir {self.workdir!r} is not absolute: write it as /testbed")
        return self

    def view(self) -> TaskView:
        """The task without hidden tests, required test names or gold patch."""
        return TaskView(**{name: getattr(self, name) for name in TaskView.model_fields})
