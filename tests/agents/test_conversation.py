"""The stream only grows; actions are exactly what was sampled; what does not fit is cut (T23, T24)."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.chat import load_chat
from agents.conversation import Conversation, cut, shorten
from agents.policy import Completion
from agents.prompts import load_prompts
from swe_env.plan import TINY_GLM

PROMPTS = load_prompts("tiny")
CHAT = load_chat(TINY_GLM, PROMPTS.tools)
THINKING_CALL = (
    "\n<think>step {n}</think>\n<tool_call>bash\n<arg_key>command</arg_key>\n"
    "<arg_value>ls</arg_value>\n</tool_call><|observation|>"
)


def completion(text: str) -> Completion:
    ids = CHAT.tokenizer.encode(text)
    return Completion(
        token_ids=ids,
        logprobs=[-0.5 - index / 1000 for index in range(len(ids))],
        policy_versions=[7] * len(ids),
        finish_reason="stop",
    )


def begin() -> Conversation:
    return Conversation(CHAT, PROMPTS.opening(workdir="/testbed", problem_statement="Fix it."))


def observation(text: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "name": "bash", "content": text}]


def test_three_thinking_turns_extend_one_stream_and_stay_aligned() -> None:  # T23
    conversation, said = begin(), []
    for number in range(3):
        before = list(conversation.prompt_ids)
        answer = completion(THINKING_CALL.replace("{n}", str(number)))
        conversation.act(answer)
        assert conversation.observe(observation("ok"), limit=4096)
        assert conversation.prompt_ids[: len(before) + len(answer.token_ids)] == before + answer.token_ids
        said += answer.token_ids
    (segment,) = conversation.segments
    actions = [token for token, action in zip(segment.token_ids, segment.is_action, strict=True) if action]
    assert actions == said
    for turn in conversation.turns:
        assert (
            segment.logprobs[turn.start : turn.end] == completion(THINKING_CALL.replace("{n}", "0")).logprobs
        )
        assert segment.policy_versions[turn.start : turn.end] == [7] * (turn.end - turn.start)


def test_a_stop_token_inside_open_reasoning_branches_and_says_so() -> None:
    conversation = begin()
    conversation.act(completion("\n<think>never closed<|observation|>"))
    assert conversation.observe(observation("go on"), limit=4096)
    first, second = conversation.segments
    assert sum(first.is_action) > 0
    assert not any(second.is_action)
    assert conversation.branches == ["the template cannot continue what was sampled"]


def test_a_huge_observation_is_cut_to_the_room_that_is_left() -> None:  # T24
    conversation = begin()
    conversation.act(completion(THINKING_CALL))
    assert conversation.observe(observation("x = 1\n" * 12_000), limit=1500)
    assert 1000 < len(conversation.prompt_ids) <= 1500
    assert "characters cut" in conversation.messages[-1]["content"]


def test_no_room_at_all_is_said_and_leaves_the_stream_alone() -> None:
    conversation = begin()
    conversation.act(completion(THINKING_CALL))
    before = list(conversation.prompt_ids)
    assert not conversation.observe(observation("anything"), limit=len(before) + 3)
    assert conversation.prompt_ids == before


@given(
    texts=st.lists(st.text(max_size=2000), min_size=1, max_size=4),
    room=st.integers(min_value=0, max_value=900),
)
@settings(max_examples=150, deadline=None)
def test_shortened_messages_always_fit(texts: list[str], room: int) -> None:
    shortened = shorten([{"role": "tool", "content": text} for text in texts], room, CHAT)
    assert shortened is None or sum(CHAT.count(message["content"]) for message in shortened) <= room


@given(text=st.text(), keep=st.integers(min_value=0, max_value=50))
def test_a_cut_keeps_both_ends_and_counts_what_is_missing(text: str, keep: int) -> None:
    shorter = cut(text, keep)
    if len(text) <= keep:
        assert shorter == text
    else:
        assert shorter.startswith(text[: (keep + 1) // 2])
        assert shorter.endswith(text[len(text) - keep // 2 :])
        assert f"[... {len(text) - keep} characters cut ...]" in shorter
