"""From a request to a plan: all that can be refused without a sandbox or a server is refused here."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

import agents
from agents.chat import Chat, load_chat
from agents.prompts import Prompts, load_prompts
from swe_env.episode import Episode
from swe_env.policies import KINDS, load_recording
from swe_env.predictions import Predictions, gold_predictions, read_predictions
from swe_env.request import RunRequest
from swe_env.rundir import RunError, RunSpec
from swe_env.sources import digest, find_tasks
from tasks.model import SwebenchTests, Task

TINY_GLM = Path(agents.__file__).parent / "tiny_glm"
"""Tokenizer of scripted policies when no model is given."""

PACKAGES = ("agents", "sandboxes", "swe_env", "tasks")


@dataclass(frozen=True)
class Plan:
    """What is to be done, checked."""

    request: RunRequest
    kind: str
    """First word of `--policy`."""
    tasks: list[Task]
    prompts: Prompts
    chat: Chat
    recording: Episode | None
    predictions: Predictions | None
    spec: RunSpec


def make_plan(request: RunRequest) -> Plan:
    """Check a request. Reads files, and hashes the model's weights; starts nothing.

    Raises `RunError`, `TaskFileError`, `PromptError` and `TokenizerError`.
    """
    tasks = find_tasks(request.tasks, request.instances, request.split)
    kind, _, argument = request.policy.partition(":")
    with_argument = kind in ("replay", "predictions")
    if kind not in ("vllm", "gold", "noop", "replay", "predictions") or with_argument != bool(argument):
        raise RunError(f"no policy {request.policy!r}: give one of {', '.join(KINDS)}")
    if kind == "vllm" and request.model is None:
        raise RunError("--policy vllm needs --model, the directory that is served at --url or is to be")
    if request.mode == "official":
        _require_swebench(tasks)
    prompts = load_prompts(request.prompts)
    chat = load_chat(
        request.model or TINY_GLM, prompts.tools, request.family, announce=prompts.announce_tools
    )
    recording = load_recording(Path(argument), chat) if kind == "replay" else None
    if recording is not None:
        tasks = [task for task in tasks if task.id == recording.task_id]
        if not tasks:
            raise RunError(
                f"{request.tasks} lacks the recording's task {recording.task_id!r}: name its --tasks"
            )
    predictions = None
    if kind == "predictions":
        predictions = gold_predictions(tasks) if argument == "gold" else read_predictions(Path(argument))
        everything = find_tasks(request.tasks, (), request.split) if request.instances else tasks
        predictions.require_known({task.id for task in everything})
        tasks = [task for task in tasks if task.id in predictions.patches]
    spec = RunSpec(
        policy=kind,
        model_sha256=model_digest(request.model) if kind == "vllm" and request.model else "",
        tasks_sha256=digest(tasks),
        repeats_sha256=predictions.sha256 if predictions else _sha256(recording) if recording else "",
        prompts_sha256=prompts.sha256,
        tokenizer_sha256=chat.tokenizer.sha256,
        budget=request.budget.model_dump(),
        sampling=request.sampling.model_dump() if kind == "vllm" else {},
        mode=request.mode,
        version=importlib.metadata.version("swe-env"),
        swebench_version=importlib.metadata.version("swebench"),
        source_sha256=source_digest(),
        asked=request.model_dump(mode="json"),
    )
    return Plan(request, kind, tasks, prompts, chat, recording, predictions, spec)


def model_digest(model: Path) -> str:
    """SHA-256 over the names and contents of a model's weight files and configuration.

    Reads all of them: some seconds a gigabyte.
    """
    return _of_files(model, sorted([*model.glob("*.safetensors"), *model.glob("*config.json")]))


def source_digest() -> str:
    """SHA-256 over this program's own files, as they are now."""
    root = Path(agents.__file__).parents[1]
    files = [file for package in PACKAGES for file in (root / package).rglob("*") if file.is_file()]
    return _of_files(root, sorted(file for file in files if "__pycache__" not in file.parts))


def _of_files(root: Path, files: list[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.relative_to(root)} {content}\n".encode())
    return whole.hexdigest()


def _sha256(episode: Episode) -> str:
    return hashlib.sha256(episode.model_dump_json().encode()).hexdigest()


def _require_swebench(tasks: list[Task]) -> None:
    for task in tasks:
        if not isinstance(task.tests, SwebenchTests):
            raise RunError(f"{task.id} is no SWE-bench instance: use --mode strict")
