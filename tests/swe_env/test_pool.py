"""Which groups may begin and which a step takes, under any schedule."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_env.pool import PATIENCE, Batch, Group, Pool


def played(
    number: int, *, oldest: int = 0, valid: int = 8, has_spread: bool = True, reward: float = 0.0
) -> Group:
    return Group(number=number, oldest=oldest, valid=valid, has_spread=has_spread, reward=reward)


def test_synchronous_steps_are_played_by_the_newest_version() -> None:
    pool = Pool(size=2, most_stale=0, steps=9)
    for number in range(2):
        assert pool.may_begin(0)
        pool.begin(number)
    assert not pool.may_begin(0)
    for number in range(2):
        pool.end(played(number))
    batch = pool.batch()
    assert batch is not None
    assert batch.groups == [0, 1]
    assert not pool.may_begin(0)  # step 1 is version 1's
    assert pool.may_begin(1)


def test_groups_without_a_spread_are_replaced_or_kept_as_asked() -> None:
    for replace in (True, False):
        pool = Pool(size=1, most_stale=0, steps=9, replace=replace)
        pool.begin(0)
        pool.end(played(0, has_spread=False))
        assert pool.may_begin(0) is replace
        assert pool.batch() == (None if replace else Batch(step=0, groups=[0]))


def test_where_no_group_has_a_spread_a_step_makes_do_with_what_there_is() -> None:
    pool, number = Pool(size=2, most_stale=0, steps=9), 0
    pool.begin(100)
    pool.end(played(100, reward=0.5))
    while (batch := pool.batch()) is None:
        assert pool.may_begin(0)
        pool.begin(number)
        pool.end(played(number, has_spread=False, reward=1.0))
        number += 1
    assert batch.groups == [100]
    assert len(batch.dropped) == number == 2 * PATIENCE
    assert batch.reward == (0.5 + number) / (number + 1)


def test_a_group_with_too_few_valid_members_is_lost_and_counted() -> None:
    pool = Pool(size=1, most_stale=0, steps=9, floor=4)
    pool.begin(0)
    pool.end(played(0, valid=3))
    pool.begin(1)
    pool.end(played(1, valid=4))
    assert pool.batch() == Batch(step=0, groups=[1], dropped={0: "lost"})


def test_nothing_is_begun_for_steps_that_will_not_be_taken() -> None:
    pool = Pool(size=2, most_stale=64, steps=1)
    for number in range(2):
        pool.begin(number)
    assert not pool.may_begin(0)


def test_what_was_begun_goes_on_when_the_weights_are_again_as_new_as_they_were() -> None:
    """A training that goes on from an older checkpoint serves older weights at first."""
    pool = Pool(size=2, most_stale=1, steps=9, step=5)
    assert [pool.may_go_on(version) for version in (3, 4, 5)] == [False, True, True]


def test_a_group_that_took_too_long_is_dropped_when_its_turn_comes() -> None:
    pool = Pool(size=1, most_stale=1, steps=9)
    for number in range(2):
        pool.begin(number)
    pool.end(played(1))
    assert pool.batch() == Batch(step=0, groups=[1])
    assert pool.may_begin(1)
    pool.begin(2)
    pool.end(played(2, oldest=1))
    assert pool.batch() == Batch(step=1, groups=[2])
    pool.end(played(0))  # as old as step 1 would still have taken
    assert pool.batch() is None
    assert pool.dropped == {0: "stale"}


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    most_stale=st.integers(0, 6),
    slots=st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_under_any_schedule_the_bound_holds_and_the_ledger_balances(
    seed: int, size: int, most_stale: int, slots: int
) -> None:
    draw, steps, version, number = random.Random(seed), 12, 0, 0
    pool = Pool(size=size, most_stale=most_stale, steps=steps)
    since: dict[int, int] = {}
    trained, dropped = list[int](), dict[int, str]()
    for _ in range(4000):
        event = draw.choice(("begin", "end", "learn"))
        if event == "begin" and len(pool.playing) < slots and pool.may_begin(version):
            pool.begin(number)
            since[number], number = version, number + 1
        elif event == "end" and pool.playing:
            ended = draw.choice(sorted(pool.playing))
            valid, spread = draw.choice((0, 8, 8, 8)), draw.random() < 0.7
            pool.end(played(ended, oldest=since[ended], valid=valid, has_spread=spread))
        elif event == "learn" and (batch := pool.batch()) is not None:
            assert all(batch.step - since[group] <= most_stale for group in batch.groups)
            trained += batch.groups
            dropped |= batch.dropped
            version = batch.step + 1
        if version == steps:
            break
    assert version == steps, "a schedule that stands still"
    waiting = {*pool.playing, *(group.number for group in pool.ready), *pool.dropped}
    assert sorted([*trained, *dropped, *waiting]) == list(range(number))  # each of them once


@pytest.mark.parametrize(("most_stale", "at_once", "sigma"), [(8, 8, 0.5), (64, 16, 1.0)])
def test_in_steady_state_almost_nothing_is_dropped(most_stale: int, at_once: int, sigma: float) -> None:
    """A step of four groups whenever there are four. Of a hundred groups one takes three times as long as the
    median, or ten times."""
    draw, size, steps, version, number = random.Random(0), 4, 400, 0, 0
    pool = Pool(size=size, most_stale=most_stale, steps=steps)
    left, since = dict[int, int](), dict[int, int]()
    stale = 0
    while version < steps:
        while len(pool.playing) < at_once and pool.may_begin(version):
            pool.begin(number)
            left[number], since[number] = round(draw.lognormvariate(2, sigma)) + 1, version
            number += 1
        for group in list(left):
            left[group] -= 1
            if not left[group]:
                del left[group]
                pool.end(played(group, oldest=since[group]))
        if (batch := pool.batch()) is not None:
            version = batch.step + 1
            stale += sum(reason == "stale" for reason in batch.dropped.values())
    assert stale <= 0.02 * number
