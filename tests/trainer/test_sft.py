"""`swe-env sft`: episodes of any run become weights; an interrupted training leaves nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trio
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from swe_env import sft
from swe_env.rundir import RunDir, RunError
from swe_env.sft import Progress, SftConfig, read_config
from tests.trainer.gold import FUNCTIONS, gold_run
from trainer.model import ModelConfig, load_scorer
from trainer.packing import micro_batch
from trainer.sft import chosen, demonstrations, plan_steps, train


@pytest.fixture(scope="module")
def run(tiny_glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gold_run(tmp_path_factory.mktemp("runs") / "gold", tiny_glm)


def command(run: Path, model: Path, out: Path, *more: str) -> list[str]:
    program = [sys.executable, "-m", "swe_env", "sft", "--learning-rate", "3e-3", "--batch-tokens", "1200"]
    return [*program, "--episodes", str(run), "--model", str(model), "--out", str(out), *more]


def test_a_model_learns_what_the_chosen_episodes_did(run: Path, tiny_glm: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "model"
    argv = command(run, tiny_glm, out, "--where", "reward == 1", "--epochs", "10", "--other-weight", "0.1")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert str(out) in done.stdout
    lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [Progress.model_validate_json(line) for line in lines]
    assert [step.step for step in steps] == list(range(20))
    assert steps[0].steps == 20
    assert not any(step.skipped for step in steps)
    assert steps[-1].action_nll < 0.2 * steps[0].action_nll

    # the model that was saved is the model that was trained, and it tells what it learnt from what it did not
    nll = {reward: action_nll(out, run, f"reward == {reward}") for reward in (0, 1)}
    assert nll[1] < steps[-1].action_nll + 0.05
    assert nll[1] < nll[0]
    # vLLM's names, and all that makes a model directory
    names = [set(safe_open(one / "model.safetensors", "pt").keys()) for one in (tiny_glm, out)]
    assert names[0] == names[1]
    assert any("experts.3.up_proj" in name for name in names[1])
    assert (
        AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(tiny_glm).get_vocab()
    )
    assert {one.name for one in out.iterdir()} == {one.name for one in tiny_glm.iterdir()} | {"metrics.jsonl"}
    assert [one.name for one in out.parent.iterdir()] == ["model"]


def action_nll(model: Path, run: Path, where: str) -> float:
    """Of transformers' own model on whole episodes, one by one."""
    found = demonstrations(chosen(SftConfig(episodes=run, where=where, model=model, out=model)))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    scores: list[torch.Tensor] = []
    for stream in found:
        batch = micro_batch([stream])
        with torch.no_grad():
            every = torch.log_softmax(loaded(input_ids=batch.token_ids[None]).logits[0].float(), -1)
        own = every[:-1].gather(1, batch.token_ids[1:, None])[:, 0][batch.is_action[1:]]
        with torch.no_grad():
            ours = load_scorer(model, ModelConfig())(batch).logprobs
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-4)
        scores.append(own)
    return float(-torch.cat(scores).mean())


def test_ctrl_c_leaves_neither_files_nor_processes(run: Path, tiny_glm: Path, tmp_path: Path) -> None:
    argv = command(run, tiny_glm, tmp_path / "out", "--epochs", "10000")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                break
        assert (tmp_path / ".out.draft" / "metrics.jsonl").exists()
        [child] = children(process.pid)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "stopping: nothing is written" in rest
    assert "Traceback" not in rest
    assert not list(tmp_path.iterdir())
    assert not Path(f"/proc/{child}").exists()


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_what_cannot_be_trained_is_refused_before_torch_is_loaded(
    run: Path, tiny_glm: Path, tmp_path: Path
) -> None:
    good: dict[str, object] = {"episodes": run, "model": tiny_glm, "out": tmp_path / "out"}
    read_config(good)
    for change, says in {
        "model": "has no config.json: give the directory of a model",
        "episodes": "is not a run directory",
        "out": "exists: choose another --out",
    }.items():
        with pytest.raises(RunError, match=says):
            read_config({**good, change: tmp_path})
    with pytest.raises(RunError, match="there is no field 'rewards'"):
        read_config({**good, "where": "rewards == 1"})
    with pytest.raises(RunError, match="^--epochs: input should be greater than or equal to 1"):
        read_config({**good, "epochs": 0})


def test_episodes_that_do_not_fit_are_refused_by_name(run: Path, tiny_models: Path, tmp_path: Path) -> None:
    def refused(**change: object) -> str:
        asked: dict[str, object] = {"episodes": run, "model": tiny_models / "glm", "out": tmp_path / "out"}
        with pytest.raises((RunError, ValueError)) as error:
            train(SftConfig.model_validate(asked | change), lambda _: None)
        assert not list(tmp_path.glob(".*"))
        return str(error.value)

    assert "has 8 episodes and none with turns > 9" in refused(where="turns > 9")
    assert "was played with another tokenizer" in refused(model=tiny_models / "llama")
    assert re.search(r"segment 0 has 5\d\d tokens, more than", refused(batch_tokens=300))


@pytest.mark.parametrize(
    ("dies", "says"),
    [
        (
            "echo a warning >&2; echo; echo 'no episodes: choose others' >&2; exit 1",
            "no episodes: choose others",
        ),
        ("kill -9 $$", "most likely for want of memory: lower micro_batch_tokens"),
        ("exit 3", "ended with exit code 3 and no word"),
    ],
)
def test_why_training_failed_is_said_in_one_line(
    run: Path, tiny_glm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str, says: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{dies}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    config = SftConfig(episodes=run, model=tiny_glm, out=tmp_path / "out")
    with pytest.raises(RunError, match=says) as error:
        trio.run(sft.train, config, lambda _: None)
    assert "\n" not in str(error.value)


def test_every_epoch_takes_every_stream_once_in_an_order_of_its_own() -> None:
    lengths = [5, 9, 3, 7, 30, 2, 8]
    steps = plan_steps(lengths, batch_tokens=20, epochs=3, seed=0)
    orders: list[list[int]] = []
    for epoch in range(3):
        batches = [batch for number, batch in steps if number == epoch]
        orders.append([index for batch in batches for index in batch])
        assert sorted(orders[-1]) == list(range(7))
        assert all(sum(lengths[index] for index in batch) <= 20 for batch in batches if batch != [4])
    assert len({tuple(order) for order in orders}) == 3
    assert steps == plan_steps(lengths, batch_tokens=20, epochs=3, seed=0)
    assert steps != plan_steps(lengths, batch_tokens=20, epochs=3, seed=1)


def test_a_condition_chooses_episodes(run: Path, tiny_glm: Path, tmp_path: Path) -> None:
    config = SftConfig(episodes=run, where="reward == 1", model=tiny_glm, out=tmp_path / "out")
    assert {episode.task_id for episode in chosen(config)} == set(FUNCTIONS)
    assert len(chosen(config)) == len(RunDir(run).episodes()) / 2
