"""The trainer on one GPU: does it run, how many tokens a second, what share of the arithmetic is used?

    python benchmarks/gpu_trainer.py [--steps N] [--tokens N] [--tiny]

A GLM-4.5-shaped model of 0.7 billion random weights, sharded by FSDP2 over one rank, bfloat16, activations
computed again; streams of log-normal lengths, packed; IPO. Before the first step, what the model says of
streams that are packed is compared with what it says of each alone, and all four losses are taken with their
gradients. Minutes on a GPU. `--tiny` takes the tiny model: to see on a CPU that the script works. MFU counts
8 FLOPs an active parameter and token (2 are for what is computed again), and attention, of the 989 TFLOP/s of
an H100 or H200.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from trainer_speed import draw_streams
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.utils import logging as transformers_logging

from swe_env.footprint import PEAK
from swe_env.training import Dppo, IcePop, Ipo, ModelConfig, OptimiserConfig, Unmasked
from trainer.footprint import footprint
from trainer.loss import ActionTokens, policy_loss
from trainer.model import load_scorer
from trainer.packing import pack
from trainer.scoring import Scorer
from trainer.step import make_trainer, policy_step
from trainer.tiny_model import make_tiny_model

APART = 0.05
"""Mean difference of a logprob, packed or alone, in bfloat16 [nats]."""


def make_model(directory: Path) -> None:
    """0.7 billion random weights, of which 0.3 billion are met by a token."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=151_552,
        hidden_size=1024,
        intermediate_size=2816,
        moe_intermediate_size=512,
        num_hidden_layers=14,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        tie_word_embeddings=True,
    )
    model: Any = Glm4MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def logprobs_of(scorer: Scorer, made: list[Any], budget: int, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(
            [scorer(batch.to(device)).logprobs.float() for batch in pack(made, budget=budget)[0]]
        )


def check_losses(device: torch.device) -> None:
    """Loss and gradient of each are finite on this device, at the extremes too."""
    pairs = torch.tensor([[-2.0, -91.0], [-91.0, -2.0], [0.0, 0.0], [-1.0, -float("inf")]], device=device)
    for loss in (Ipo(), IcePop(), Dppo(), Unmasked()):
        learnt = pairs[:, 0].clone().requires_grad_()
        tokens = ActionTokens(learnt, pairs[:, 1], torch.ones(4, device=device))
        value = policy_loss(tokens, loss, global_actions=4)
        value.backward()
        assert learnt.grad is not None
        if not (torch.isfinite(value) and torch.isfinite(learnt.grad).all()):
            sys.exit(f"{loss.kind}: loss {value}, gradient {learnt.grad}")


def main(
    steps: Annotated[int, typer.Option(min=2)] = 6,
    tokens: Annotated[int, typer.Option(help="Of a micro-batch.")] = 32_768,
    streams: Annotated[int, typer.Option(help="Of a step.")] = 256,
    tiny: bool = False,
) -> None:
    transformers_logging.disable_progress_bar()
    console = Console(highlight=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_losses(device)
    made = draw_streams(streams)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        (make_tiny_model if tiny else make_model)(directory)
        size = footprint(directory)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{scratch}/meet",
            rank=0,
            world_size=1,
        )
        config = ModelConfig(compute_dtype="bfloat16", activation_checkpointing=True, shard=True)
        scorer = load_scorer(directory, config, device)
    several = made[:8]
    together = logprobs_of(scorer, several, tokens, device)
    alone = torch.cat([logprobs_of(scorer, [one], tokens, device) for one in several])
    apart = float((together.sort().values - alone.sort().values).abs().mean())
    trainer = make_trainer(scorer, OptimiserConfig(learning_rate=1e-5))
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(steps):
        began = time.perf_counter()
        report = policy_step(trainer, pack(made, budget=tokens)[0], Ipo(), version=0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(report.loss)
    count = sum(len(stream.token_ids) for stream in made)
    rate = count / median(seconds[1:])  # the first is a warm-up
    mean = sum(len(stream.token_ids) ** 2 for stream in made) / count
    flops = 8 * size.active + 8 * size.layers * size.attention * mean
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    table = Table("what", "measured")
    table.add_row("device", name)
    table.add_row("parameters", f"{size.parameters / 1e9:.3f} billion, {size.active / 1e9:.3f} active")
    table.add_row("packed against alone", f"{apart:.1e} nats a token")
    table.add_row("losses", ", ".join(f"{loss:.4f}" for loss in losses))
    table.add_row("step", f"{median(seconds[1:]):.2f} s for {count:,} tokens")
    table.add_row("tokens/s", f"{rate:,.0f}")
    if device.type == "cuda":
        table.add_row("MFU", f"{rate * flops / PEAK:.1%}")
        table.add_row("memory", f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    console.print(table)
    dist.destroy_process_group()
    if apart > APART or not all(map(torch.isfinite, map(torch.tensor, losses))):
        sys.exit("packed and alone differ, or a loss is not finite")


if __name__ == "__main__":
    typer.run(main)
