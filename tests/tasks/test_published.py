"""Rows come from wherever the dataset is: a name, a file, a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from tasks.jsonl import TaskFileError
from tasks.published import load_rows
from tasks.swebench import load_swebench
from tests.tasks.test_swebench import ROW

TASKS = load_swebench([ROW])


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    return datasets.Dataset.from_list([ROW])


@pytest.mark.parametrize(
    "form", ["file.parquet", "test.parquet", "data/test-00000-of-00001.parquet", "disk", "disk/test"]
)
def test_a_dataset_on_disk_gives_the_same_tasks(tmp_path: Path, stored: Any, form: str) -> None:
    target = tmp_path / form
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix:
        stored.to_parquet(str(target))
    else:
        stored.save_to_disk(str(target))
    name = target if form == "file.parquet" else tmp_path / "disk" if "disk" in form else tmp_path
    again = load_swebench(load_rows(str(name)))
    assert [task.model_dump(exclude={"metadata"}) for task in again] == [
        task.model_dump(exclude={"metadata"}) for task in TASKS
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("verifed", "verified, lite, full, multilingual"),
        ("absent.parquet", "there is no such file"),
        ("/nowhere/at/all", "verified, lite, full, multilingual"),
    ],
)
def test_what_is_no_dataset_is_said_with_what_is(name: str, says: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        load_rows(name)
    assert says in str(caught.value)


def test_a_directory_without_the_split_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"has no split 'dev': expected dev\.parquet"):
        load_rows(str(tmp_path), "dev")


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(TaskFileError, match=r"rows\.parquet: cannot be read as parquet") as caught:
        load_rows(str(tmp_path / "rows.parquet"))
    assert "\n" not in str(caught.value)
