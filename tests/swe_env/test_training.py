"""What a training can be asked for, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swe_env.rundir import RunError
from swe_env.train import describe
from swe_env.train_dir import EvaluationRow, StepRow, TrainDir
from swe_env.train_plan import make_train_plan, task_of
from swe_env.training import IcePop, Ipo, TrainConfig, read_training
from tests.swe_env.trainings import SMALL

CONFIGS = Path(__file__).parents[2] / "configs"
COLD = """
[cold_start]
tasks = "synthetic:train:8"
noop = 0.25
"""


def read(tmp_path: Path, text: str, **options: Any) -> TrainConfig:
    file = tmp_path / "train.toml"
    file.write_text(text)
    return read_training(file, options)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_the_shipped_configurations_are_valid(file: Path) -> None:
    assert read_training(file).loss.kind == "ipo"


def test_a_file_may_change_another_and_settings_change_both(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(SMALL + COLD + "[loss]\nkind = 'ipo'\nepsilon = 0.2\n")
    text = "extends = 'base.toml'\nsteps = 5\ncold_start = false\n[loss]\nkl_tau = 0.1\n"
    text += "[rollout]\ngroup_size = 3\n"
    asked = read(tmp_path, text)
    assert (asked.steps, asked.rollout.group_size, asked.rollout.tasks_per_step) == (5, 3, 3)
    assert asked.loss == Ipo(epsilon=0.2, kl_tau=0.1)
    assert asked.cold_start is None
    settings = ["loss.kind=icepop", "rollout.group_size=4", "server.arguments=['--max-num-seqs', '8']"]
    asked = read_training(tmp_path / "train.toml", {}, settings)
    assert (asked.loss, asked.rollout.group_size, asked.steps) == (IcePop(), 4, 5)
    assert asked.server.arguments == ["--max-num-seqs", "8"]


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("extends = 'train.toml'", [], "extends: give the name of another file beside it"),
        ("extends = 'other.toml'", [], "cannot read .*other.toml"),
        (SMALL, ["steps"], "--set steps: no value: give one like loss.kind=ipo"),
        (SMALL, ["lr=1"], "lr: extra inputs are not permitted"),
    ],
)
def test_what_extends_nothing_or_sets_nothing_is_refused(
    tmp_path: Path, text: str, settings: list[str], message: str
) -> None:
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(RunError, match=message):
        read_training(tmp_path / "train.toml", {}, settings)


def test_options_go_over_the_file(tmp_path: Path) -> None:
    asked = read(tmp_path, SMALL + '[loss]\nkind = "icepop"\nalpha = 0.5\n', steps=9, seed=None)
    assert (asked.steps, asked.seed, asked.loss) == (9, 0, IcePop(alpha=0.5))
    assert asked.schedule.total_steps == 9


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("steps = 4", "rollout.steps: extra inputs are not permitted"),
        ("[loss]\nkind = 'ppo'", "loss: .*'ppo'"),
        ("[loss]\nkind = 'ipo'\nalpha = 1", "loss.alpha: extra inputs are not permitted"),
        ("[loss]\nkind = 'ipo'\nepsilon = 2", "loss.epsilon: input should be less than or equal to 1"),
        ("[rollout.sampling]\ntemperature = 0", "greedy tokens have no probabilities to train on"),
        ("[trainer]\nmicro_batch_tokens = 100", "trainer.micro_batch_tokens.: raise the one or lower"),
        ("[optimiser]\ntotal_steps = 7", "optimiser.total_steps is not steps: leave it out"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        read(tmp_path, SMALL + more)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tasks_per_step = 3", "tasks_per_step = 11", "has 10 tasks: give more, or take fewer"),
        ("tiny:glm", "tiny:gpt", "no tiny model of shape 'gpt'"),
        ("tiny:glm", "no/such", "no/such has no config.json"),
        (
            "[rollout]",
            "[evaluation]\ntasks = 'synthetic:train:5'\nevery = 1\n[rollout]",
            "is trained on and held out: choose other evaluation.tasks",
        ),
        (
            "[rollout]",
            "[server]\npublish = 'nccl'\n[rollout]",
            "server.publish is nccl, and this vLLM is the CPU's",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        make_train_plan(read(tmp_path, SMALL.replace(old, new)))


def test_a_share_of_the_demonstrations_is_by_somebody_who_submits_at_once(tmp_path: Path) -> None:
    plan = make_train_plan(read(tmp_path, SMALL + COLD))
    ids = {kind: {task.id for task in tasks} for kind, tasks in plan.demonstrated.items()}
    assert {kind: len(of) for kind, of in ids.items()} == {"gold": 6, "noop": 2}
    assert not ids["gold"] & ids["noop"]
    again = make_train_plan(read(tmp_path, SMALL + COLD))
    assert again.demonstrated == plan.demonstrated


def test_each_round_takes_every_task_once_in_an_order_of_the_seed(tmp_path: Path) -> None:
    plan = make_train_plan(read(tmp_path, SMALL))
    groups = [plan.tasks[task_of(group, plan)].id for group in range(20)]
    assert len(set(groups[:10])) == len(set(groups[10:])) == 10
    assert groups[:10] != groups[10:]
    other = make_train_plan(read(tmp_path, SMALL, seed=1))
    assert groups != [other.tasks[task_of(group, other)].id for group in range(20)]


def test_a_dry_run_says_what_would_be_started_and_starts_nothing(tmp_path: Path) -> None:
    lines = describe(read(tmp_path, SMALL), tmp_path / "run")
    said = dict(line.split(": ", 1) for line in lines)
    assert said["cold start"] == "none"
    assert f"serve {tmp_path}/run/weights/step-0 " in said["server 0"]
    assert said["trainer, 1 ranks"].endswith(f"-m trainer.rl {tmp_path}/run/trainer.json")
    assert not (tmp_path / "run").exists()


def step_row(step: int) -> StepRow:
    zero = dict.fromkeys(("reward", "turns", "loss", "action_nll", "grad_norm", "learning_rate"), 0.0)
    count = dict.fromkeys(("episodes", "invalid", "groups", "without_spread", "tokens", "action_tokens"), 0)
    return StepRow.model_validate({"step": step, "skipped": False, "train_seconds": 1.0, **zero, **count})


def test_a_row_that_was_cut_off_is_dropped_and_written_again(tmp_path: Path) -> None:
    where = TrainDir(tmp_path)
    rows = [step_row(0), EvaluationRow(step=1, solved=0.5, episodes=2, invalid=0, seconds=1.0)]
    for row in rows:
        where.add(row)
    with where.metrics.open("a") as file:
        file.write(step_row(1).model_dump_json()[:40])
    assert where.rows() == rows
    where.add(step_row(1))
    assert where.rows() == [*rows, step_row(1)]


def test_a_directory_is_gone_on_in_only_by_the_same_training(tmp_path: Path) -> None:
    where = TrainDir(tmp_path / "run")
    where.begin(read(tmp_path, SMALL))
    where.begin(read(tmp_path, SMALL))
    with pytest.raises(RunError, match=r"was begun with steps = 4, not 5: choose another --out"):
        where.begin(read(tmp_path, SMALL, steps=5))
    assert json.loads((where.path / "train.json").read_text())["steps"] == 4


def test_weights_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    where = TrainDir(tmp_path)
    for version in range(5):
        where.weights(version).mkdir(parents=True)
    where.remove_weights(below=4, but={0, 3})
    assert where.versions() == [0, 3, 4]
    assert not list(where.weights(0).parent.glob(".*"))
