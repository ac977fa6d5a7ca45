"""Infrastructure failures are tried again, counted, and never kept as a reward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from agents.chat import Chat
from agents.loop import End
from agents.policy import Policy
from agents.prompts import load_prompts
from agents.scripted import ScriptedPolicy
from sandboxes.docker import DockerEngine
from swe_env.episode import Episode, run_episode
from swe_env.policies import scripted
from swe_env.rundir import RunDir, RunSpec
from swe_env.runner import Job, Watch, run_jobs
from swe_env.workspace import Workspaces
from tests.swe_env.conftest import make_task

pytestmark = pytest.mark.docker

SPEC = RunSpec(policy="x", tasks_sha256="", prompts_sha256="", tokenizer_sha256="", budget={}, version="0")


class Heard:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.attempts: list[tuple[End, bool]] = []

    def stage(self, job_id: str, stage: str) -> None:
        assert stage in ("start", "play", "grade")

    def done(self, episode: Episode, *, will_retry: bool) -> None:
        self.attempts.append((episode.end, will_retry))


def play(
    policies: Iterator[Policy], out: Path, chat: Chat, base_image: str, retries: int
) -> tuple[Heard, RunDir]:
    heard, rundir = Heard(), RunDir(out)
    rundir.begin(SPEC)

    async def body() -> None:
        async with DockerEngine.connect(run_id="test-runner") as engine:

            async def attempt(watch: Watch) -> Episode:
                return await run_episode(
                    make_task(),
                    next(policies),
                    chat=chat,
                    workspaces=Workspaces(engine, base_image),
                    prompts=load_prompts(),
                    episode_id="one",
                    watch=watch,
                )

            await run_jobs([Job("one", attempt)], rundir, heard, concurrency=1, retries=retries)

    trio.run(body)
    return heard, rundir


def mute() -> Policy:
    return ScriptedPolicy("mute", [])


def test_what_works_the_second_time_is_kept(tmp_path: Path, chat: Chat, base_image: str) -> None:
    policies = iter([mute(), scripted("gold", make_task(), chat)])
    heard, rundir = play(policies, tmp_path, chat, base_image, retries=2)
    assert heard.attempts == [(End.POLICY_ERROR, True), (End.SUBMITTED, False)]
    assert [episode.reward for episode in rundir.episodes()] == [1.0]
    assert rundir.finished() == {"one"}


def test_what_never_works_is_kept_without_reward_and_asked_again(
    tmp_path: Path, chat: Chat, base_image: str
) -> None:
    heard, rundir = play(iter([mute(), mute()]), tmp_path, chat, base_image, retries=1)
    assert heard.attempts == [(End.POLICY_ERROR, True), (End.POLICY_ERROR, False)]
    [episode] = rundir.episodes()
    assert episode.reward is None
    assert "script ended" in episode.error
    assert rundir.finished() == set()
    heard, rundir = play(iter([scripted("gold", make_task(), chat)]), tmp_path, chat, base_image, retries=0)
    assert rundir.finished() == {"one"}
    assert [path.name for path in rundir.episodes_path.iterdir()] == ["one"]
