"""On paper: what some number of nodes would do with GLM-4.5-Air. The tables of docs/scaling.md.

    python benchmarks/scaling.py [--tokens 40000] [--sampled 12000] [--turns 40] [--command 1.0]

Nothing is measured here. What was measured elsewhere comes in by the options: processor seconds that a worker
takes for a turn (docs/scaling.md says how), tokens and turns of an episode, seconds of a command.
"""

from __future__ import annotations

from dataclasses import dataclass

import typer
from rich.console import Console
from rich.table import Table

# GLM-4.5-Air (configs/models/glm-4.5-air/config.json)
WEIGHTS = 213.8e9
"""bfloat16 [bytes]."""
ACTIVE = 12.8e9
"""Parameters that a token goes through."""
LAYERS, HEADS = 46, 96 * 128
CACHE = 2 * LAYERS * 8 * 128 * 2
"""Of a token [bytes]."""
# a node of eight H200
GPUS, MEMORY, BANDWIDTH, FLOPS = 8, 141e9, 4.8e12, 989e12
# assumptions
DECODES, PREFILLS, TRAINS = 0.67, 0.4, 0.3
"""Shares of the bandwidth and of the arithmetic that are used."""
EPISODES = 256
"""Of an optimiser step."""
COLUMNS = (
    "nodes", "train", "serve", "seconds a step", "episodes/hour", "sandboxes", "cores of commands",
    "cores of workers", "published, GB/s",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """An episode."""

    tokens: int
    sampled: int
    turns: int
    command: float
    turn_cpu: float


def served(shape: Shape) -> tuple[float, float, float]:
    """Of one serving node: episodes in flight, seconds between two tokens of one, episodes an hour."""
    middle = shape.tokens / 2  # an episode is half as long, on the average over its life
    in_flight = (GPUS * MEMORY * 0.9 - WEIGHTS) / CACHE / middle
    token = (WEIGHTS + in_flight * middle * CACHE) / (GPUS * BANDWIDTH * DECODES)
    read = (shape.tokens - shape.sampled) * (2 * ACTIVE + 4 * LAYERS * HEADS * middle)
    seconds = shape.sampled * token / in_flight + read / (GPUS * FLOPS * PREFILLS)
    return in_flight, token, 3600 / seconds


def trained(shape: Shape, nodes: int) -> float:
    """Seconds of an optimiser step: activations are computed twice, attention is quadratic."""
    token = (6 * ACTIVE + 12 * LAYERS * HEADS * shape.tokens / 2) * 4 / 3
    return EPISODES * shape.tokens * token / (nodes * GPUS * FLOPS * TRAINS)


def split(shape: Shape, nodes: int) -> int:
    """Of these nodes, how many train so that neither side waits much."""

    def slowest(training: int) -> float:
        return max(trained(shape, training), 3600 * EPISODES / ((nodes - training) * served(shape)[2]))

    return min(range(1, nodes), key=slowest)


def main(
    tokens: int = 40_000, sampled: int = 12_000, turns: int = 40, command: float = 1.0, turn_cpu: float = 0.01
) -> None:
    shape = Shape(tokens, sampled, turns, command, turn_cpu)
    in_flight, token, hourly = served(shape)
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    life = shape.sampled * token + shape.turns * shape.command
    for nodes in (2, 8, 16, 64):
        training = split(shape, nodes)
        serving = nodes - training
        seconds = max(trained(shape, training), 3600 * EPISODES / (serving * hourly))
        sandboxes = serving * in_flight
        turns_a_second = EPISODES * shape.turns / seconds
        table.add_row(
            str(nodes),
            str(training),
            str(serving),
            f"{seconds:,.0f}",
            f"{3600 * EPISODES / seconds:,.0f}",
            f"{sandboxes:,.0f}",
            f"{sandboxes * shape.turns * shape.command / life:,.0f}",
            f"{turns_a_second * shape.turn_cpu:.1f}",
            f"{(1 + serving) * WEIGHTS / 1e9 / seconds:,.1f}",
        )
    print(f"{tokens:,} tokens an episode: {in_flight:.0f} in flight on a serving node, ", end="")
    print(f"{1000 * token:.0f} ms a token")
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
