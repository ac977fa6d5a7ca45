"""A training, each of whose processes is killed while it runs, or stopped for a while."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swe_env.train_dir import TrainDir
from tests.conftest import needs_oci
from tests.sandboxes.conftest import REPOSITORY
from tests.swe_env.chaos import BLOWS, assert_is_whole, strike, training
from tests.swe_env.trainings import untaught

pytestmark = [
    pytest.mark.docker,
    pytest.mark.vllm,
    needs_oci,  # root among it, who may mount a small disk
]


def test_whatever_is_killed_a_training_comes_to_its_end_and_nothing_is_lost_or_taken_twice(
    base_image: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    draw, steps = random.Random(seed), 4 * len(BLOWS)
    print(f"seed {seed}")
    config, out = tmp_path / "chaos.toml", tmp_path / "run"
    config.write_text(untaught(steps=steps, sandbox="oci", servers=2))
    with training(config, out) as running:
        strike(TrainDir(out), running, iter(draw.sample(BLOWS, len(BLOWS))), draw)
        print(running.said())
    assert_is_whole(TrainDir(out), steps)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_ends_a_training_with_a_word_and_with_space_the_same_command_goes_on(
    base_image: str, tmp_path: Path, small_disk: Path
) -> None:
    config, out, steps = tmp_path / "chaos.toml", small_disk / "run", 6
    config.write_text(untaught(steps=steps, sandbox="oci"))
    argv = [sys.executable, "-m", "swe_env", "train", str(config), "--out", str(out)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        said = ""
        while "step 1 of" not in said:
            said += process.stdout.readline()
        fill = ["dd", "if=/dev/zero", f"of={small_disk}/filler", "bs=64k"]
        subprocess.run(fill, capture_output=True)  # until there is no space
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert "No space left on device" in said.splitlines()[-1]
    assert "Traceback" not in said
    (small_disk / "filler").unlink()

    again = subprocess.run(argv, capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert_is_whole(TrainDir(out), steps)
