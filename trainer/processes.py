"""What every process that trains has: its rank, its device, how it is told to stop, and how it fails."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swe_env.training import TrainerConfig


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


def is_torchrun(config: TrainerConfig) -> bool:
    """Whether this process is to start the ranks, and is none itself."""
    return config.ranks > 1 and "RANK" not in os.environ


def run_ranks(config: TrainerConfig, *command: str) -> None:
    """Start this node's ranks of `python -m command` by torchrun, and wait for their end.

    If one fails, the others are ended, and this process fails as the first did: with its last words, or by
    the same signal, so that whoever started it sees which it was.
    """
    arguments = [f"--nproc-per-node={config.ranks // config.nodes}"]
    if config.nodes > 1:
        arguments += [
            f"--nnodes={config.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={config.rendezvous}",
        ]
    try:
        cast("Any", torchrun).main([*arguments, "-m", *command])
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode < 0:
            os.kill(os.getpid(), -first.exitcode)
        sys.exit(first.message)


def fail(error: Exception) -> NoReturn:
    """End this process with an error that is the world's, in one line; torchrun hears it too."""
    message = " ".join(str(error).split())
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    sys.exit(message)
