"""Episodes to learn from, made without a policy."""

from __future__ import annotations

import json
import random
from pathlib import Path

from agents.conversation import Segment
from agents.loop import End
from swe_env.episode import Episode
from swe_env.pool import Batch
from swe_env.rundir import RunSpec, write_atomic
from swe_env.train_dir import TrainDir
from trainer.tiny_model import make_tiny_model


def episode(name: str, group: str, reward: float | None, draw: random.Random, version: int = 0) -> Episode:
    """Twenty tokens read, thirty sampled."""
    ids = [draw.randrange(900) for _ in range(50)]
    is_action = [position >= 20 for position in range(50)]
    segment = Segment(
        token_ids=ids,
        is_action=is_action,
        logprobs=[-5.0 - draw.random() if action else None for action in is_action],
        policy_versions=[version if action else None for action in is_action],
    )
    return Episode(
        id=name,
        task_id=group,
        group_id=group,
        policy="vllm:test",
        end=End.SUBMITTED if reward is not None else End.SANDBOX_LOST,
        reward=reward,
        segments=[segment],
    )


def training(path: Path, *, batches: int) -> TrainDir:
    """A tiny model, streams to compare it on, and the batches of that many steps."""
    found, draw = TrainDir(path), random.Random(0)
    make_tiny_model(found.weights(0))
    found.streams.parent.mkdir()
    write_atomic(found.streams, json.dumps([[1, 2, 3, 4], [9, 8, 7]]).encode())
    spec = RunSpec(
        policy="vllm", tasks_sha256="", prompts_sha256="", tokenizer_sha256="", budget={}, version=""
    )
    found.batch(0).parent.mkdir()
    for step in range(batches):
        for group in (2 * step, 2 * step + 1):
            found.group(group).begin(spec)
            for member in range(2):
                name = f"task-{group}"
                found.group(group).save(episode(f"{name}--{member}", name, float(member), draw, version=step))
        batch = Batch(step=step, groups=[2 * step, 2 * step + 1])
        write_atomic(found.batch(step), batch.model_dump_json().encode())
    return found
