"""Log-probabilities of tokens from hidden states: how much memory and time, against the naive way?

    python benchmarks/logprobs.py [--tokens N] [--vocabulary V] [--hidden H] [--repeats R] [--threads T]

Each way runs in processes of its own: forward and backward, to hidden states and head, float32, on the CPU.
Memory is the process's highest resident size less its size before the first pass; time is that of the
quickest pass after the first, on the clock and of the processors (which other work on the machine disturbs
less). `naive` is what one would write: logits, `log_softmax`, `gather`; `naive + entropy` computes what
`chunked` does. The naive ways hold three to four times the logits (16 GiB at the default size): what does
not fit in free memory is not started. Gradients of both are compared at a smaller size first. Exit code 1
if they differ, or if chunks need more than a quarter of the memory or more time than the naive way.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trainer.logprobs import token_logprobs

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ head.T, dim=-1).gather(1, targets[:, None])[:, 0]


def naive_with_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    every = torch.log_softmax(hidden @ head.T, dim=-1)
    with torch.no_grad():
        _ = -(every.exp() * every).sum(-1)
    return every.gather(1, targets[:, None])[:, 0]


def chunked(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, head, targets)[0]


WAYS: dict[str, Way] = {"naive": naive, "naive + entropy": naive_with_entropy, "chunked": chunked}
NEEDS = {"naive": 3.2, "naive + entropy": 4.2, "chunked": 0.5}
"""Times the size of the logits, to be on the safe side."""


def case(tokens: int, vocabulary: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, head = torch.randn(tokens, size), torch.randn(vocabulary, size) / size**0.5
    return hidden.requires_grad_(), head.requires_grad_(), torch.randint(vocabulary, (tokens,))


def passes(way: Way, hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    (way(hidden, head, targets) * torch.linspace(-1, 1, len(targets))).sum().backward()


def highest_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def free_gib() -> float:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 2**20


def differ() -> float:
    """Largest difference of gradients between the naive way and chunks, of the largest gradient."""
    worst = 0.0
    found: list[list[Tensor]] = []
    for way in (naive, chunked):
        hidden, head, targets = case(1024, 20_000, 64)
        passes(way, hidden, head, targets)
        assert hidden.grad is not None
        assert head.grad is not None
        found.append([hidden.grad, head.grad])
    for one, other in zip(*found, strict=True):
        worst = max(worst, float((one - other).abs().max() / one.abs().max()))
    return worst


class Measured(NamedTuple):
    peak: float
    """MiB."""
    seconds: float
    processor: float
    """Seconds, of all threads."""


def measure(name: str, *numbers: int) -> Measured:
    """One way in a process of its own. `numbers` are those of `child`."""
    command = [sys.executable, __file__, "--child", name, *map(str, numbers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(*map(float, done.stdout.split()))


def child(name: str, tokens: int, vocabulary: int, size: int, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    inputs = case(tokens, vocabulary, size)
    passes(WAYS[name], *case(64, 512, size))  # whatever is loaded at the first use
    before, times = resident_mib(), list[tuple[float, float]]()
    for _ in range(repeats + 1):
        begin, begin_processor = time.perf_counter(), time.process_time()
        passes(WAYS[name], *inputs)
        times.append((time.perf_counter() - begin, time.process_time() - begin_processor))
    print(highest_mib() - before, *map(min, zip(*times[1:], strict=True)))


def main(
    tokens: Annotated[int, typer.Option()] = 8192,
    vocabulary: Annotated[int, typer.Option()] = 151_552,
    hidden: Annotated[int, typer.Option()] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    console = Console()
    logits = tokens * vocabulary * 4 / 2**30
    difference = differ()
    table = Table(title=f"{tokens:,} tokens × {vocabulary:,}, hidden {hidden}: logits {logits:.1f} GiB")
    for column in ("way", "peak, MiB", "ratio", "seconds", "ratio", "CPU seconds", "ratio"):
        table.add_column(column, justify="left" if column == "way" else "right")
    results: dict[str, Measured] = {}
    for name in WAYS:
        if free_gib() < NEEDS[name] * logits:
            table.add_row(name, f"not enough memory: needs {NEEDS[name] * logits:.0f} GiB")
            continue
        results[name] = measure(name, tokens, vocabulary, hidden, repeats, threads)
        base = results.get("naive", Measured(math.nan, math.nan, math.nan))
        pairs = zip(results[name], base, ("{:,.0f}", "{:.2f}", "{:.2f}"), strict=True)
        cells = [cell for value, of, shape in pairs for cell in (shape.format(value), f"{value / of:.2f}")]
        table.add_row(name, *cells)
    console.print(table)
    console.print(f"gradients differ by at most {difference:.1e} of the largest")
    if "naive" not in results:
        console.print("no comparison: choose fewer --tokens")
        raise typer.Exit(1)
    ours, theirs = results["chunked"], results["naive"]
    good = difference < 1e-4 and ours.peak <= theirs.peak / 4 and ours.seconds <= theirs.seconds
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        typer.run(main)
