"""Several servers as one policy: they share episodes, and one that goes away loses none."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager

import pytest
import trio

from agents.fleet import Fleet
from agents.policy import PolicyError, Sampling
from tests.agents.liars import STOP, answer, answering

PROMPT = [1, 2, 3]
GOOD = (200, answer())
BROKEN = (0, b"")
"""Hangs up without a word."""


@asynccontextmanager
async def fleet(*urls: str, deadline: float = 20) -> AsyncGenerator[Fleet]:
    with trio.fail_after(30):
        async with Fleet.connect(sampling=Sampling(), stop_token_ids=[STOP], deadline=deadline) as found:
            await found.become(urls)
            yield found


def test_an_episode_stays_with_its_server_and_the_next_takes_the_idlest() -> None:
    async def body(first: str, second: str) -> None:
        async with fleet(first, second) as servers:
            with servers.seat() as one, servers.seat() as two:
                for _ in range(3):
                    await one.complete(PROMPT, max_tokens=8)
                    await two.complete(PROMPT, max_tokens=8)
            with servers.seat() as three:
                await three.complete(PROMPT, max_tokens=8)

    with answering(GOOD) as (first, of_first), answering(GOOD) as (second, of_second):
        trio.run(body, first, second)
        assert (len(of_first), len(of_second)) == (4, 3)


def test_what_a_server_had_begun_when_it_went_away_another_begins_again() -> None:
    async def body(dies: str, lives: str) -> None:
        async with fleet(dies, lives) as servers, trio.open_nursery() as nursery:
            with servers.seat() as episode:

                async def news() -> None:
                    await trio.sleep(0.5)
                    await servers.become([lives])

                nursery.start_soon(news)
                completion = await episode.complete(PROMPT, max_tokens=8)
            assert completion.token_ids == [5, 6, STOP]

    with answering(BROKEN) as (dies, of_dead), answering(GOOD) as (lives, of_living):
        trio.run(body, dies, lives)
        assert len(of_dead) > 0
        assert len(of_living) == 1


def test_a_server_that_is_there_and_answers_no_completion_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agents.fleet.NEWS_SECONDS", 0.2)

    async def body(url: str) -> None:
        async with fleet(url) as servers:
            with servers.seat() as episode:
                await episode.complete(PROMPT, max_tokens=8)

    with answering((200, b"{}")) as (url, _), pytest.raises(PolicyError, match="answered as vLLM does not"):
        trio.run(body, url)


def test_the_time_without_any_server_is_waited_for_before_an_episode_and_not_in_it() -> None:
    async def body(url: str) -> None:
        async with fleet() as servers, trio.open_nursery() as nursery:
            with servers.seat() as episode, pytest.raises(PolicyError, match="being started again"):
                await episode.complete(PROMPT, max_tokens=8)

            async def news() -> None:
                await trio.sleep(0.1)
                await servers.become([url])

            nursery.start_soon(news)
            await servers.some()
            with servers.seat() as episode:
                await episode.complete(PROMPT, max_tokens=8)

    with answering(GOOD) as (url, _):
        trio.run(body, url)


def test_seats_that_are_left_count_no_more() -> None:
    async def body(urls: list[str]) -> list[str]:
        async with fleet(*urls) as servers:
            for _ in range(3):
                with servers.seat() as episode:
                    await episode.complete(PROMPT, max_tokens=8)
            return urls

    with ExitStack() as stack:
        made = [stack.enter_context(answering(GOOD)) for _ in range(2)]
        trio.run(body, [url for url, _ in made])
        assert [len(asked) for _, asked in made] == [3, 0]  # each time the first of two that are as idle
