"""What every process that trains begins with: its rank, its device, and how it is told to stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist


@contextmanager
def process_group() -> Generator[torch.device]:
    """What torchrun arranged, if it did: the group of ranks, and this one's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield device
    finally:
        if together:
            dist.destroy_process_group()


def stop_on_term(*_: object) -> NoReturn:
    """A handler of SIGTERM. SystemExit: drafts are removed on the way out."""
    sys.exit(143)
