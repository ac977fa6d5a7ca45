"""Supervised training on episodes: a model that does what the policy of these episodes did.

`swe-env sft` starts this as `python -m trainer.sft CONFIG.json` (:class:`swe_env.sft.SftConfig`); for several
ranks, `torchrun --nproc-per-node N -m trainer.sft CONFIG.json`. Each step is one line of JSON on standard
output and in `metrics.jsonl`. The model directory appears when training is done, whole or not at all.

Not done: resuming. An interrupted training leaves nothing and begins again.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from swe_env.episode import Episode
from swe_env.rundir import RunDir, RunError, appearing
from swe_env.sft import Progress, SftConfig, tokenizer_sha256
from swe_env.training import ModelConfig, OptimiserConfig
from swe_env.vllm_launcher import die_with_parent
from swe_env.where import parse_where
from trainer.model import load_scorer, rank, ranks, save_model
from trainer.packing import Stream, pack, streams
from trainer.processes import fail, process_group, stop_on_term
from trainer.step import make_trainer, supervised_step


def train(config: SftConfig, show: Callable[[Progress], None], device: torch.device | str = "cpu") -> None:
    """Train `config.model` on the episodes asked for, write `config.out`, and call `show` for every step.

    A collective: every rank calls it with the same `config`. Raises :class:`RunError` where there is nothing
    to train on, `PackingError` for a stream longer than a micro-batch, FileExistsError if `out` exists.
    """
    with appearing(config.out) if rank() == 0 else nullcontext(config.out) as draft:
        made = demonstrations(chosen(config))
        lengths = [len(stream.token_ids) for stream in made]
        steps = plan_steps(lengths, batch_tokens=config.batch_tokens, epochs=config.epochs, seed=config.seed)
        held = ModelConfig.model_validate(
            config.model_dump(include={"compute_dtype", "activation_checkpointing", "shard"})
        )
        scorer = load_scorer(config.model, held, device)
        _check_vocabulary(made, scorer.model.config.vocab_size, config)
        trainer = make_trainer(
            scorer,
            OptimiserConfig(
                learning_rate=config.learning_rate,
                warmup_steps=len(steps) // 20,
                decay="linear",
                total_steps=len(steps),
            ),
            held,
        )
        budget = min(config.micro_batch_tokens or config.batch_tokens, config.batch_tokens)
        for epoch, indices in steps:
            own = pack([made[index] for index in indices], budget=budget, ranks=ranks())[rank()]
            done = supervised_step(trainer, own, other_weight=config.other_weight)
            values = {name: getattr(done, name) for name in Progress.model_fields if hasattr(done, name)}
            progress = Progress(epoch=epoch, steps=len(steps), **values)
            if rank() == 0:
                with (draft / "metrics.jsonl").open("a") as file:
                    file.write(progress.model_dump_json() + "\n")
                show(progress)
        if trainer.skipped == len(steps):
            raise RunError(
                "no step had a finite loss and gradient, nothing was learnt: "
                "check the weights of the model, or lower --learning-rate"
            )
        save_model(scorer, config.model, draft)


def chosen(config: SftConfig) -> list[Episode]:
    """The episodes that `config` asks for. Raises :class:`RunError` if there are none, or none that fit."""
    condition = parse_where(config.where)
    every = RunDir(config.episodes).episodes()
    found = [episode for episode in every if condition(episode)]
    if not found:
        raise RunError(
            f"{config.episodes} has {len(every)} episodes and none with {config.where or 'tokens'}"
        )
    expected = tokenizer_sha256(config.model)
    for episode in found:
        if episode.tokenizer_sha256 not in ("", expected):
            raise RunError(
                f"episode {episode.id} was played with another tokenizer than that of {config.model}: "
                "train the model that it was played for"
            )
    return found


def demonstrations(episodes: Sequence[Episode]) -> list[Stream]:
    """What the policies of `episodes` did, as streams. Raises :class:`RunError` if they did nothing."""
    found = [stream for episode in episodes for stream in streams(episode, 1.0, logprobs_required=False)]
    if not found:
        raise RunError(f"none of these {len(episodes)} episodes has a token of the policy's: choose others")
    return found


def plan_steps(
    lengths: Sequence[int], *, batch_tokens: int, epochs: int, seed: int
) -> list[tuple[int, list[int]]]:
    """Optimiser steps as (epoch from 0, indices into `lengths`), at most `batch_tokens` tokens each.

    Every epoch takes each stream once, in an order of its own. A stream longer than `batch_tokens` is a step
    by itself (packing will refuse it). Nothing depends on ranks.
    """
    steps: list[tuple[int, list[int]]] = []
    for epoch in range(epochs):
        order = list(range(len(lengths)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        batch, filled = list[int](), 0
        for index in order:
            if batch and filled + lengths[index] > batch_tokens:
                steps.append((epoch, batch))
                batch, filled = [], 0
            batch.append(index)
            filled += lengths[index]
        steps.append((epoch, batch))
    return steps


def _check_vocabulary(made: Sequence[Stream], size: int, config: SftConfig) -> None:
    largest = max(max(stream.token_ids) for stream in made)
    if largest >= size:
        raise RunError(
            f"{config.episodes} has token {largest}, and {config.model} only {size} of them: "
            "train the model that the episodes were played for"
        )


def main() -> None:
    signal.signal(signal.SIGTERM, stop_on_term)
    die_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers_logging.disable_progress_bar()
    try:
        config = SftConfig.model_validate_json(Path(sys.argv[1]).read_bytes())
        with process_group() as device:
            train(config, lambda progress: print(progress.model_dump_json(), flush=True), device)
    except (RunError, OSError, ValueError) as error:
        fail(error)


if __name__ == "__main__":
    main()
