"""All randomness of the synthetic tasks: seeded choices, and the words that names are made of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

NOUNS = """
account amount average balance bonus bound bucket buffer cache cart charge child color column config
cost counter credit cursor day default delta depth digit discount distance edge entry event factor
flag gap grade group height hour index item key label length level line load lower margin mark mask
median member message minute mode month name node number offset order output page pair parent path
pause point position prefix price quota rank rate ratio record result right root row rule sample
scale score second segment share shift size slot stack start step stock store table tag target tax
text threshold total tree unit upper user value version volume weight width window word year
""".split()  # noqa: SIM905
"""For modules, parameters, attributes: none is a keyword, a builtin or a module that something imports."""

VERBS = """
apply build calculate check compute convert fetch find get make move pick read render select set take
""".split()  # noqa: SIM905
"""Verbs that promise nothing about the arithmetic."""


class Draw:
    """Seeded choices. Nouns are drawn without replacement: within a task a word has one meaning."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self._nouns = self.random.sample(NOUNS, len(NOUNS))

    def noun(self) -> str:
        return self._nouns.pop()

    def choice(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def two(self, options: Sequence[T]) -> tuple[T, T]:
        """A right and a wrong one."""
        right, wrong = self.random.sample(options, 2)
        return right, wrong

    def number(self, low: int = 2, high: int = 40) -> int:
        return self.random.randint(low, high)

    def numbers(self, count: int, low: int = 0, high: int = 30) -> list[int]:
        return [self.number(low, high) for _ in range(count)]

    def near_miss(self, right: int) -> int:
        """Another number with as many digits, one of them changed."""
        digits = str(right)
        place = self.random.randrange(len(digits))
        others = [d for d in "123456789" if d != digits[place]]
        return int(digits[:place] + self.choice(others) + digits[place + 1 :])
