"""How many episodes may be in flight follows what is pressed, within its bounds."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from agents.vllm import VllmPolicy
from swe_env import flow
from swe_env.flow import Flow, Served, memory_left, pressure, runnable, served
from tests.conftest import RunningModel


@given(
    least=st.integers(1, 16),
    more=st.integers(0, 500),
    looks=st.lists(st.tuples(st.sampled_from(["", "pressed"]), st.booleans()), max_size=60),
)
def test_the_limit_stays_within_its_bounds(least: int, more: int, looks: list[tuple[str, bool]]) -> None:
    found = Flow(least=least, most=least + more)
    for pressed, is_used in looks:
        found.look(pressed, is_used=is_used)
        assert least <= found.limit <= least + more


def test_it_falls_fast_rises_slowly_and_only_where_it_is_what_limits() -> None:
    found = Flow(least=8, most=256)
    for _ in range(3):
        found.look("the server", is_used=True)
    assert found.limit == 108
    found.look("", is_used=False)
    assert found.limit == 108
    found.look("", is_used=True)
    assert found.limit == 116


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (Served(running=8, waiting=8, preemptions=3), ""),
        (Served(running=8, waiting=9, preemptions=3), "more requests wait than run"),
        (Served(running=8, waiting=0, preemptions=4), "the server has too little KV cache"),
    ],
)
def test_a_server_is_pressed_when_it_preempts_or_its_queue_is_long(
    now: Served, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "MOST_LOAD", 1e9)
    assert pressure(Served(preemptions=3), now) == says


def test_a_machine_is_pressed_when_memory_or_cores_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MOST_LOAD", -1.0)
    assert pressure(Served(), Served()) == "this machine is overloaded"
    monkeypatch.setattr(flow, "LEAST_MEMORY", 1.1)
    assert pressure(Served(), Served()) == "this machine has too little memory"


def test_load_is_that_of_the_moment(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("7.00 6.00 5.00 3/512 4711\n")
    assert runnable(tmp_path / "loadavg") == 3
    assert runnable(tmp_path / "nothing") == 0
    assert runnable() >= 1


def test_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  250 kB\n")
    assert memory_left(tmp_path / "meminfo") == 0.25
    assert memory_left(tmp_path / "nothing") == 1.0
    assert 0 < memory_left() < 1


@pytest.mark.vllm
def test_a_server_says_what_runs_in_it_and_one_that_is_gone_says_nothing(glm_server: RunningModel) -> None:
    async def body() -> None:
        most = Served()
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            VllmPolicy.connect(glm_server.url, stop_token_ids=[]) as policy,
            trio.open_nursery() as nursery,
        ):
            for _ in range(3):
                nursery.start_soon(lambda: policy.complete([1, 2, 3], max_tokens=2000))
            with trio.fail_after(60):
                while most.running < 3:
                    most = await served(client, [glm_server.url, "http://127.0.0.1:9"])
            nursery.cancel_scope.cancel()

    trio.run(body)
