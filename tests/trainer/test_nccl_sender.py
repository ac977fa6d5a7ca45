"""Weights by vLLM's NCCL engine; for NCCL itself, which needs GPUs, stands `no_nccl`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import trio
from safetensors.torch import load_file

from agents.policy import Completion
from agents.vllm import VllmPolicy
from swe_env.probe import Mismatch, compare
from swe_env.rundir import write_atomic
from swe_env.serve import UPDATABLE
from swe_env.train_dir import StepRow, TrainDir
from swe_env.training import LoraConfig, ModelConfig, OptimiserConfig, TrainConfig
from tests.conftest import RunningModel, running
from tests.trainer.batches import training
from trainer.model import load_scorer, save_model, stored_dtype
from trainer.nccl_sender import TrainedWeights
from trainer.rl import Asked
from trainer.tiny_model import Shape, make_tiny_model

RL = "import tests.trainer.no_nccl; from trainer.rl import main; main()"


def config() -> TrainConfig:
    rollout = {"tasks": "shipped", "tasks_per_step": 2, "group_size": 2, "budget": {"context_tokens": 256}}
    return TrainConfig.model_validate(
        {
            "model": "tiny:glm",
            "steps": 2,
            "rollout": rollout,
            "optimiser": OptimiserConfig(learning_rate=1e-2),
            "trainer": {"micro_batch_tokens": 512},
            "server": {"publish": "nccl", "update_seconds": 60},
        }
    )


@contextmanager
def trainer(where: TrainDir, url: str) -> Generator[subprocess.Popen[str]]:
    file = where.path / "asked.json"
    file.write_text(Asked(config=config(), directory=where.path, server=url).model_dump_json())
    with subprocess.Popen(
        [sys.executable, "-c", RL, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.vllm
def test_a_server_has_the_weights_of_every_step_and_no_disk_has_them_all(tmp_path: Path) -> None:
    where = training(tmp_path / "run", batches=2)
    batches = [where.batch(step).read_bytes() for step in range(2)]
    for step in range(2):
        where.batch(step).unlink()

    async def asked(url: str, version: int) -> tuple[Mismatch, Completion]:
        streams, said = (json.loads(file.read_text()) for file in (where.streams, where.probe(version)))
        async with VllmPolicy.connect(url, stop_token_ids=[]) as policy:
            return await compare(policy, streams, said, limit=1e-4), await policy.complete(
                [1, 2], max_tokens=3
            )

    worker = ("--worker-extension-cls", "tests.trainer.no_nccl.Worker")
    with (
        running(where.weights(0), tmp_path / "vllm.log", [*UPDATABLE["nccl"], *worker]) as server,
        trainer(where, server.url) as process,
    ):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"ready": 0, "last": None}
        for version in range(3):
            mismatch, completion = trio.run(asked, server.url, version)
            assert mismatch.largest < 1e-4
            assert set(completion.policy_versions) == {version}
            if version < 2:
                write_atomic(where.batch(version), batches[version])
                assert StepRow.model_validate_json(process.stdout.readline()).step == version
    assert where.probe(1).read_text() != where.probe(2).read_text()
    assert where.versions() == [0, 2]


@pytest.mark.vllm
def test_a_server_that_refuses_is_quoted(tmp_path: Path, glm_server: RunningModel) -> None:
    where = training(tmp_path / "run", batches=0)
    with trainer(where, glm_server.url) as process:
        _, errors = process.communicate(timeout=50)
    assert process.returncode == 1
    assert "refused /init_weight_transfer_engine with HTTP" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("shape", "lora"), [("glm", None), ("qwen", None), ("llama", LoraConfig(rank=4, alpha=8))]
)
def test_what_is_sent_is_what_would_be_on_disk(shape: Shape, lora: LoraConfig | None, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", shape=shape)
    scorer = load_scorer(tmp_path / "model", ModelConfig(lora=lora))
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(0.01)
    (tmp_path / "saved").mkdir()
    save_model(scorer, tmp_path / "model", tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    source = TrainedWeights(scorer, stored_dtype(tmp_path / "model"))
    sent = dict(source)
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    declared = [(one.name, one.dtype, one.shape) for one in source.metadata()]
    assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()]
