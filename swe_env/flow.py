"""How many episodes may be in flight: fewer while the servers or this machine are pressed, then more again.

A server is pressed when it throws away what it had computed, for want of KV cache (preemption), or when more
requests wait in it than run: episodes begun then would only grow stale in its queue. This machine is when its
memory runs out, or commands would take so long that they run into their time limits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import trio
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict

LOOK = 5.0
"""Between two looks [s]."""
LEAST_MEMORY = 0.05
"""Of this machine's."""
MOST_LOAD = 32.0
"""Processes that run or want to, for each core: a command takes so many times as long."""


class Served(BaseModel):
    """What the servers say of themselves, summed."""

    model_config = ConfigDict(frozen=True)

    running: float = 0.0
    waiting: float = 0.0
    preemptions: float = 0.0
    """Since they started."""


class Flow:
    """The limit, between the bounds that the configuration sets. Starts at the upper one."""

    def __init__(self, *, least: int, most: int) -> None:
        self.limit = most
        """Episodes in flight."""
        self.reason = ""
        """Why it is less than the most."""
        self._least = min(least, most)
        self._most = most

    def look(self, pressed: str, *, is_used: bool) -> None:
        """Something is `pressed`, or nothing is (""). `is_used`: as many are in flight as may be."""
        if pressed:
            self.limit, self.reason = max(self._least, self.limit * 3 // 4), pressed
        elif is_used:
            self.limit = min(self._most, self.limit + self._least)


def pressure(before: Served, now: Served) -> str:
    """What is pressed; "" if nothing is."""
    if now.preemptions > before.preemptions:
        return "the server has too little KV cache"
    if now.waiting > now.running:
        return "more requests wait than run"
    if memory_left() < LEAST_MEMORY:
        return "this machine has too little memory"
    if runnable() / (os.cpu_count() or 1) > MOST_LOAD:
        return "this machine is overloaded"
    return ""


async def watch(flow: Flow, urls: Callable[[], Sequence[str]], in_flight: Callable[[], int]) -> None:
    """Keep the limit right until cancelled."""
    before = Served()
    async with httpx.AsyncClient(timeout=LOOK, trust_env=False) as client:
        while True:
            now = await served(client, urls())
            flow.look(pressure(before, now), is_used=in_flight() >= flow.limit)
            before = now
            await trio.sleep(LOOK)


async def served(client: httpx.AsyncClient, urls: Sequence[str]) -> Served:
    """Ask all of them. One that does not answer counts for nothing: others see to it."""
    found = dict.fromkeys(_NAMES.values(), 0.0)

    async def ask(url: str) -> None:
        try:
            text = (await client.get(f"{url}/metrics")).text
        except httpx.HTTPError:
            return
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _NAMES:
                    found[_NAMES[sample.name]] += sample.value

    async with trio.open_nursery() as nursery:
        for url in urls:
            nursery.start_soon(ask, url)
    return Served(**found)


_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
}


def runnable(file: Path = Path("/proc/loadavg")) -> int:
    """Processes and threads of this machine that run or want to, at this moment; 0 where nobody says.

    Not an average over a minute: that goes on complaining of what has already been put right.
    """
    try:
        return int(file.read_text().split()[3].split("/")[0])
    except (OSError, IndexError, ValueError):
        return 0


def memory_left(file: Path = Path("/proc/meminfo")) -> float:
    """Share of this machine's memory that can be had; 1.0 where nobody says."""
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        return 1.0
