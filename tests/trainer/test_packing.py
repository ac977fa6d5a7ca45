"""Packing: every stream once, whole, in order, with its own positions; ranks in step and rarely waiting."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.conversation import Segment
from agents.loop import End
from swe_env.episode import Episode
from trainer.packing import MicroBatch, PackingError, Stream, micro_batch, pack, plan, streams, waiting


def stream(number: int, length: int, *, action: int = 1) -> Stream:
    """Whose tokens can be told apart from those of any other."""
    is_action = [index >= action for index in range(length)]
    return Stream(
        token_ids=[1000 * number + index for index in range(length)],
        is_action=is_action,
        logprobs=[-0.5 - index if one else 0.0 for index, one in enumerate(is_action)],
        policy_versions=[number if one else -1 for one in is_action],
        advantage=number + 0.5,
        name=f"e{number}, segment 0",
    )


def episode(*segments: Segment) -> Episode:
    return Episode(
        id="e",
        task_id="t",
        group_id="g",
        policy="gold",
        end=End.SUBMITTED,
        reward=1.0,
        segments=list(segments),
    )


def segment(is_action: list[bool], logprob: float | None = -0.5) -> Segment:
    return Segment(
        token_ids=list(range(len(is_action))),
        is_action=is_action,
        logprobs=[logprob if one else None for one in is_action],
        policy_versions=[3 if one else None for one in is_action],
    )


def unpacked(batch: MicroBatch) -> list[list[int]]:
    spans = pairwise(batch.boundaries.tolist())
    return [batch.token_ids[begin:end].tolist() for begin, end in spans]


lengths_and_budget = st.integers(1, 60).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=40), st.just(budget))
)


@given(case=lengths_and_budget, ranks=st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_a_plan_has_every_stream_once_within_the_budget_and_as_many_rounds_for_each_rank(
    case: tuple[list[int], int], ranks: int
) -> None:
    lengths, budget = case
    layout = plan(lengths, budget=budget, ranks=ranks)
    assert sorted(index for rank in layout for own in rank for index in own) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in own) <= budget for rank in layout for own in rank)
    assert len(layout) == ranks
    assert len({len(rank) for rank in layout}) == 1
    assert layout == plan(lengths, budget=budget, ranks=ranks)


@given(case=lengths_and_budget, ranks=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_packed_streams_come_out_as_they_went_in(case: tuple[list[int], int], ranks: int) -> None:
    lengths, budget = case
    given_ = [stream(number, length) for number, length in enumerate(lengths, start=1)]
    batches = [batch for rank in pack(given_, budget=budget, ranks=ranks) for batch in rank]
    found = [one for batch in batches for one in unpacked(batch) if one != [0]]  # [0] is an empty batch
    assert sorted(found) == [one.token_ids for one in given_]
    assert sum(batch.action_tokens for batch in batches) == sum(length - 1 for length in lengths)


def test_every_token_keeps_what_is_known_of_it() -> None:
    batch = micro_batch([stream(1, 4, action=2), stream(2, 3)])
    assert batch.token_ids.tolist() == [1000, 1001, 1002, 1003, 2000, 2001, 2002]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.stream_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.boundaries.tolist() == [0, 4, 7]
    assert batch.is_action.tolist() == [False, False, True, True, False, True, True]
    assert batch.logprobs.tolist() == [0, 0, -2.5, -3.5, 0, -1.5, -2.5]
    assert batch.advantages.tolist() == [0, 0, 1.5, 1.5, 0, 2.5, 2.5]
    assert batch.policy_versions.tolist() == [-1, -1, 1, 1, -1, 2, 2]


def test_tensors_have_the_documented_types() -> None:
    batch = micro_batch([stream(1, 4)])
    whole = [batch.token_ids, batch.position_ids, batch.stream_ids, batch.policy_versions]
    assert {one.dtype for one in whole} == {torch.int64}
    assert {batch.logprobs.dtype, batch.advantages.dtype} == {torch.float32}
    assert (batch.is_action.dtype, batch.boundaries.dtype) == (torch.bool, torch.int32)


def test_a_rank_with_nothing_to_do_has_a_token_that_no_loss_is_on() -> None:
    first, second = pack([stream(1, 5)], budget=8, ranks=2)
    assert (len(first), len(second)) == (1, 1)
    assert len(second[0].token_ids) == 1
    assert second[0].action_tokens == 0


def test_a_stream_longer_than_the_budget_is_refused_in_one_line() -> None:
    with pytest.raises(
        PackingError, match=r"^e7, segment 0 has 9 tokens, .* 8: raise the token budget"
    ) as caught:
        pack([stream(1, 3), stream(7, 9)], budget=8)
    assert "\n" not in str(caught.value)


def lengths_of(kind: str, count: int) -> list[int]:
    """Of agents' episodes: most of middling length, a long tail, some that ran into the limit of 32,768."""
    draw = random.Random(0)
    match kind:
        case "agentic":
            sizes = [draw.lognormvariate(math.log(9000), 0.8) for _ in range(count)]
        case "at the limit":
            sizes = [32768 if draw.random() < 0.4 else draw.uniform(2000, 32768) for _ in range(count)]
        case "short":
            sizes = [draw.lognormvariate(math.log(400), 0.5) for _ in range(count)]
        case _:
            sizes = [draw.uniform(1, 32768) for _ in range(count)]
    return [max(1, min(32768, int(size))) for size in sizes]


@pytest.mark.parametrize("kind", ["agentic", "at the limit", "short", "uniform"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("budget", [32768, 131072])
def test_padding_is_under_five_percent_on_realistic_lengths(kind: str, ranks: int, budget: int) -> None:
    lengths = lengths_of(kind, 256)
    assert waiting(lengths, plan(lengths, budget=budget, ranks=ranks)) < 0.05


@pytest.mark.parametrize("kind", ["agentic", "short", "uniform"])
def test_no_more_rounds_than_needed(kind: str) -> None:
    lengths = lengths_of(kind, 256)
    least = math.ceil(sum(lengths) / (131072 * 4))
    assert len(plan(lengths, budget=131072, ranks=4)[0]) == least


def test_waiting_counts_what_ranks_wait_for() -> None:
    assert waiting([4, 2, 3, 3], [[[0], [2]], [[1], [3]]]) == pytest.approx(1 - 12 / 14)
    assert waiting([], [[[]], [[]]]) == 0


def test_an_episode_gives_a_stream_for_each_segment_that_the_policy_spoke_in() -> None:
    made = streams(episode(segment([False, True]), segment([False]), segment([False, True, False])), 0.25)
    assert [one.name for one in made] == ["e, segment 0", "e, segment 2"]
    assert made[1] == Stream(
        [0, 1, 2], [False, True, False], [0.0, -0.5, 0.0], [-1, 3, -1], 0.25, "e, segment 2"
    )


def test_a_policy_that_records_no_log_probabilities_cannot_be_trained_by_them() -> None:
    with pytest.raises(PackingError, match="^e, segment 0 .*'gold' records none"):
        streams(episode(segment([False, True], None)), 1.0)


def test_a_demonstration_has_nan_where_nothing_was_recorded() -> None:
    (made,) = streams(episode(segment([False, True], None)), 1.0, logprobs_required=False)
    assert made.logprobs[0] == 0
    assert math.isnan(made.logprobs[1])


def test_an_action_that_nothing_predicts_is_refused() -> None:
    with pytest.raises(PackingError, match="begins with an action token"):
        streams(episode(segment([True, True])), 1.0)
