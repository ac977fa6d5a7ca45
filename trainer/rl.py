"""Reinforcement learning on the batches that appear in a directory, as a process.

`swe-env train` starts this as `python -m trainer.rl CONFIG.json` (:class:`Asked`); with several ranks it
starts torchrun in its own place. Step N waits for `batches/step-N.json`, learns from the groups of episodes
that it names, writes `weights/step-N+1` (or sends them to the server) and what these weights say of the probe
streams, and prints one line of JSON. Killed at any moment and started again, it goes on from its newest
checkpoint and takes the same steps again, from the same batches.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from transformers.utils import logging as transformers_logging

from swe_env.episode import Episode
from swe_env.rundir import RunError, appearing, write_atomic
from swe_env.train_dir import Ready, StepRow, TrainDir
from swe_env.training import TrainConfig
from swe_env.vllm_launcher import die_with_parent
from swe_env.weight_client import UpdateFailed
from trainer.advantages import Advantages, advantages
from trainer.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from trainer.model import barrier, load_scorer, rank, ranks, save_model
from trainer.packing import MicroBatch, Stream, pack, streams
from trainer.processes import fail, is_torchrun, process_group, run_ranks, stop_on_term
from trainer.scoring import Scorer, Scores
from trainer.step import StepReport, Trainer, make_trainer, policy_step

POLL = 0.05
"""Between two looks for the next batch [s]."""


class Asked(BaseModel):
    """What this process is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: TrainConfig
    directory: Path
    server: str | None = None
    """Where weights are sent by NCCL; None: the server reads them from the directory."""


def train(asked: Asked, show: Callable[[BaseModel], None], device: torch.device | str = "cpu") -> None:
    """Take all steps that are left. A collective: every rank calls it with the same `asked`.

    `show` is called, on the first rank, with :class:`Ready` and then a :class:`StepRow` a step, when its
    weights are on disk, or in the server. Raises `CheckpointError` and `PackingError`, OSError where the disk
    does not take weights, :class:`RunError` for an episode that cannot be read, `UpdateFailed`.
    """
    config, where = asked.config, TrainDir(asked.directory)
    scorer = load_scorer(where.weights(0), config.trainer, device)
    trainer = make_trainer(scorer, config.schedule, config.trainer)
    last = (load_checkpoint(trainer, where.checkpoints) or {}).get("row")
    with _publisher(scorer, asked) as publish:
        publish(trainer.steps)  # what was written may have been removed since the checkpoint
        if rank() == 0:
            show(Ready.model_validate({"ready": trainer.steps, "last": last}))
        while trainer.steps < config.steps:
            step = trainer.steps
            idle = _wait_for(where.batch(step))
            batch = where.read_batch(step)
            episodes = [one for group in batch.groups for one in where.group(group).episodes()]
            row = learn(trainer, episodes, config)
            dropped = dict(Counter(batch.dropped.values()))
            of_batch = {"reward": batch.reward, "dropped": dropped, "idle_seconds": idle}
            row = row.model_copy(update=of_batch)
            version = trainer.steps
            publish(version)
            if version % config.trainer.checkpoint_every == 0 or version == config.steps:
                position = {"row": row.model_dump(mode="json")}
                save_checkpoint(trainer, where.checkpoints, position, keep=config.trainer.keep)
            if rank() == 0:
                show(row)


@contextmanager
def _publisher(scorer: Scorer, asked: Asked) -> Generator[Callable[[int], None]]:
    """What is called with the version that the present weights are. A collective."""
    config, where = asked.config, TrainDir(asked.directory)
    if asked.server is None:
        yield partial(write_weights, scorer, where)
        return
    from trainer.nccl_sender import sender  # vLLM takes seconds to import

    with sender(scorer, where.weights(0), asked.server, deadline=config.server.update_seconds) as sending:

        def publish(version: int) -> None:
            if config.is_kept(version):
                write_weights(scorer, where, version)
            else:
                probe_weights(scorer, where, version)
            if not where.batch(version).exists():  # else it is played already: the step is taken again
                sending.send(version)

        yield publish


def learn(trainer: Trainer, episodes: Sequence[Episode], config: TrainConfig) -> StepRow:
    """One optimiser step from a batch of episodes. A collective.

    A batch in which no group has a spread changes nothing, and counts as a skipped step. Raises
    :class:`RunError` for a token that is older than `async.max_off_policy_steps` allows, or of the future.
    """
    began = time.monotonic()
    worth = advantages(episodes, config.advantage)
    found: list[Stream] = []
    for episode in episodes:
        if episode.id in worth.by_episode:
            found += streams(episode, worth.by_episode[episode.id])
            _refuse_stale(episode, trainer.steps, config.asynchronous.max_off_policy_steps)
    done = None
    if found:
        batches = pack(found, budget=config.trainer.micro_batch_tokens, ranks=ranks())[rank()]
        done = policy_step(
            trainer,
            batches,
            config.loss,
            temperature=config.rollout.sampling.temperature,
            version=trainer.steps,
        )
    else:
        trainer.steps += 1
        trainer.skipped += 1
    return _row(trainer.steps - 1, episodes, worth, done, seconds=time.monotonic() - began)


def _refuse_stale(episode: Episode, step: int, most: int) -> None:
    for segment in episode.segments:
        for version in segment.policy_versions:
            if version is not None and not step - most <= version <= step:
                raise RunError(
                    f"{episode.id} has a token of version {version}, and step {step} may learn from "
                    f"{step - most} to {step}: a fault of swe-env, please report it"
                )


def write_weights(scorer: Scorer, where: TrainDir, version: int) -> None:
    """Write the present weights, where they are not there yet, and what they say of the probe streams.

    A collective.
    """
    if not _seen_by_all(where.weights(version)):
        with appearing(where.weights(version)) if rank() == 0 else nullcontext(Path()) as draft:
            save_model(scorer, where.weights(0), draft)
    probe_weights(scorer, where, version)


def probe_weights(scorer: Scorer, where: TrainDir, version: int) -> None:
    """Write what the present weights say of the probe streams: a log-probability for every token but the
    first, at temperature 1. A collective."""
    known: list[list[int]] = json.loads(where.streams.read_text())
    said: list[list[float]] = []
    for ids in known:
        with torch.no_grad():
            scores: Scores = scorer(_all_predicted(ids).to(next(scorer.parameters()).device))
        said.append([float(logprob) for logprob in scores.logprobs])
    if rank() == 0:
        write_atomic(where.probe(version), json.dumps(said).encode())
    barrier()


def _all_predicted(ids: list[int]) -> MicroBatch:
    """One stream, all of whose tokens but the first are to be scored."""
    count = len(ids)
    stream = Stream(ids, [False] + [True] * (count - 1), [0.0] * count, [0] * count, 0.0, "probe")
    return pack([stream], budget=count)[0][0]


def _row(
    step: int, episodes: Sequence[Episode], worth: Advantages, done: StepReport | None, *, seconds: float
) -> StepRow:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    turns = sum(len(episode.turns) for episode in episodes)
    learnt: dict[str, float] = {name: getattr(done, name, 0) for name in _LEARNT}  # 0 where done is None
    return StepRow.model_validate(
        {
            "step": step,
            "episodes": len(episodes),
            "invalid": worth.invalid,
            "reward": sum(rewards) / max(1, len(rewards)),
            "turns": turns / max(1, len(episodes)),
            "groups": worth.groups,
            "without_spread": worth.without_spread,
            "shares": _shares(episodes),
            "overhead": sum(one.timings.environment for one in episodes) / max(1, turns),
            "skipped": done is None or done.skipped,
            "losses": done.losses.model_dump() if done is not None and done.losses is not None else {},
            "train_seconds": seconds,
            **learnt,
        }
    )


def _shares(episodes: Sequence[Episode]) -> dict[str, float]:
    """Where their wall time went; what is left of 1 is capture of the patch, and the end of the sandbox."""
    total = max(1e-9, sum(episode.timings.total for episode in episodes))
    stages = ("start", "model", "commands", "environment", "grade")
    return {name: sum(getattr(one.timings, name) for one in episodes) / total for name in stages}


_LEARNT = ("loss", "action_nll", "grad_norm", "learning_rate", "tokens", "action_tokens")


def _wait_for(batch: Path) -> float:
    """Until it is there [s]. Whoever makes it also ends this process."""
    began = time.monotonic()
    while not batch.exists():
        time.sleep(POLL)
    barrier()
    return time.monotonic() - began


def _seen_by_all(path: Path) -> bool:
    """Whether it was there when every rank looked."""
    there = path.exists()
    barrier()  # all have looked before one of them writes
    return there


def main() -> None:
    asked = Asked.model_validate_json(Path(sys.argv[1]).read_bytes())
    die_with_parent()
    if is_torchrun(asked.config.trainer):
        run_ranks(asked.config.trainer, "trainer.rl", sys.argv[1])
        return
    signal.signal(signal.SIGTERM, stop_on_term)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers_logging.disable_progress_bar()
    try:
        with process_group() as device:
            train(asked, lambda line: print(line.model_dump_json(), flush=True), device)
    except (RunError, CheckpointError, UpdateFailed, OSError, ValueError) as error:
        fail(error)


if __name__ == "__main__":
    main()
