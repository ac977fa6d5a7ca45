"""`--where`: says which episodes, in a language in which nothing else can be said."""

from __future__ import annotations

import pytest

from agents.conversation import Segment, TurnRecord
from agents.loop import End
from swe_env.episode import Episode
from swe_env.rundir import RunError
from swe_env.where import parse_where

TURN = TurnRecord(segment=0, start=1, end=3, finish_reason="stop")
SOLVED = Episode(
    id="one-0", task_id="one", group_id="one/gold", policy="gold", end=End.SUBMITTED, reward=1.0,
    segments=[Segment(token_ids=[1, 2, 3], is_action=[False, True, True], logprobs=[None] * 3,
                      policy_versions=[None, 0, 0])],
    turns=[TURN, TURN],
)  # fmt: skip
LOST = Episode(
    id="two-0", task_id="two", group_id="two/gold", policy="gold", end=End.SANDBOX_LOST, reward=None
)


@pytest.mark.parametrize(
    ("where", "solved", "lost"),
    [
        ("", True, True),
        ("reward == 1", True, False),
        ("reward != 1", False, True),
        ("not reward == 1", False, True),
        ("reward == None", False, True),
        ("reward >= 0", True, False),  # no reward is neither above nor below
        ("reward < 1", False, False),
        ("reward > -1 and turns < 3", True, False),
        ("0 < turns <= 2", True, False),
        ("tokens == 3 and action_tokens == 2", True, False),
        ("end == 'submitted' or task_id == 'two'", True, True),
        ("'wo' in task_id", False, True),
        ("'wo' not in task_id", True, False),
        ("(reward == 1 or turns == 7) and not policy == 'noop'", True, False),
        ("True", True, True),
    ],
)
def test_a_condition_holds_of_the_episodes_that_it_describes(where: str, solved: bool, lost: bool) -> None:
    condition = parse_where(where)
    assert (condition(SOLVED), condition(LOST)) == (solved, lost)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("__import__('os').system('true') == 0", "is neither a field nor a constant"),
        ("reward.real == 1", "is neither a field nor a constant"),
        ("turns + 1 == 2", "is neither a field nor a constant"),
        ("10 ** 10 ** 10 > turns", "is neither a field nor a constant"),
        ("turns == [1][0]", "is neither a field nor a constant"),
        ("(lambda: 1)() == 1", "is neither a field nor a constant"),
        ("task_id == f'{turns}'", "is neither a field nor a constant"),
        ("reward == b'1'", "is neither a field nor a constant"),
        ("reward == (x := 1)", "is neither a field nor a constant"),
        ("reward", "is not a condition"),
        ("reward == 1 and turns", "is not a condition"),
        ("1 if reward == 1 else 0", "is not a condition"),
        ("rewards == 1", "there is no field 'rewards': use id, task_id"),
        ("reward is 1", "write == or !="),
        ("reward == '1'", "is text on one side and a number on the other"),
        ("task_id < 3", "is text on one side and a number on the other"),
        ("1 in turns", "which is for text in text"),
        ("reward = 1", "cannot be read"),
        ("reward == 1; turns == 1", "cannot be read"),
        ("\0", "cannot be read"),
        ("(" * 400, "cannot be read"),
        ("not " * 240 + "(" * 30, "cannot be read"),
        ("turns == 1 or " * 100 + "True", "more than 1000: shorten it"),
    ],
)
def test_anything_else_is_refused_in_one_line(where: str, says: str) -> None:
    with pytest.raises(RunError) as refused:
        parse_where(where)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_deeply_nested_condition_is_answered_or_refused() -> None:
    assert parse_where("not " * 240 + "True")(SOLVED)
