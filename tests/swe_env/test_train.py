"""A whole training at its smallest: a served policy, real sandboxes, a trainer, new weights in the server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swe_env.rundir import RunDir
from swe_env.train_dir import EvaluationRow, StepRow, TrainDir
from tests.sandboxes.conftest import REPOSITORY
from tests.swe_env.trainings import BUDGET, untaught

pytestmark = [pytest.mark.docker, pytest.mark.vllm]

ASKED = f"""
model = "tiny:glm"
prompts = "tiny"
steps = 2
[cold_start]
tasks = "synthetic:train:6"
epochs = 6
learning_rate = 2e-3
batch_tokens = 2048
other_weight = 0.1
[rollout]
tasks = "synthetic:train:6"
tasks_per_step = 2
group_size = 3
concurrency = 6
replace_without_spread = false
{BUDGET}
[trainer]
checkpoint_every = 1
[evaluation]
tasks = "synthetic:heldout:2"
every = 1
"""


def start(*asked: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "swe_env", "train", *asked]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)


def processes_of(out: Path) -> list[str]:
    """Command lines, of whatever process, that name the directory."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(out) in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "train.toml"
    file.write_text(ASKED)
    return file


def test_interrupted_in_the_middle_and_asked_again_a_training_is_whole(
    base_image: str, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    where = TrainDir(out)
    process = start(str(config), "--out", str(out))
    assert process.stdout is not None
    said = ""
    while "step 1 of 2" not in said:  # the second step is being played
        line = process.stdout.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    rest, _ = process.communicate(timeout=60)
    assert "the same command goes on from here" in rest
    assert time.monotonic() - began < 20
    assert process.returncode == 130
    assert not processes_of(out)

    again = start("--resume", str(out))
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert "environment" in said  # where the time went
    assert not processes_of(out)
    rows = where.rows()
    assert [row.step for row in rows if isinstance(row, StepRow)] == [0, 1]
    assert [row.step for row in rows if isinstance(row, EvaluationRow)] == [0, 1, 2]
    for row in rows:
        assert row.episodes == (6 if isinstance(row, StepRow) else 2)
        assert row.invalid == 0
    # every publication was compared with the trainer, and float32 is float32
    assert all(0 < row.mismatch_max < 1e-4 for row in rows if isinstance(row, StepRow))
    versions = [
        {version for segment in episode.segments for version in segment.policy_versions} - {None}
        for step in (0, 1)
        for group in where.read_batch(step).groups
        for episode in where.group(group).episodes()
    ]
    assert versions == [{0}] * 6 + [{1}] * 6
    for version in (0, 1, 2):
        for episode in RunDir(where.evaluation(version).path).episodes():
            assert {v for segment in episode.segments for v in segment.policy_versions} == {None, version}
    assert where.versions() == [0, 1, 2]
    assert json.loads((where.weights(2) / "config.json").read_text())["model_type"] == "glm4_moe"


def test_killed_while_it_plays_ahead_and_asked_again_nothing_is_lost_or_taken_twice(
    base_image: str, tmp_path: Path
) -> None:
    config, out = tmp_path / "train.toml", tmp_path / "run"
    niced = '{ launcher = ["nice", "-n", "1"], environment = { PYTHONDONTWRITEBYTECODE = "1" } }'
    config.write_text(untaught(steps=4, workers=f"[{{}}, {niced}]"))
    where = TrainDir(out)
    process = start(str(config), "--out", str(out))
    assert process.stdout is not None
    said = ""
    while "step 2 of 4" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    process.kill()
    process.wait()
    began = time.monotonic()
    while processes_of(out):  # the server and the trainer notice
        assert time.monotonic() - began < 20, processes_of(out)
        time.sleep(0.1)
    before = {path: path.stat().st_mtime_ns for path in out.glob("rollouts/*/episodes/[!.]*/episode.json")}
    batches = {path: path.read_bytes() for path in out.glob("batches/*.json")}

    again = start(str(config), "--out", str(out))
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert {path: path.stat().st_mtime_ns for path in before} == before  # none was played again
    assert {path: path.read_bytes() for path in batches} == batches
    assert [row.step for row in where.rows()] == [0, 1, 2, 3]
    assert where.versions()[-1] == 4

    taken = [where.read_batch(step) for step in range(4)]
    trained = [group for batch in taken for group in batch.groups]
    dropped = [group for batch in taken for group in batch.dropped]
    left = where.groups().begun
    assert sorted([*trained, *dropped, *left]) == list(range(where.groups().next))  # each of them once
    ahead = 0
    for batch in taken:
        for group in batch.groups:
            episodes = where.group(group).episodes()
            assert len(episodes) == 2
            tokens = [
                v for episode in episodes for segment in episode.segments for v in segment.policy_versions
            ]
            versions = [version for version in tokens if version is not None]
            assert all(batch.step - 2 <= version <= batch.step for version in versions)
            ahead += min(versions) < batch.step
    assert ahead > 0  # some were played before the step before theirs was learnt


def test_killed_between_a_checkpoint_and_the_row_of_its_step_the_row_is_not_lost(
    base_image: str, tmp_path: Path
) -> None:
    config, out = tmp_path / "train.toml", tmp_path / "run"
    config.write_text(untaught(steps=2))
    where = TrainDir(out)
    said, _ = start(str(config), "--out", str(out)).communicate(timeout=300)
    rows = where.rows()
    assert [row.step for row in rows] == [0, 1], said
    where.metrics.write_text(rows[0].model_dump_json() + "\n")  # as when the second was not written yet
    said, _ = start(str(config), "--out", str(out)).communicate(timeout=300)
    again = where.rows()
    assert [row.step for row in again] == [0, 1], said
    of_server = {"mismatch", "mismatch_max", "publish_seconds"}  # measured again
    assert again[1].model_dump(exclude=of_server) == rows[1].model_dump(exclude=of_server)
