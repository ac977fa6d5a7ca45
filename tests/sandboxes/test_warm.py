"""A sandbox that was started ahead is the same as any other, is used once, and ends with its engine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Awaitable, Callable

import pytest
import trio

from sandboxes.protocol import ImageUnavailable, Limits
from sandboxes.warm import WarmEngine
from tests.sandboxes.conftest import WORKDIR, own_containers

pytestmark = pytest.mark.docker

RUN = "swe-env.run=test-warm"


def in_engine(body: Callable[[WarmEngine], Awaitable[None]], bound: int = 2) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with WarmEngine.connect(run_id="test-warm", bound=bound) as engine:
                await body(engine)

    trio.run(main)
    deadline = time.monotonic() + 5  # the engine's list trails what it has removed
    while (left := own_containers(RUN)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


async def until(containers: int) -> list[str]:
    while len(found := own_containers(RUN)) != containers:
        await trio.sleep(0.05)
    return found


def test_who_asks_for_one_like_it_gets_the_one_that_waits(base_image: str) -> None:
    async def body(engine: WarmEngine) -> None:
        engine.prepare(base_image, workdir=WORKDIR, limits=Limits())
        [waiting] = await until(1)
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            assert own_containers(RUN) == [waiting]
            assert (await sandbox.run("pwd; ls | wc -l")).text == f"{WORKDIR}\n0\n"
        await until(0)

    in_engine(body)


def test_one_of_another_kind_is_not_given_out(base_image: str) -> None:
    async def body(engine: WarmEngine) -> None:
        engine.prepare(base_image, workdir=WORKDIR, limits=Limits())
        await until(1)
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits(pids=99)):
            await until(2)

    in_engine(body)


def test_one_that_died_while_it_waited_is_not_given_out(base_image: str) -> None:
    async def body(engine: WarmEngine) -> None:
        engine.prepare(base_image, workdir=WORKDIR, limits=Limits())
        [waiting] = await until(1)
        subprocess.run(["docker", "kill", waiting], check=True, capture_output=True)
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            assert (await sandbox.run("echo alive")).text == "alive\n"

    in_engine(body)


def test_no_more_wait_than_the_bound(base_image: str) -> None:
    async def body(engine: WarmEngine) -> None:
        for _ in range(5):
            engine.prepare(base_image, workdir=WORKDIR, limits=Limits())
        await until(2)
        await trio.sleep(0.5)
        assert len(own_containers(RUN)) == 2

    in_engine(body)


def test_an_image_that_is_missing_is_said_to_who_asks(base_image: str) -> None:
    async def body(engine: WarmEngine) -> None:
        engine.prepare("swe-env/no-such-image:1", workdir=WORKDIR, limits=Limits())
        with pytest.raises(ImageUnavailable):
            async with engine.sandbox("swe-env/no-such-image:1", workdir=WORKDIR, limits=Limits()):
                pass

    in_engine(body)
