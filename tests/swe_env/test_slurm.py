"""The Slurm script, as far as it goes without a cluster: what it would have started, and where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sandboxes.conftest import REPOSITORY
from tests.swe_env.trainings import SMALL

SCRIPT = "configs/slurm/train.sbatch"
CONFIG = (
    SMALL
    + """[server]
environment = { OMP_NUM_THREADS = "1" }
"""
)


def submit(tmp_path: Path, *nodes: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it as a job on these nodes: all of Slurm that it asks is their names."""
    control, program = tmp_path / "scontrol", tmp_path / "swe-env"
    control.write_text("#!/bin/sh\n" + "".join(f"echo {node}\n" for node in nodes))
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m swe_env "$@"\n')
    config = tmp_path / "train.toml"
    config.write_text(CONFIG)
    for file in (control, program):
        file.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", SCRIPT, str(config), str(tmp_path / "run"), "--dry-run"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ
        | {"PATH": path, "SLURM_JOB_NODELIST": "n[1-6]", "SWE_ENV": str(program)}
        | environment,
    )


def test_each_node_trains_serves_or_plays(tmp_path: Path) -> None:
    done = submit(tmp_path, *(f"n{number}" for number in range(1, 7)), TRAINERS="3", WORKERS="1", GPUS="4")
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    one = "srun --overlap --nodes=1 --ntasks=1 --nodelist="
    assert said["trainer, 12 ranks"].startswith("srun --overlap --nodes=3 --ntasks=3 --nodelist=n1,n2,n3 ")
    assert "-m trainer.rl" in said["trainer, 12 ranks"]
    for index, node in enumerate(("n4", "n5")):
        server = said[f"server {index}"]
        assert server.startswith(f"{one}{node} env OMP_NUM_THREADS=1 ")
        assert "--host 0.0.0.0" in server
    assert "server 2" not in said
    assert said["worker 0"].startswith(f"{one}n6 ")
    assert "-m swe_env.rollout_worker" in said["worker 0"]


def test_too_few_nodes_are_refused(tmp_path: Path) -> None:
    done = submit(tmp_path, "n1", "n2", TRAINERS="1", WORKERS="1")
    assert done.returncode == 2
    assert done.stderr.startswith("2 nodes leave none to serve")
