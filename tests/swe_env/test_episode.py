"""An episode: how it ends, what it earns, and what the policy can reach while it lasts."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio

from agents.chat import Chat
from agents.loop import Budget, End
from agents.policy import Completion, ContextOverflow
from agents.scripted import ScriptedPolicy, tool_call
from agents.tools import ToolLimits
from swe_env.episode import Episode
from tests.conftest import Backend
from tests.swe_env.conftest import FIXED, HIDDEN, make_task

pytestmark = pytest.mark.docker

Played = Callable[..., Episode]
SUBMIT = tool_call("submit")
FIX = tool_call("edit", command="create", path="calc.py", file_text=FIXED)
TALK = {"role": "assistant", "content": "I will think about it."}


def bash(command: str) -> dict[str, Any]:
    return tool_call("bash", command=command)


def answers(episode: Episode) -> list[str]:
    """What the tools said, in order."""
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


class Interrupted:
    """Says its messages, then does something else than answering."""

    name = "interrupted"

    def __init__(
        self, messages: list[dict[str, Any]], chat: Chat, then: Callable[[], Awaitable[Completion]]
    ) -> None:
        self._script = ScriptedPolicy.speaking(self.name, messages, chat)
        self._left = len(messages)
        self._then = then

    async def complete(self, prompt_ids: list[int], *, max_tokens: int) -> Completion:
        if not self._left:
            return await self._then()
        self._left -= 1
        return await self._script.complete(prompt_ids, max_tokens=max_tokens)


@pytest.fixture
def kill_sandboxes(backend: Backend, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Kills the sandboxes of this test from outside. Raises `LookupError` if there are none."""

    def kill() -> None:
        if backend == "docker":
            label = f"label=swe-env.run=test-{request.node.name}"
            kill, find = ["docker", "kill"], ["docker", "ps", "-q", "--filter", label]
        else:  # what this process's runtimes started
            kill, runtimes = ["kill", "-9"], output("pgrep", "-P", str(os.getpid()), "crun|runc")
            find = ["pgrep", "-P", ",".join(runtimes) or "0"]
        if not (found := output(*find)):
            raise LookupError
        subprocess.run([*kill, *found], check=True, capture_output=True)

    def output(*argv: str) -> list[str]:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()

    return kill


def test_a_fix_that_is_submitted_earns_one(played: Played) -> None:
    episode = played([bash("cat calc.py"), FIX, SUBMIT])
    assert (episode.end, episode.reward, episode.patch_paths) == (End.SUBMITTED, 1.0, ["calc.py"])
    assert [turn.finish_reason for turn in episode.turns] == ["stop"] * 3
    assert episode.timings.total > episode.timings.grade > 0


def test_nothing_done_earns_nothing(played: Played) -> None:
    episode = played([SUBMIT])
    assert (episode.end, episode.reward, episode.patch) == (End.SUBMITTED, 0.0, b"")


def test_work_left_at_the_turn_limit_is_graded(played: Played) -> None:
    episode = played([FIX, SUBMIT], budget=Budget(turns=1))
    assert (episode.end, episode.reward) == (End.TURN_LIMIT, 1.0)


def test_a_full_context_ends_and_is_graded(played: Played) -> None:
    talk = [bash(f"echo {number}; cat calc.py") for number in range(50)]
    episode = played([FIX, *talk], budget=Budget(context_tokens=1400))
    assert (episode.end, episode.reward) == (End.TOKEN_LIMIT, 1.0)
    assert episode.tokens <= 1400


def test_a_prompt_the_server_finds_too_long_is_the_same_ending(played: Played, chat: Chat) -> None:
    async def overflow() -> Completion:
        raise ContextOverflow

    assert played(Interrupted([FIX], chat, overflow)).end is End.TOKEN_LIMIT


def test_a_huge_observation_is_cut_to_what_the_context_holds(played: Played) -> None:  # T24
    budget = Budget(context_tokens=4096)
    episode = played([bash("head -c 70000 /dev/zero | tr '\\0' x"), SUBMIT], budget=budget)
    assert episode.end is End.SUBMITTED
    assert "characters cut" in answers(episode)[0]
    assert episode.tokens <= 4096


def test_a_policy_that_does_not_answer_in_time_is_graded_on_what_it_did(played: Played, chat: Chat) -> None:
    async def never() -> Completion:
        await trio.sleep_forever()
        raise AssertionError

    slow = Interrupted([FIX], chat, never)
    episode = played(slow, budget=Budget(seconds=3))
    assert (episode.end, episode.reward) == (End.TIME_LIMIT, 1.0)


def test_a_command_does_not_outlast_the_clock(played: Played) -> None:
    episode = played([FIX, bash("sleep 100"), SUBMIT], budget=Budget(seconds=4))
    assert (episode.end, episode.reward) == (End.TIME_LIMIT, 1.0)
    assert episode.timings.tools < 10


def test_three_turns_without_a_call_end_the_episode(played: Played) -> None:
    episode = played([FIX, TALK, TALK, TALK, SUBMIT])
    assert (episode.end, episode.reward, len(episode.turns)) == (End.FORMAT_ERRORS, 1.0, 4)


def test_a_call_between_bad_turns_starts_the_count_again(played: Played) -> None:
    episode = played([TALK, TALK, bash("true"), TALK, TALK, SUBMIT])
    assert episode.end is End.SUBMITTED


def test_each_kind_of_bad_turn_is_told_what_was_wrong(played: Played) -> None:
    unknown, misfit = tool_call("python", code="1"), tool_call("bash", script="ls")
    episode = played([TALK, unknown, misfit], budget=Budget(format_errors=4, turns=3))
    said = [message["content"] for message in episode.messages if message["role"] in ("tool", "user")][1:]
    assert len(set(said)) == 3
    assert "no tool" in said[0].lower() or "tool call" in said[0]
    assert "bash, edit, submit" in said[1]
    assert "'command' is missing" in said[2]


def test_a_sandbox_that_dies_is_no_reward(
    played: Played, chat: Chat, kill_sandboxes: Callable[[], None]
) -> None:
    async def kill_and_go_on() -> Completion:
        kill_sandboxes()
        return await ScriptedPolicy.speaking("x", [bash("true")], chat).complete([], max_tokens=4096)

    episode = played(Interrupted([FIX], chat, kill_and_go_on))
    assert (episode.end, episode.reward, episode.grade) == (End.SANDBOX_LOST, None, None)
    assert episode.error
    assert "\n" not in episode.error
    assert len(episode.turns) == 2


def test_a_policy_that_fails_is_no_reward_and_its_work_is_kept(played: Played) -> None:
    episode = played([FIX])  # the script ends before the episode does
    assert (episode.end, episode.reward) == (End.POLICY_ERROR, None)
    assert episode.patch_paths == ["calc.py"]


def test_a_grader_that_dies_is_no_reward(played: Played, kill_sandboxes: Callable[[], None]) -> None:
    def kill_soon(stage: str) -> None:
        if stage == "grade":
            threading.Thread(target=kill_when_started).start()

    over = threading.Event()

    def kill_when_started() -> None:
        while not over.wait(0.05):  # a stage of runc that has done its work may be hit first
            with suppress(LookupError, subprocess.CalledProcessError):
                kill_sandboxes()

    slow = bash("printf 'import time\\ntime.sleep(20)\\n' >>calc.py")
    try:
        episode = played([slow, SUBMIT], watch=kill_soon)
    finally:
        over.set()
    assert (episode.end, episode.reward, episode.grade) == (End.GRADER_ERROR, None, None)


def test_several_calls_in_one_turn_run_in_order(played: Played) -> None:
    both = {
        "role": "assistant",
        "content": "",
        "tool_calls": [*bash("echo 1 >n; cat n")["tool_calls"], *bash("echo 2 >>n; cat n")["tool_calls"]],
    }
    episode = played([both, SUBMIT])
    assert answers(episode) == ["1", "1\n2"]


def test_calls_after_submit_are_not_carried_out(played: Played) -> None:
    both = {"role": "assistant", "content": "", "tool_calls": [*SUBMIT["tool_calls"], *FIX["tool_calls"]]}
    assert played([both]).patch == b""


def test_an_edit_arrives_byte_for_byte(played: Played) -> None:  # T35
    indented = "class A:\n    def f(self):\n        return 1\n\n\n"
    steps = [
        tool_call("edit", command="create", path="a.py", file_text=indented),
        tool_call(
            "edit",
            command="str_replace",
            path="a.py",
            old_str="\n        return 1\n",
            new_str="\n\n        return  2 \n",
        ),
        tool_call("edit", command="insert", path="a.py", insert_line=1, new_str="    x = 1\t"),
        bash("cat -A a.py"),
        SUBMIT,
    ]
    assert answers(played(steps))[3].split("\n") == [
        "class A:$", "    x = 1^I$", "    def f(self):$", "$", "        return  2 $", "$", "$",
    ]  # fmt: skip


def test_a_command_that_hangs_is_killed_with_what_it_started_and_the_shell_goes_on(
    played: Played,
) -> None:  # T29
    steps = [bash("cd /tmp; (setsid sleep 987 &) ; sleep 986"), bash("pgrep -c sleep; pwd"), SUBMIT]
    first, second = answers(played(steps, limits=ToolLimits(timeout=2)))[:2]
    assert "killed after 2 seconds" in first
    assert second.split("\n")[:2] == ["0", "/testbed"]


def test_a_download_fails_fast_and_is_recorded(played: Played) -> None:  # T11
    pip = bash("python3 -m pip download requests 2>&1 | tail -3")
    urlopen = bash(
        "python3 -c 'import urllib.request as u; u.urlopen(\"http://example.com\")' 2>&1 | tail -1"
    )
    episode = played([pip, urlopen, bash("true"), SUBMIT])
    assert episode.network_attempts >= 1
    assert "resolution" in answers(episode)[1]
    assert episode.timings.tools < 30


def test_hidden_tests_and_the_gold_patch_are_nowhere_in_the_rollout(played: Played) -> None:
    task = make_task(problem_statement="Fix it.")
    task = task.model_copy(update={"gold_patch": task.gold_patch + "# zebrafinch\n"})
    search = (
        "grep -rIl {} / --exclude-dir=sys --exclude-dir=proc 2>/dev/null; grep -l {} /proc/[0-9]*/environ"
    )
    steps = [
        bash(search.format("zebra[f]inch", "zebra[f]inch")),
        bash(search.format("test_tot[a]l", "test_tot[a]l")),
        bash(f"ls {HIDDEN}"),
        SUBMIT,
    ]
    found = [line for answer in answers(played(steps, task)) for line in answer.split("\n")]
    assert [line for line in found if line.startswith("/")] == []


def test_nothing_outside_the_repository_reaches_the_grader(played: Played) -> None:
    outside = bash(
        "packages=$(python3 -c 'import site; print(site.getsitepackages()[0])')\n"
        "mkdir -p $packages && echo 'raise SystemExit(0)' >$packages/sitecustomize.py; echo x >/tmp/x"
    )
    episode = played([outside, FIX, SUBMIT])
    assert (episode.reward, episode.patch_paths) == (1.0, ["calc.py"])


def test_an_image_that_is_not_there_is_infrastructure(played: Played) -> None:
    from tasks.model import ImageRef

    episode = played([SUBMIT], make_task(image=ImageRef(name="swe-env/absent:1"), base_commit="HEAD"))
    assert (episode.end, episode.reward) == (End.SANDBOX_LOST, None)
    assert "swe-env/absent:1" in episode.error


def test_a_name_that_no_file_can_have_is_an_answer_to_the_model(played: Played) -> None:
    view = tool_call("edit", command="view", path="a\0b")
    assert answers(played([view, SUBMIT])) == ["Error: there can be no file of that name."]


def test_file_names_that_are_not_text_are_recorded(played: Played) -> None:
    episode = played([bash("touch $(printf 'a\\377')"), FIX, SUBMIT])
    assert (episode.reward, episode.patch_paths) == (1.0, ["a\\xff", "calc.py"])
    assert Episode.model_validate_json(episode.model_dump_json()).patch_paths == episode.patch_paths


def test_programs_that_the_agent_replaced_spoil_only_its_own_patch(played: Played) -> None:
    fake = bash(
        "mkdir -p a/.git; cd /usr/local/bin; printf '#!/bin/sh\\necho captured x y\\n' >mv; chmod +x mv"
    )
    episode = played([FIX, fake, SUBMIT])
    assert episode.end is End.SUBMITTED
    assert episode.reward == 0.0
    assert "cannot be read" in episode.patch_error
