"""The file that a process writes to, after what others before it wrote: a restart hides no cause of death."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOST = 1_000_000
"""Bytes at the end of a log that say why a process ended."""


@dataclass(frozen=True)
class ProcessLog:
    """One process's part of a log file: what comes after `start` [bytes]."""

    path: Path
    start: int = 0

    @classmethod
    def after_all(cls, path: Path) -> ProcessLog:
        """The part of a process that is about to begin."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def end(self) -> str:
        """The last of what the process wrote."""
        with self.path.open("rb") as file:
            file.seek(max(self.start, self.path.stat().st_size - MOST))
            return file.read().decode(errors="replace")
