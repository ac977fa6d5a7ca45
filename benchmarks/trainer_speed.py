"""A training step: how fast, against the loop that one would write with transformers and AdamW?

    python benchmarks/trainer_speed.py [--streams N] [--repeats R] [--shape glm]

Both ways train the same tiny model with the same loss (IPO) on the same streams, in turns, float32 on CPU.
`padded` lays streams side by side, pads them to the longest, and computes all logits; 8 streams a forward
pass, gradients accumulated. `packed` is this project's step. Lengths are log-normal around 350 tokens with a
third of them sampled, as episodes of the tiny training are. Medians, and the ratio of tokens (without
padding) in a second. The two must take the same step: their losses are compared. Exit code 1 if they
differ, or if packed is not 1.2 times as fast.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from swe_env.training import Ipo, ModelConfig, OptimiserConfig
from trainer.loss import ActionTokens, policy_loss
from trainer.model import load_scorer
from trainer.packing import Stream, pack
from trainer.step import Trainer, make_trainer, policy_step
from trainer.tiny_model import Shape, make_tiny_model

RATE = 1e-4
BESIDE = 8
"""Streams in a padded forward pass."""
BUDGET = 4096
"""Tokens in a packed one."""
GOAL = 1.2


def draw_streams(count: int) -> list[Stream]:
    draw = random.Random(0)
    found: list[Stream] = []
    for number in range(count):
        length = min(1024, max(60, round(draw.lognormvariate(5.86, 0.4))))
        is_action = [position > 40 and position % 30 < 10 for position in range(length)]
        found.append(
            Stream(
                token_ids=[draw.randrange(1000) for _ in range(length)],
                is_action=is_action,
                logprobs=[-7.0 + draw.random() if action else 0.0 for action in is_action],
                policy_versions=[0 if action else -1 for action in is_action],
                advantage=draw.choice([0.5, -0.5]),
                name=f"stream {number}",
            )
        )
    return found


def padded_step(model: Any, optimiser: torch.optim.AdamW, streams: Sequence[Stream]) -> float:
    """What one would write. Returns the loss."""
    total, actions = 0.0, sum(sum(stream.is_action) for stream in streams)
    for start in range(0, len(streams), BESIDE):
        beside = streams[start : start + BESIDE]
        longest = max(len(stream.token_ids) for stream in beside)

        def laid(values: list[list[Any]], fill: Any, longest: int = longest) -> torch.Tensor:
            return torch.tensor([one + [fill] * (longest - len(one)) for one in values])

        ids = laid([stream.token_ids for stream in beside], 0)
        mask = laid([[1] * len(stream.token_ids) for stream in beside], 0)
        is_action = laid([stream.is_action for stream in beside], False)[:, 1:]
        recorded = laid([stream.logprobs for stream in beside], 0.0)[:, 1:]
        advantages = torch.tensor([stream.advantage for stream in beside])[:, None].expand_as(recorded)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
        tokens = ActionTokens(logprobs[is_action], recorded[is_action], advantages[is_action])
        loss = policy_loss(tokens, Ipo(), global_actions=actions)
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    return total


def packed_step(trainer: Trainer, streams: Sequence[Stream]) -> tuple[float, float]:
    """This project's. Returns the loss, and the seconds that packing took."""
    began = time.perf_counter()
    [batches] = pack(streams, budget=BUDGET)
    packing = time.perf_counter() - began
    return policy_step(trainer, batches, Ipo(), version=0).loss, packing


def main(
    streams: Annotated[int, typer.Option(min=8, help="Of a step.")] = 64,
    repeats: Annotated[int, typer.Option(min=3)] = 9,
    shape: Annotated[str, typer.Option(help="glm, qwen or llama.")] = "glm",
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Measure both ways in turns."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    console = Console(highlight=False)
    made = draw_streams(streams)
    count = sum(len(stream.token_ids) for stream in made)
    with tempfile.TemporaryDirectory() as scratch:
        kind: Shape = "glm" if shape == "glm" else "qwen" if shape == "qwen" else "llama"
        make_tiny_model(Path(scratch), shape=kind)
        model: Any = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)
        model.train()
        trainer = make_trainer(
            load_scorer(Path(scratch), ModelConfig()), OptimiserConfig(learning_rate=RATE, clip_norm=1.0)
        )
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    seconds: dict[str, list[float]] = {"padded": [], "packed": []}
    packing, apart = list[float](), 0.0
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        theirs = padded_step(model, optimiser, made)
        between = time.perf_counter()
        ours, packed_in = packed_step(trainer, made)
        ended = time.perf_counter()
        apart = max(apart, abs(ours - theirs) / abs(theirs))
        if repeat:  # the first is a warm-up
            seconds["padded"].append(between - began)
            seconds["packed"].append(ended - between)
            packing.append(packed_in)
    rate = {name: count / median(values) for name, values in seconds.items()}
    ratio = rate["packed"] / rate["padded"]
    console.print(
        f"{streams} streams, {count:,} tokens a step, {shape}, {repeats} repeats, {threads} threads"
    )
    table = Table()
    for column in ("way", "step s", "tokens/s", "ratio"):
        table.add_column(column, justify="right")
    for name, values in seconds.items():
        relative = rate[name] / rate["padded"]
        table.add_row(name, f"{median(values):.3f}", f"{rate[name]:,.0f}", f"{relative:.2f}")
    console.print(table)
    share = median(packing) / median(seconds["packed"])
    console.print(
        f"packing takes {share:.1%} of a packed step; losses differ by at most {apart:.1e}, relatively"
    )
    if apart > 1e-3 or ratio < GOAL:
        sys.exit(f"goal missed: {ratio:.2f} of at least {GOAL}, losses apart by {apart:.1e}")


if __name__ == "__main__":
    typer.run(main)
