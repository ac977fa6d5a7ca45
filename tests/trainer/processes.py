"""Processes that begin with torch already loaded: one server imports it, the others are its forks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

METHOD = "forkserver"
FORKS = multiprocessing.get_context(METHOD)
FORKS.set_forkserver_preload(["trainer.checkpoint", "trainer.step"])


def together(ranks: int, work: Callable[..., None], meet: Any, *arguments: Any) -> None:
    """`work(rank, *arguments)` in a gloo group of `ranks` processes; raises if one of them does."""
    mp.start_processes(_join, (ranks, str(meet), work, arguments), nprocs=ranks, start_method=METHOD)


def _join(rank: int, ranks: int, meet: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    try:
        work(rank, *arguments)
    finally:
        dist.destroy_process_group()
