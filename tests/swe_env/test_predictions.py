"""Predictions are read whole or refused by line, and written so that they read back byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe_env.predictions import read_predictions, write_predictions
from swe_env.rundir import RunError

ONE = {"instance_id": "a__b-1", "model_name_or_path": "m", "model_patch": "diff"}


def write(folder: Path, content: Any, name: str = "p.jsonl") -> Path:
    path = folder / name
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in content) if name.endswith("l") else json.dumps(content)
    )
    return path


@pytest.mark.parametrize(
    ("content", "name"),
    [([ONE], "p.jsonl"), ([ONE], "p.json"), ({"a__b-1": ONE}, "p.json")],
    ids=["lines", "list", "object"],
)
def test_every_official_form_is_read(tmp_path: Path, content: Any, name: str) -> None:
    found = read_predictions(write(tmp_path, content, name))
    assert (found.model, found.patches) == ("m", {"a__b-1": b"diff"})


def test_a_null_patch_is_an_empty_one_as_the_harness_has_it(tmp_path: Path) -> None:
    assert read_predictions(write(tmp_path, [ONE | {"model_patch": None}])).patches == {"a__b-1": b""}


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (ONE, "p.jsonl:2: a__b-1 was already predicted at"),
        (ONE | {"instance_id": "x", "model_patch": 3}, "p.jsonl:2: model_patch of x is a int"),
        (ONE | {"instance_id": None}, "p.jsonl:2: instance_id is missing"),
        (
            ONE | {"instance_id": "x", "model_name_or_path": ""},
            "p.jsonl:2: model_name_or_path of x is missing",
        ),
        (ONE | {"instance_id": "x", "model_name_or_path": "n"}, "p.jsonl:2: model 'n' after 'm'"),
        ([1], "p.jsonl:2: not a JSON object"),
    ],
)
def test_a_bad_prediction_is_refused_by_line_and_reason(tmp_path: Path, second: Any, says: str) -> None:
    with pytest.raises(RunError) as caught:
        read_predictions(write(tmp_path, [ONE, second]))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "\n\n", "\x80"])
def test_a_file_that_is_no_predictions_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=r"p\.jsonl"):
        read_predictions(path)


def test_a_prediction_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"p\.jsonl:1: a__b-1 is not in the dataset \(1 of 1"):
        read_predictions(write(tmp_path, [ONE])).require_known({"c__d-2"})


@given(st.dictionaries(st.from_regex(r"[a-z]{1,9}", fullmatch=True), st.binary(max_size=200), min_size=1))
def test_what_is_written_is_read_back_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, patches: dict[str, bytes]
) -> None:
    path = tmp_path_factory.mktemp("predictions") / "p.jsonl"
    write_predictions(path, "m", patches)
    assert read_predictions(path).patches == patches
