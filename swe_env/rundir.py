"""The run directory: what a run has done, on disk, at every instant.

    runs/x/run.json                       what was asked for; a second call must ask for the same
    runs/x/episodes/ID/episode.json       one directory an episode, appearing by rename, whole or not at all
                      /patch.diff         the patch, as bytes
                      /test_output.txt    what the hidden tests printed
    runs/x/report.html                    for a browser, written at the end

A killed run leaves at most a directory whose name begins with a dot; the next run removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from swe_env.episode import Episode


class RunError(Exception):
    """A run cannot start or go on. One line: cause, then cure."""


class RunSpec(BaseModel):
    """What makes two runs the same experiment. Written before the first episode."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str
    """First word of `--policy`; `repeats_sha256` says what a replay or predictions hold."""
    model_sha256: str = ""
    """Of the weights and the configuration of the model that plays; empty for scripted policies."""
    tasks_sha256: str
    repeats_sha256: str = ""
    prompts_sha256: str
    tokenizer_sha256: str
    budget: dict[str, Any]
    sampling: dict[str, Any] = {}
    mode: str = "strict"
    version: str
    swebench_version: str = ""
    source_sha256: str = ""
    """Of this program's own files. A run goes on after they changed; :mod:`swe_env.reproduce` says so."""
    served: dict[str, Any] = {}
    """vLLM's version and the longest stream [tokens]: known once the server answers, empty before."""
    asked: dict[str, Any] = {}
    """The request, to make it again. Not compared: the same experiment can be asked for in several ways."""

    def differences(
        self, other: RunSpec, ignoring: Collection[str] = ("source_sha256",)
    ) -> dict[str, tuple[str, str]]:
        """Field -> its values in this and in the other experiment, where they differ."""
        found: dict[str, tuple[str, str]] = {}
        for name in RunSpec.model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name in ("asked", *ignoring) or (name == "served" and not (mine and theirs)):
                continue
            if mine != theirs:
                found[name] = json.dumps(mine), json.dumps(theirs)
        return found


class RunDir:
    """Reads and writes one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.episodes_path = path / "episodes"

    def begin(self, spec: RunSpec) -> None:
        """Make the directory, or check that it is this experiment's; again when more of it is known.

        Raises :class:`RunError`.
        """
        file = self.path / "run.json"
        try:
            self.episodes_path.mkdir(parents=True, exist_ok=True)
            for leftover in self.episodes_path.glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not any(self.episodes_path.iterdir()):
                write_atomic(file, spec.model_dump_json(indent=1).encode())
            elif file.exists():
                _same(RunSpec.model_validate_json(file.read_text()), spec, self.path)
            else:
                raise RunError(f"{self.path} holds episodes but no run.json: choose another --out")
        except (OSError, ValidationError) as error:
            raise RunError(f"cannot use {self.path} as a run directory: {_first_line(error)}") from None

    @contextmanager
    def locked(self) -> Generator[None]:
        """This process alone writes here while the block runs. Raises :class:`RunError` if another does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / ".lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield
        except BlockingIOError:
            raise RunError(
                f"another process is at work in {self.path}: wait, or choose another --out"
            ) from None

    def save(self, episode: Episode) -> Path:
        """Keep an episode, in place of one that infrastructure ended. Raises :class:`RunError`."""
        final = self.episodes_path / episode.id
        draft, old = (self.episodes_path / f".{episode.id}.{uuid.uuid4().hex[:8]}" for _ in "12")
        try:
            draft.mkdir()
            (draft / "patch.diff").write_bytes(episode.patch)
            if episode.grade is not None:
                (draft / "test_output.txt").write_bytes(episode.grade.log)
            write_atomic(draft / "episode.json", episode.model_dump_json().encode())
            if final.exists():
                final.rename(old)
            draft.rename(final)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise RunError(
                f"cannot write to {self.episodes_path}: {error.strerror}; "
                "free some space and run the same command again: finished episodes are kept"
            ) from None
        shutil.rmtree(old, ignore_errors=True)
        return final

    def log(self, episode_id: str) -> bytes:
        """What an episode's hidden tests printed; b"" if they did not run."""
        file = self.episodes_path / episode_id / "test_output.txt"
        return file.read_bytes() if file.exists() else b""

    def finished(self, among: Collection[str] | None = None) -> set[str]:
        """Ids of the episodes (of these, or of all) that need not be run again."""
        return {episode.id for episode in self.episodes(among) if not episode.end.is_infrastructure}

    def episodes(self, among: Collection[str] | None = None) -> list[Episode]:
        """All episodes kept (or those of these ids), by id. Raises `RunError` for an unreadable one."""
        found: list[Episode] = []
        every = self.episodes_path.glob("[!.]*") if among is None else map(self.episodes_path.joinpath, among)
        for directory in sorted(path for path in every if path.exists()):
            try:
                episode = Episode.model_validate_json((directory / "episode.json").read_bytes())
                found.append(episode.model_copy(update={"patch": (directory / "patch.diff").read_bytes()}))
            except (OSError, ValidationError) as error:
                raise RunError(f"{directory} is not an episode ({_first_line(error)}): remove it") from None
        return found


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power cut."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def appearing(path: Path) -> Generator[Path]:
    """A directory that is there whole or not at all: the block fills a draft, its end renames it to `path`.

    The draft's name begins with a dot. A block that raises leaves nothing; a killed process leaves the
    draft, which the next call for the same `path` removes. One process at a time may call it for a `path`.
    Raises FileExistsError for a `path` that exists.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists: choose another directory, or remove it")
    draft = draft_of(path)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        for file in draft.rglob("*"):
            if file.is_file():
                _sync(file)
        draft.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def draft_of(path: Path) -> Path:
    """Where :func:`appearing` fills what is to be `path`."""
    return path.with_name(f".{path.name}.draft")


def _sync(path: Path) -> None:
    """To disk, so that it is there after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _same(before: RunSpec, now: RunSpec, path: Path) -> None:
    for name, (old, new) in before.differences(now).items():
        raise RunError(f"{path} was made with {name} = {old}, not {new}: choose another --out")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
