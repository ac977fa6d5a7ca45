"""A task file is read whole or not at all, and says in one line where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.jsonl import TaskFileError, load_tasks, save_tasks
from tasks.model import InlineRepo, PytestTests, Task
from tasks.synthetic import generate

GOOD = generate("train", 0).model_dump(mode="json")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problem(path: Path) -> str:
    with pytest.raises(TaskFileError) as caught:
        load_tasks(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@given(st.text(min_size=1), st.text(), st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, words: str, patch: str, more: dict[str, Any]
) -> None:
    task = Task(
        id="a.b-1", source="mine", problem_statement=words, image=InlineRepo(files={"a.py": patch}),
        tests=PytestTests(files={"t.py": words}), fail_to_pass=[words], gold_patch=patch, metadata=more,
    )  # fmt: skip
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    save_tasks(path, [task])
    assert load_tasks(path) == [task]


def test_blank_lines_and_a_byte_order_mark_are_no_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(GOOD).encode() + b"\r\n\n")
    assert [task.id for task in load_tasks(path)] == [GOOD["id"]]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in problem(tmp_path / "none.jsonl")


def test_a_folder(tmp_path: Path) -> None:
    assert "cannot be read (Is a directory)" in problem(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    assert "has no tasks" in problem(path)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", GOOD)
    path.write_bytes(path.read_bytes() + b'{"id": "\xff"}\n')
    assert f"{path}:2: byte 9 of the line is not UTF-8" in problem(path)


@pytest.mark.parametrize("line", ["{", "id: 1", "[" * 100_000])
def test_a_line_that_is_not_json(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    assert f"{path}:3: " in problem(path)


def test_a_line_that_is_not_an_object(tmp_path: Path) -> None:
    assert ":1: a list, not an object" in problem(write(tmp_path / "tasks.jsonl", [GOOD]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": "x"}, "field 'problem' is unknown: remove it"),
        ({"problem_statement": None}, "field 'problem_statement' is wrong: Input should be a valid string"),
        ({"fail_to_pass": []}, "field 'fail_to_pass' is wrong: List should have at least 1 item"),
        ({"id": "../x"}, "field 'id' is wrong"),
        ({"image": {"kind": "files"}}, "field 'image.files.files' is missing: add it"),
        ({"pass_to_pass": GOOD["fail_to_pass"]}, "is in both fail_to_pass and pass_to_pass"),
        ({"workdir": "testbed"}, "workdir 'testbed' is not absolute"),
    ],
)
def test_a_wrong_field(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    message = problem(write(tmp_path / "tasks.jsonl", GOOD, GOOD | {"id": "other"} | change))
    assert f":2: {words}" in message or words in message


def test_a_missing_field(tmp_path: Path) -> None:
    row = {key: value for key, value in GOOD.items() if key != "gold_patch"}
    assert ":1: field 'gold_patch' is missing: add it" in problem(write(tmp_path / "tasks.jsonl", row))


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    message = problem(write(tmp_path / "tasks.jsonl", GOOD, GOOD | {"id": "b"}, GOOD))
    assert f":3: id {GOOD['id']!r} is already on line 1" in message


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="cannot be written"):
        save_tasks(tmp_path / "no" / "tasks.jsonl", [generate("train", 0)])
