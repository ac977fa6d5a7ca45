"""New weights in a running vLLM server: it samples from them, and only from them, or says that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
import trio

from agents.policy import Completion
from agents.vllm import VllmPolicy
from agents.weights import UpdateFailed, update_weights
from swe_env.probe import Mismatch, compare
from swe_env.rundir import RunError
from swe_env.serve import UPDATABLE
from swe_env.training import ModelConfig
from tests.conftest import CONTEXT, RunningModel, running
from trainer.model import load_scorer
from trainer.packing import Stream, micro_batch
from trainer.tiny_model import Shape, make_tiny_model

pytestmark = pytest.mark.vllm

FLOAT32 = 1e-4
"""Largest difference between trainer and server, same weights [nats]."""
STREAMS = [list(range(20, 90)), [5, 6, 7, 8] * 12]


@pytest.fixture(scope="module", params=["glm", "qwen"])
def server(
    request: pytest.FixtureRequest, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningModel]:
    """Experts, and an embedding that is the head as well: what a reload of vLLM's own gets wrong on CPU."""
    model = tiny_models / request.param
    with running(model, tmp_path_factory.mktemp("vllm") / "server.log", UPDATABLE["disk"]) as started:
        yield RunningModel(started.url, model, CONTEXT)


@pytest.fixture(scope="module")
def other(server: RunningModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    out = tmp_path_factory.mktemp("other") / server.model_dir.name
    shape: Shape = "glm" if server.model_dir.name == "glm" else "qwen"
    make_tiny_model(out, shape=shape, seed=7)
    return out


def said_by_trainer(model: Path, streams: list[list[int]]) -> list[list[float]]:
    """What the trainer makes of every token but the first."""
    scorer, found = load_scorer(model, ModelConfig()), list[list[float]]()
    for ids in streams:
        rest = len(ids) - 1
        stream = Stream(ids, [False] + [True] * rest, [0.0] * (rest + 1), [0] * (rest + 1), 0.0, "probe")
        with torch.no_grad():
            found.append(scorer(micro_batch([stream])).logprobs.tolist())
    return found


def compared(server: RunningModel, model: Path, limit: float) -> Mismatch:
    async def ask() -> Mismatch:
        async with VllmPolicy.connect(server.url, stop_token_ids=[]) as policy:
            return await compare(policy, STREAMS, said_by_trainer(model, STREAMS), limit=limit)

    return trio.run(ask)


def test_a_server_says_what_the_trainer_says_after_every_update(server: RunningModel, other: Path) -> None:
    for version, model in ((1, other), (2, server.model_dir), (3, other)):
        trio.run(partial(update_weights, server.url, model, version=version))
        assert compared(server, model, limit=FLOAT32).largest < FLOAT32


def test_a_reload_that_mixes_old_weights_with_new_ones_is_noticed(server: RunningModel, other: Path) -> None:
    trio.run(partial(update_weights, server.url, server.model_dir, version=0))
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
    answer = httpx.post(f"{server.url}/collective_rpc", json=reload, timeout=60, trust_env=False)
    assert answer.status_code == 200  # vLLM's own: it says that all is well
    with pytest.raises(RunError, match="trainer and server differ by"):
        compared(server, other, limit=0.01)
    trio.run(partial(update_weights, server.url, other, version=1))
    assert compared(server, other, limit=FLOAT32).largest < FLOAT32


def test_each_token_of_a_request_is_of_the_weights_that_it_names(server: RunningModel, other: Path) -> None:
    """The update comes while a long completion is sampled: it goes on, with nothing of the old weights."""
    trio.run(partial(update_weights, server.url, server.model_dir, version=4))
    prompt = list(range(30, 60))

    async def sample() -> Completion:
        found = list[Completion]()
        async with (
            VllmPolicy.connect(server.url, stop_token_ids=[]) as policy,
            trio.open_nursery() as nursery,
        ):

            async def complete() -> None:
                found.append(await policy.complete(prompt, max_tokens=900))

            nursery.start_soon(complete)
            await trio.sleep(1.0)
            await update_weights(server.url, other, version=5)
        return found[0]

    completion = trio.run(sample)
    versions = completion.policy_versions
    assert sorted(versions) == versions
    assert set(versions) == {4, 5}
    stream = [prompt + completion.token_ids]
    for version, model in ((4, server.model_dir), (5, other)):
        [said] = said_by_trainer(model, stream)
        assert completion.logprobs is not None
        for now, ours, theirs in zip(versions, said[len(prompt) - 1 :], completion.logprobs, strict=True):
            assert now != version or abs(ours - theirs) < FLOAT32


def test_an_update_that_fails_says_why_and_holds_the_server(server: RunningModel, tmp_path: Path) -> None:
    with pytest.raises(UpdateFailed, match=r"refused /update_weights with HTTP 500 \(.*safetensors"):
        trio.run(partial(update_weights, server.url, tmp_path, version=9))
    answer = httpx.get(f"{server.url}/is_paused", timeout=60, trust_env=False)
    assert answer.json() == {"is_paused": True}  # nothing is sampled from who knows what
