"""Advantages: what an episode is compared with, and what is left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.conversation import Segment, TurnRecord
from agents.loop import End
from swe_env.episode import Episode
from trainer.advantages import Penalty, advantages, centre, penalised


def episode(
    name: str,
    reward: float | None,
    *,
    group: str = "g",
    task: str = "t",
    read: int = 3,
    said: int = 2,
    turns: int = 1,
) -> Episode:
    segment = Segment(
        token_ids=[0] * (read + said),
        is_action=[False] * read + [True] * said,
        logprobs=[None] * read + [-1.0] * said,
        policy_versions=[None] * read + [0] * said,
    )
    record = TurnRecord(segment=0, start=read, end=read + said, finish_reason="stop")
    return Episode(
        id=name,
        task_id=task,
        group_id=group,
        policy="p",
        end=End.SANDBOX_LOST if reward is None else End.SUBMITTED,
        reward=reward,
        segments=[segment],
        turns=[record] * turns,
    )


def group(*rewards: float | None, name: str = "g", task: str = "t") -> list[Episode]:
    return [episode(f"{name}-{n}", reward, group=name, task=task) for n, reward in enumerate(rewards)]


def test_an_invalid_member_is_in_no_baseline_and_gets_no_advantage() -> None:
    """Case T26: rewards 1, 1, 0, 0, of which the second is invalid."""
    found = advantages(group(1.0, None, 0.0, 0.0))
    assert found.by_episode == pytest.approx({"g-0": 2 / 3, "g-2": -1 / 3, "g-3": -1 / 3})
    assert found.invalid == 1


def test_nothing_is_divided_by_a_standard_deviation() -> None:
    assert advantages(group(0.1, 0.0)).by_episode == pytest.approx({"g-0": 0.05, "g-1": -0.05})


def test_groups_do_not_look_at_each_other() -> None:
    alone = advantages(group(1.0, 0.0)).by_episode
    both = advantages([*group(1.0, 1.0, 0.0, name="h", task="u"), *group(1.0, 0.0)])
    assert both.by_episode.items() >= alone.items()
    assert both.groups == 2


@pytest.mark.parametrize(
    "rewards", [(1.0, 1.0), (0.0, 0.0, None), (0.1, 0.1, 0.1), (1.0,), (1.0, None), (None,)]
)
def test_a_group_without_a_spread_is_left_out_and_counted(rewards: tuple[float | None, ...]) -> None:
    found = advantages([*group(*rewards), *group(1.0, 0.0, name="h")])
    assert set(found.by_episode) == {"h-0", "h-1"}
    assert (found.groups, found.without_spread) == (2, 1)


def test_a_group_of_several_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="mixes the tasks"):
        advantages([episode("a", 1.0, task="t"), episode("b", 0.0, task="u")])


@pytest.mark.parametrize("other", ["g", "h"])
def test_an_id_that_is_taken_is_refused(other: str) -> None:
    with pytest.raises(ValueError, match="unique"):
        advantages([*group(1.0, 0.0), episode("g-0", 0.0, group=other), episode("x", 1.0, group=other)])


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=20))
def test_advantages_of_a_group_add_up_to_nothing(rewards: list[float | None]) -> None:
    centred = centre(rewards)
    assert [one is None for one in centred] == [one is None for one in rewards]
    assert sum(one for one in centred if one is not None) == pytest.approx(0, abs=1e-9)


def test_without_a_penalty_length_does_not_matter() -> None:
    members = [episode("a", 1.0, read=900, turns=9), episode("b", 1.0)]
    assert penalised(members, Penalty()) == [1.0, 1.0]


def test_each_cost_counts_relative_to_the_largest_of_the_group() -> None:
    members = [episode("a", 1.0, read=10, said=8, turns=4), episode("b", 1.0, read=5, said=2, turns=1)]
    penalty = Penalty(input_tokens=0.1, action_tokens=0.2, turns=0.4)
    assert penalised(members, penalty) == pytest.approx([1 - 0.7, 1 - 0.05 - 0.05 - 0.1])


def test_a_penalty_grows_with_the_share_that_is_solved() -> None:
    members = [episode("a", 1.0, turns=2), episode("b", 0.0, turns=1)]
    assert penalised(members, Penalty(turns=0.2)) == pytest.approx([1 - 0.1, -0.05])


def test_where_nothing_is_solved_brevity_earns_nothing() -> None:
    members = [episode("a", 0.0, turns=9), episode("b", 0.0, turns=1)]
    assert advantages(members, Penalty(turns=1.0)).without_spread == 1


def test_where_all_is_solved_brevity_is_what_is_left_to_learn() -> None:
    members = [episode("a", 1.0, turns=4), episode("b", 1.0, turns=2)]
    assert advantages(members, Penalty(turns=0.1)).by_episode == pytest.approx({"a": -0.025, "b": 0.025})


def test_an_invalid_member_sets_no_standard_of_length() -> None:
    members = [episode("a", 1.0, turns=2), episode("b", None, turns=50)]
    assert penalised(members, Penalty(turns=0.1)) == [pytest.approx(0.9), None]
