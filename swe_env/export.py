"""`swe-env export`: a trained policy on its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from swe_env.rundir import RunError, appearing
from swe_env.train_dir import EvaluationRow, TrainDir


def export_model(where: TrainDir, out: Path, version: int | None = None) -> int:
    """Copy the weights of `version` to `out`, which appears whole; returns the version.

    None takes the one that solved most held-out tasks, or the newest where nothing was held out. Raises
    :class:`RunError` if there are no such weights, or `out` exists.
    """
    there = where.versions()
    if not there:
        raise RunError(f"{where.path} has no weights: give the --out of `swe-env train`")
    if version is None:
        solved = {row.step: row.solved for row in where.rows() if isinstance(row, EvaluationRow)}
        version = max(there, key=lambda one: (solved.get(one, -1.0), one))
    if version not in there:
        kept = ", ".join(map(str, there))
        raise RunError(f"the weights of version {version} are not kept: choose one of {kept}")
    if out.exists():
        raise RunError(f"{out} exists: choose another --out, or remove it")
    with appearing(out) as draft:
        for file in sorted(where.weights(version).iterdir()):
            if file.is_file():
                shutil.copyfile(file, draft / file.name)
    return version
