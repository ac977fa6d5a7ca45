"""Demonstrations are the gold policy's episodes, token for token, at a fraction of the price."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from agents.chat import load_chat
from agents.loop import Budget
from agents.prompts import load_prompts
from swe_env.demonstrations import can_demonstrate, demonstrate
from swe_env.episode import Episode, run_episode
from swe_env.plan import TINY_GLM
from swe_env.policies import scripted
from swe_env.rundir import RunDir, RunError, RunSpec
from swe_env.workspace import Workspaces
from tasks.model import ImageRef, Task
from tasks.synthetic import generate_many
from tests.conftest import Backend, connected
from tests.swe_env.conftest import make_task

PROMPTS = load_prompts("tiny")
CHAT = load_chat(TINY_GLM, PROMPTS.tools, announce=PROMPTS.announce_tools)


class Nobody:
    def stage(self, job_id: str, stage: str) -> None: ...

    def done(self, episode: Episode, *, will_retry: bool) -> None: ...


def demonstrated(
    backend: Backend, tasks: list[Task], where: Path, budget: Budget | None = None, kind: str = "gold"
) -> RunDir:
    rundir = RunDir(where)
    empty = {"tasks_sha256": "", "prompts_sha256": "", "tokenizer_sha256": ""}
    rundir.begin(RunSpec(policy="gold", budget={}, version="", **empty))

    async def body() -> None:
        with trio.fail_after(120):
            async with connected(backend, "test-demonstrations") as engine:
                await demonstrate(
                    {kind: tasks},
                    rundir,
                    Nobody(),
                    engine=engine,
                    chat=CHAT,
                    prompts=PROMPTS,
                    budget=budget or Budget(),
                    concurrency=2,
                )

    trio.run(body)
    return rundir


@pytest.mark.docker
def test_they_are_what_the_gold_policy_does_in_a_sandbox_of_its_own(
    base_image: str, backend: Backend, tmp_path: Path
) -> None:
    tasks = generate_many("train", 6)
    found = {episode.task_id: episode for episode in demonstrated(backend, tasks, tmp_path).episodes()}
    assert sorted(found) == sorted(task.id for task in tasks)

    async def alone(task: Task) -> Episode:
        async with connected(backend, "test-demonstrations") as engine:
            return await run_episode(
                task,
                scripted("gold", task, CHAT),
                chat=CHAT,
                workspaces=Workspaces(engine, base_image),
                prompts=PROMPTS,
            )

    for task in tasks[4:]:
        assert found[task.id].segments == trio.run(alone, task).segments
        assert found[task.id].reward is None


@pytest.mark.docker
def test_what_is_there_is_not_played_again(base_image: str, tmp_path: Path) -> None:
    tasks = generate_many("train", 4)
    first = demonstrated("docker", tasks[:2], tmp_path)
    before = {episode.id: episode.timings for episode in first.episodes()}
    after = {episode.id: episode.timings for episode in demonstrated("docker", tasks, tmp_path).episodes()}
    assert len(after) == 4
    assert before.items() <= after.items()


@pytest.mark.docker
def test_one_who_submits_at_once_is_demonstrated_too(base_image: str, tmp_path: Path) -> None:
    task = generate_many("train", 1)[0]
    episode = demonstrated("docker", [task], tmp_path, kind="noop").episodes()[0]
    assert [call["name"] for m in episode.messages for call in m.get("tool_calls", [])] == ["submit"]
    assert (episode.policy, episode.end, episode.reward) == ("noop", "submitted", None)


@pytest.mark.docker
def test_one_that_does_not_come_to_its_end_is_refused(base_image: str, tmp_path: Path) -> None:
    task = generate_many("train", 1)[0]
    with pytest.RaisesGroup(pytest.RaisesExc(RunError, match=f"of {task.id} ends with turn_limit: raise")):
        demonstrated("docker", [task], tmp_path / "short", Budget(turns=1))
    steps = [{"name": "edit", "arguments": {"command": "view", "path": "missing.py"}}]
    wrong = task.model_copy(
        update={"metadata": {"demonstration": [*steps, {"name": "submit", "arguments": {}}]}}
    )
    with pytest.RaisesGroup(pytest.RaisesExc(RunError, match=r"ends with submitted \(Error: missing.py")):
        demonstrated("docker", [wrong], tmp_path / "wrong")


def test_only_plain_repositories_can_be_demonstrated_that_way() -> None:
    assert can_demonstrate(make_task())
    assert not can_demonstrate(make_task(setup="pip install x"))
    assert not can_demonstrate(make_task(workdir="/elsewhere"))
    assert not can_demonstrate(make_task(image=ImageRef(name="some/image:1")))
