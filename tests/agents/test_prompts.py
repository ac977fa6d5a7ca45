"""Prompt sets by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.prompts import load_prompts


def test_a_directory_of_a_shipped_sets_name_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = load_prompts("tiny")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_prompts("tiny") == shipped


def test_any_directory_with_the_files_is_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    for file in (Path(__file__).parents[2] / "agents" / "prompts" / "tiny").iterdir():
        (tmp_path / "mine" / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path / "mine")
    assert load_prompts(".").system == load_prompts("tiny").system
