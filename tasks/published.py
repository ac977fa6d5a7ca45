"""SWE-bench rows by the name of a published set, from a file, or from a directory on this machine.

Everything but JSON is read by the `datasets` library. A set that is on disk needs no network; one that is
not is looked up on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from tasks.jsonl import TaskFileError

SETS = {
    "verified": "SWE-bench/SWE-bench_Verified",
    "lite": "SWE-bench/SWE-bench_Lite",
    "full": "SWE-bench/SWE-bench",
    "multilingual": "SWE-bench/SWE-bench_Multilingual",
}
"""Short name -> hub id."""


def load_rows(name: str, split: str = "test") -> Path | list[Mapping[str, Any]]:
    """The rows of a set, or the path of a JSON file for :func:`~tasks.swebench.load_swebench` to read.

    `name`: a key of :data:`SETS`, a hub id, a `.jsonl`, `.json`, `.parquet` or `.arrow` file, or a directory
    with `SPLIT.parquet`, `data/SPLIT-*.parquet` or a dataset saved to disk. Raises :class:`TaskFileError`.
    """
    path = Path(name)
    if path.suffix in (".jsonl", ".json"):
        return path
    if path.suffix in (".parquet", ".arrow"):
        if not path.is_file():
            raise TaskFileError(f"{path}: there is no such file: check the path")
        return _read(path.suffix[1:], [path])
    if path.is_dir():
        return _from_directory(path, split)
    hub_id = SETS.get(name.lower(), name)
    if hub_id.count("/") != 1 or hub_id.startswith(("/", ".")):
        raise TaskFileError(
            f"no dataset {name!r}: give {', '.join(SETS)}, OWNER/NAME on the hub, a file or a directory"
        )
    return _from_hub(hub_id, split)


def _from_directory(path: Path, split: str) -> list[Mapping[str, Any]]:
    import datasets

    parquet = [path / f"{split}.parquet", *sorted((path / "data").glob(f"{split}-*.parquet"))]
    if found := [file for file in parquet if file.is_file()]:
        return _read("parquet", found)
    for saved in (path / split, path):
        if (saved / "dataset_info.json").is_file():
            try:
                return _rows(cast(Any, datasets).load_from_disk(str(saved)))
            except Exception as error:  # whatever a damaged file makes the library raise
                raise TaskFileError(f"{saved}: is no dataset saved to disk ({_line(error)})") from None
    raise TaskFileError(
        f"{path}: has no split {split!r}: expected {split}.parquet or a dataset saved to disk"
    )


def _from_hub(hub_id: str, split: str) -> list[Mapping[str, Any]]:
    import datasets

    try:
        return _rows(cast(Any, datasets).load_dataset(hub_id, split=split))
    except Exception as error:  # the library lets through what its HTTP client, cache and parsers raise
        raise TaskFileError(
            f"cannot have {hub_id}, split {split!r} ({_line(error)}): check name and split; "
            "without a network, download it elsewhere and give the directory"
        ) from None


def _read(kind: str, files: list[Path]) -> list[Mapping[str, Any]]:
    import datasets

    try:
        names = [str(file) for file in files]
        return _rows(cast(Any, datasets).load_dataset(kind, data_files=names, split="train"))
    except Exception as error:
        raise TaskFileError(f"{files[0]}: cannot be read as {kind} ({_line(error)})") from None


def _rows(dataset: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list(dataset)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
