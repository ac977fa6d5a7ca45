"""A training, each of whose processes is killed while it runs, or stopped for a while."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from swe_env.train_dir import TrainDir
from tests.swe_env.chaos import BLOWS, CONFIG, assert_is_whole, processes, strike, training

pytestmark = [pytest.mark.docker, pytest.mark.vllm]


def test_whatever_is_killed_a_training_comes_to_its_end_and_nothing_is_lost_or_taken_twice(
    base_image: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    draw, steps = random.Random(seed), 4 * len(BLOWS)
    print(f"seed {seed}")
    config, out = tmp_path / "chaos.toml", tmp_path / "run"
    config.write_text(CONFIG.format(steps=steps, sandbox="oci"))
    with training(config, out) as running:
        strike(TrainDir(out), running, iter(draw.sample(BLOWS, len(BLOWS))), draw)
        print(running.said())
    assert_is_whole(TrainDir(out), steps)

    began = time.monotonic()
    while left := [line for pid, line in processes() if str(out) in line]:  # they notice
        assert time.monotonic() - began < 20, left
        time.sleep(0.1)
