"""Predictions in the official format: one JSON object an instance, `model_patch` for its patch.

A file is refused as a whole, by line and reason, before anything is graded. Bytes that are not UTF-8
travel as surrogate escapes, so that a patch read back is the patch written, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from swe_env.rundir import RunError, write_atomic
from tasks.model import Task


class Predictions(BaseModel):
    """One model's patches."""

    model_config = ConfigDict(frozen=True)

    model: str
    patches: dict[str, bytes]
    """Instance -> patch; empty bytes where the model gave none."""
    where: dict[str, str] = {}
    """Instance -> its place in the file, for error messages."""

    @property
    def sha256(self) -> str:
        """Of the model's name and all patches."""
        content = [self.model, *(f"{name} {data.hex()}" for name, data in sorted(self.patches.items()))]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()

    def require_known(self, instances: set[str]) -> None:
        """Raises :class:`RunError` for a prediction of an instance that is not asked for."""
        unknown = [name for name in self.patches if name not in instances]
        if unknown:
            raise RunError(
                f"{self.where.get(unknown[0], 'predictions')}: {unknown[0]} is not in the dataset "
                f"({len(unknown)} of {len(self.patches)} are not): name the dataset they were made for"
            )


def read_predictions(path: Path) -> Predictions:
    """Predictions from a `.jsonl` file, or a `.json` list or object. Raises :class:`RunError`."""
    entries = list(_entries(path))
    if not entries:
        raise RunError(f"{path} has no predictions: is it the right file?")
    patches: dict[str, bytes] = {}
    seen: dict[str, str] = {}
    models: dict[str, str] = {}
    for where, entry in entries:
        if not isinstance(entry, dict):
            raise RunError(f"{where}: not a JSON object: write one object a prediction")
        row = cast("dict[str, Any]", entry)
        name, model, patch = (row.get(key) for key in ("instance_id", "model_name_or_path", "model_patch"))
        if not isinstance(name, str) or not name:
            raise RunError(f"{where}: instance_id is missing: give each prediction the instance it is for")
        if not isinstance(model, str) or not model:
            raise RunError(f"{where}: model_name_or_path of {name} is missing: name who made the patch")
        if patch is not None and not isinstance(patch, str):
            kind = type(patch).__name__
            raise RunError(f'{where}: model_patch of {name} is a {kind}, not text: write "" for no patch')
        if name in patches:
            raise RunError(f"{where}: {name} was already predicted at {seen[name]}: remove one of them")
        models.setdefault(model, where)
        if len(models) > 1:
            raise RunError(f"{where}: model {model!r} after {next(iter(models))!r}: give one file a model")
        try:
            patches[name], seen[name] = _encode(patch or ""), where
        except UnicodeEncodeError:
            raise RunError(f"{where}: model_patch of {name} is not text: half a surrogate pair") from None
    return Predictions(model=next(iter(models)), patches=patches, where=seen)


def gold_predictions(tasks: Iterable[Task]) -> Predictions:
    """The reference solutions, as swebench's harness takes them with `--gold`."""
    return Predictions(model="gold", patches={task.id: _encode(task.gold_patch) for task in tasks})


def write_predictions(path: Path, model: str, patches: Mapping[str, bytes]) -> None:
    """Write the official `.jsonl`, whole or not at all."""
    lines = [
        json.dumps({"instance_id": name, "model_name_or_path": model, "model_patch": _decode(patch)})
        for name, patch in sorted(patches.items())
    ]
    write_atomic(path, "".join(line + "\n" for line in lines).encode())


def _entries(path: Path) -> Iterable[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {path}: {error}: give a .jsonl or .json file of predictions") from None
    if path.suffix == ".json":
        try:
            content: Any = json.loads(text)
        except ValueError as error:
            raise RunError(f"{path}: not JSON ({error})") from None
        if isinstance(content, dict):
            content = list(cast("dict[str, Any]", content).values())
        if not isinstance(content, list):
            raise RunError(f"{path}: neither a list nor an object of predictions")
        items = cast("list[Any]", content)
        yield from ((f"{path}: prediction {number}", item) for number, item in enumerate(items, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise RunError(f"{path}:{number}: not JSON ({error})") from None


def _encode(patch: str) -> bytes:
    return patch.encode("utf-8", "surrogateescape")


def _decode(patch: bytes) -> str:
    return patch.decode("utf-8", "surrogateescape")
