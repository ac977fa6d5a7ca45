"""A small task whose pieces a test can bend, and calls that play and grade it with real parts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from agents.chat import Chat, load_chat
from agents.loop import Budget
from agents.policy import Policy
from agents.prompts import load_prompts
from agents.scripted import ScriptedPolicy
from agents.tools import ToolLimits
from swe_env.episode import Episode, run_episode
from swe_env.grading import Grade, grade
from swe_env.plan import TINY_GLM
from swe_env.workspace import Workspaces
from tasks.model import InlineRepo, PytestTests, Task
from tests.conftest import Backend, connected

BROKEN = "def total(numbers):\n    return sum(numbers) - 1\n"
FIXED = "def total(numbers):\n    return sum(numbers)\n"
HIDDEN = "tests/test_calc.py"
FAILS, PASSES = f"{HIDDEN}::test_total", f"{HIDDEN}::test_type"
TESTS = """from calc import total


def test_total():
    assert total([1, 2]) == 3


def test_type():
    assert isinstance(total([1]), int)
"""
TEST_SECONDS = 120

Edits = dict[str, bytes | None]
"""Path -> new content, None to delete."""


def make_patch(files: dict[str, str], edits: Edits) -> bytes:
    """git's own diff of the edits."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(text.encode())

        def git(*arguments: str) -> bytes:
            identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "core.autocrlf=false")
            return subprocess.check_output(["git", "-C", folder, *identity, *arguments])

        git("init", "-q")
        git("add", "-Af")
        git("commit", "-q", "--allow-empty", "-m", "start")
        for path, content in edits.items():
            if content is None:
                (root / path).unlink()
            else:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(content)
        git("add", "-Af")
        return git("diff", "--cached", "--binary")


def make_task(files: dict[str, str] | None = None, **changes: Any) -> Task:
    """`calc.total` is one too small; one hidden test fails of it, one passes."""
    files = files or {"calc.py": BROKEN}
    content: dict[str, Any] = {
        "id": "calc",
        "source": "test",
        "problem_statement": "total([1, 2]) is 2, and should be 3.",
        "image": InlineRepo(files=files),
        "tests": PytestTests(files={HIDDEN: TESTS}),
        "fail_to_pass": [FAILS],
        "pass_to_pass": [PASSES],
        "gold_patch": make_patch(files, {"calc.py": FIXED.encode()}).decode(),
        "test_timeout": 60.0,
    }
    return Task(**content | changes)


@pytest.fixture
def graded(base_image: str, backend: Backend, request: pytest.FixtureRequest) -> Callable[..., Grade]:
    """`graded(edits, task)`: the grade of the patch that these edits make."""

    def run(edits: Edits | bytes, task: Task | None = None) -> Grade:
        task = task or make_task()
        assert isinstance(task.image, InlineRepo)
        patch = edits if isinstance(edits, bytes) else make_patch(task.image.files, edits)

        async def body() -> Grade:
            with trio.fail_after(TEST_SECONDS):
                async with connected(backend, f"test-{request.node.name}") as engine:
                    return await grade(task, patch, Workspaces(engine, base_image))

        return trio.run(body)

    return run


@pytest.fixture(scope="session")
def chat() -> Chat:
    """GLM's format with the default tools."""
    return load_chat(TINY_GLM, load_prompts().tools)


@pytest.fixture
def played(
    base_image: str, chat: Chat, backend: Backend, request: pytest.FixtureRequest
) -> Callable[..., Episode]:
    """`played(policy or messages to say, task, budget)`: a whole episode."""

    def run(
        policy: Policy | list[dict[str, Any]],
        task: Task | None = None,
        *,
        budget: Budget | None = None,
        limits: ToolLimits | None = None,
        watch: Callable[[str], None] = lambda _: None,
        chat: Chat = chat,
        prompts: str = "default",
    ) -> Episode:
        if isinstance(policy, list):
            policy = ScriptedPolicy.speaking("scripted", policy, chat)

        async def body() -> Episode:
            with trio.fail_after(TEST_SECONDS):
                async with connected(backend, f"test-{request.node.name}") as engine:
                    return await run_episode(
                        task or make_task(),
                        policy,
                        chat=chat,
                        workspaces=Workspaces(engine, base_image),
                        prompts=load_prompts(prompts),
                        budget=budget,
                        tool_limits=limits,
                        watch=watch,
                    )

        return trio.run(body)

    return run
