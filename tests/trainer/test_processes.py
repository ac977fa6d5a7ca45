"""Ranks under torchrun: whoever started them sees why the first of them failed, or that it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

START = """
from swe_env.training import TrainerConfig
from trainer.processes import run_ranks

run_ranks(TrainerConfig(ranks=2), "rank")
"""
FAILS = """
import os, time
from trainer.processes import fail

if os.environ["RANK"] == "1":
    fail(ValueError("episode 7 has no tokens:\\n  remove it"))
time.sleep(60)
"""
IS_KILLED = """
import os, signal, time

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("rank", "code", "last"),
    [(FAILS, 1, "episode 7 has no tokens: remove it"), (IS_KILLED, -signal.SIGKILL, None)],
)
def test_the_end_of_one_rank_is_the_end_of_all_and_says_which_it_was(
    tmp_path: Path, rank: str, code: int, last: str | None
) -> None:
    (tmp_path / "rank.py").write_text(rank)
    done = subprocess.run(
        [sys.executable, "-c", START],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    if last is not None:
        assert done.stderr.strip().splitlines()[-1] == last
