"""What is written down of an episode is what the server sampled: ids, logprobs, order, for every family."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from agents.chat import load_chat
from agents.loop import Budget, End
from agents.prompts import load_prompts
from agents.vllm import GENERATE, VllmPolicy
from sandboxes.docker import DockerEngine
from swe_env.episode import Episode, run_episode
from swe_env.rundir import RunDir
from swe_env.workspace import Workspaces
from tests.conftest import CONTEXT, RunningModel, running
from tests.swe_env.conftest import make_task

pytestmark = [pytest.mark.docker, pytest.mark.vllm]

BUDGET = Budget(turns=5, format_errors=9, turn_tokens=96, context_tokens=4096)
FLOAT32 = 1e-4
"""Largest difference of logprobs between sampling and scoring, in float32."""


@pytest.fixture(scope="module", params=["glm", "qwen", "llama"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningModel]:
    if request.param == "glm":
        yield request.getfixturevalue("glm_server")
        return
    model = request.getfixturevalue("tiny_models") / request.param
    with running(model, tmp_path_factory.mktemp("vllm") / "server.log") as started:
        yield RunningModel(started.url, model, CONTEXT)


def test_a_finished_episode_is_the_servers_own_stream(server: RunningModel, base_image: str) -> None:
    prompts = load_prompts("tiny")
    chat = load_chat(server.model_dir, prompts.tools)
    asked: list[dict[str, Any]] = []
    answered: list[dict[str, Any]] = []

    async def note_request(request: httpx.Request) -> None:
        if request.url.path == GENERATE:
            asked.append(json.loads(request.content))

    async def note_response(response: httpx.Response) -> None:
        if response.request.url.path == GENERATE:
            answered.append(json.loads(await response.aread())["choices"][0])

    async def body() -> tuple[Episode, list[list[float | None]]]:
        async with (
            DockerEngine.connect(run_id="test-token-truth") as engine,
            VllmPolicy.connect(server.url, stop_token_ids=chat.stop_token_ids) as policy,
        ):
            hooks = {"request": [note_request], "response": [note_response]}
            policy._client.event_hooks = hooks
            episode = await run_episode(
                make_task(),
                policy,
                chat=chat,
                workspaces=Workspaces(engine, base_image),
                prompts=prompts,
                budget=BUDGET,
            )
            policy._client.event_hooks = {}
            return episode, [await policy.score(segment.token_ids) for segment in episode.segments]

    episode, scores = trio.run(body)
    assert episode.end in (End.TURN_LIMIT, End.SUBMITTED), episode.error
    assert len(episode.turns) == len(answered) >= 1
    for turn, question, answer in zip(episode.turns, asked, answered, strict=True):
        segment, sampled = episode.segments[turn.segment], slice(turn.start, turn.end)
        assert question["token_ids"] == segment.token_ids[: turn.start]
        assert answer["token_ids"] == segment.token_ids[sampled]
        assert [one["logprob"] for one in answer["logprobs"]["content"]] == segment.logprobs[sampled]
        assert all(segment.is_action[sampled])
        assert set(segment.policy_versions[sampled]) == {0}
    assert episode.action_tokens == sum(turn.end - turn.start for turn in episode.turns)
    for segment, scored in zip(episode.segments, scores, strict=True):
        for action, logprob, score in zip(segment.is_action, segment.logprobs, scored, strict=True):
            assert not action or abs((logprob or 0) - (score or 0)) < FLOAT32


def test_a_server_that_dies_ends_the_run_in_one_line(tmp_path: Path, tiny_glm: Path, base_image: str) -> None:
    out = tmp_path / "run"
    argv = [
        sys.executable,
        "-m",
        "swe_env",
        "run",
        "--tasks",
        "shipped",
        "--policy",
        "vllm",
        "--prompts",
        "tiny",
    ]
    argv += ["--model", str(tiny_glm), "--turn-tokens", "64", "--turns", "3", "--n", "50", "--out", str(out)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(list(out.glob("episodes/[!.]*"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    os.killpg(int(children.split()[0]), signal.SIGKILL)
    killed = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert time.monotonic() - killed < 10
    assert process.returncode == 2
    assert said.strip().splitlines()[-1].startswith("swe-env: vLLM ended (signal SIGKILL)")
    assert "Traceback" not in said
    kept = RunDir(out).episodes()
    assert len([episode for episode in kept if episode.reward is not None]) >= 3
