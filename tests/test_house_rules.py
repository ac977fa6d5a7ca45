"""The arrows between the rooms point one way (docs/how-an-episode-works.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"sandboxes", "tasks", "agents", "swe_env", "trainer"}
MAY_IMPORT = {
    "sandboxes": set[str](),
    "tasks": {"sandboxes"},
    "agents": {"sandboxes"},
    "swe_env": {"sandboxes", "tasks", "agents"},
    "trainer": {"swe_env"},
}
FILES = [path for room in sorted(ROOMS) for path in sorted((ROOT / room).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """First names of everything that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_the_rooms_before_it(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert imported(path) & ROOMS - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_stays_in_the_trainer(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] != "trainer":
        assert not imported(path) & {"torch", "transformers"}
