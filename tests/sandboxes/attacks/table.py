"""The table attack × backend in `docs/reward-integrity.md`: what the bank holds every backend to."""

from __future__ import annotations

from pathlib import Path

from tests.sandboxes.attacks.backends import BACKENDS, KNOWN_OPEN
from tests.sandboxes.attacks.bank import BANK

PAGE = Path(__file__).parents[3] / "docs/reward-integrity.md"
BEGIN, END = "<!-- attacks: begin -->", "<!-- attacks: end -->"


def table() -> str:
    """Markdown: a row a probe, a column a backend, and the reason for each that is open."""
    lines = [f"| attack | kind | {' | '.join(BACKENDS)} |", f"|---|---|{'---|' * len(BACKENDS)}"]
    for probe in BANK:
        cells = ["**open**" if probe.name in KNOWN_OPEN[backend] else "held" for backend in BACKENDS]
        lines.append(f"| {probe.name} | {probe.kind} | {' | '.join(cells)} |")
    for backend in BACKENDS:
        if KNOWN_OPEN[backend]:
            lines += ["", f"Open on {backend}:", ""]
            lines += [f"- {name}: {why}." for name, why in KNOWN_OPEN[backend].items()]
    return "\n".join(lines)


def committed() -> str:
    """The same as it stands on the page."""
    return PAGE.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]


def rewrite() -> None:
    """Put the table between the page's two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no {BEGIN} and {END}")
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
