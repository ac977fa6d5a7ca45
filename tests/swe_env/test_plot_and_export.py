"""What is left of a training: pictures, a page, and a model directory."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from swe_env.export import export_model
from swe_env.plot import draw_runs
from swe_env.rundir import RunError
from swe_env.train_dir import EvaluationRow, TrainDir
from tests.swe_env.test_training import step_row


def training(path: Path, solved: dict[int, float]) -> TrainDir:
    where = TrainDir(path)
    path.mkdir()
    for step in range(4):
        if step in solved:
            where.add(EvaluationRow(step=step, solved=solved[step], episodes=9, invalid=0, seconds=1.0))
        where.add(step_row(step))
    for version in (0, 2, 3, 4):
        where.weights(version).mkdir(parents=True)
        (where.weights(version) / "config.json").write_text(f'{{"version": {version}}}')
    return where


def test_curves_become_a_picture_and_a_page_without_anything_else(tmp_path: Path) -> None:
    runs = [training(tmp_path / name, {0: 0.1, 2: 0.6}).path for name in ("one", "two & <more>")]
    picture, page = draw_runs(runs, tmp_path / "out")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert height > 800
    text = page.read_text()
    assert "two &amp; &lt;more&gt;" in text
    assert "<td>0.600<td>9<td>0" in text
    assert "http" not in text


def test_a_directory_without_metrics_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no metrics.jsonl with rows: give the --out of"):
        draw_runs([tmp_path], tmp_path)


def test_the_best_version_on_held_out_tasks_is_exported(tmp_path: Path) -> None:
    where = training(tmp_path / "run", {0: 0.1, 2: 0.6, 3: 0.5})
    assert export_model(where, tmp_path / "best") == 2
    assert (tmp_path / "best" / "config.json").read_text() == '{"version": 2}'


def test_without_held_out_tasks_the_newest_version_is(tmp_path: Path) -> None:
    assert export_model(training(tmp_path / "run", {}), tmp_path / "newest") == 4


def test_a_version_that_is_not_kept_and_a_directory_that_exists_are_refused(tmp_path: Path) -> None:
    where = training(tmp_path / "run", {})
    with pytest.raises(RunError, match=r"version 1 are not kept: choose one of 0, 2, 3, 4"):
        export_model(where, tmp_path / "out", 1)
    (tmp_path / "out").mkdir()
    with pytest.raises(RunError, match="out exists"):
        export_model(where, tmp_path / "out", 2)
