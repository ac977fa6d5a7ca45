"""Nine families of one-line bugs: what a synthetic task is about, before it becomes a repository.

A family is a function from a :class:`Draw` (all of its randomness) to a :class:`Draft`: a piece of correct
code with a docstring that states the intent, the one line a bug changes, and calls to try. Whether a call
tells right from wrong is not declared here: :mod:`tasks.synthetic` runs both versions and looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tasks.draw import VERBS, Draw


@dataclass(frozen=True)
class Draft:
    """Correct code, and the line that a bug changes."""

    code: str
    """Text of one or more definitions; `@@` stands where the good or the bad line goes, indentation kept."""
    good: str
    bad: str
    calls: list[str]
    """Expressions to evaluate in both versions."""
    exports: list[str]
    """Names that the calls use."""


MEANINGS = {
    "+": ["The {a} plus the {b}.", "Add {b} to {a}.", "The sum of {a} and {b}."],
    "-": ["The {a} minus the {b}.", "Take {b} away from {a}.", "What is left of {a} without {b}."],
    "*": ["The {a} times the {b}.", "Multiply {a} by {b}.", "The product of {a} and {b}."],
    "//": ["The {a} divided by the {b}, rounded down.", "How many whole times {b} fits into {a}."],
}
ORDERS = {
    ">=": "at least",
    "<=": "at most",
    ">": "more than",
    "<": "less than",
    "==": "equal to",
    "!=": "other than",
}


def operator(draw: Draw, name: str) -> Draft:
    a, b, c = draw.noun(), draw.noun(), draw.noun()
    right, wrong = draw.two(list(MEANINGS))
    meaning = draw.choice(MEANINGS[right]).format(a=a, b=b)
    extra = draw.number()
    pairs = [f"{name}({x}, {y})" for x, y in zip(draw.numbers(12), draw.numbers(12, 1, 9), strict=True)]
    match draw.random.randrange(3):
        case 0:
            code = f'def {name}({a}, {b}):\n    """{meaning}"""\n    @@\n'
            good, bad = (f"return {a} {op} {b}" for op in (right, wrong))
        case 1:
            code = f'def {name}({a}, {b}):\n    """{meaning}"""\n    @@\n    return {c}\n'
            good, bad = (f"{c} = {a} {op} {b}" for op in (right, wrong))
        case _:
            code = f'def {name}({a}, {b}):\n    """{meaning} Never more than {extra}."""\n    @@\n'
            good, bad = (f"return min({a} {op} {b}, {extra})" for op in (right, wrong))
    return Draft(code, good, bad, pairs, [name])


def comparison(draw: Draw, name: str) -> Draft:
    a, b = draw.noun(), draw.noun()
    right, wrong = draw.two(list(ORDERS))
    low, high = draw.number(1, 9), draw.number(10, 99)
    match draw.random.randrange(3):
        case 0:
            code = f'def {name}({a}, {b}):\n    """Whether {a} is {ORDERS[right]} {b}."""\n    @@\n'
            good, bad = (f"return {a} {op} {b}" for op in (right, wrong))
            calls = _around(draw, name)
        case 1:
            code = (
                f'def {name}({a}, {b}):\n    """{high} when {a} is {ORDERS[right]} {b}, else {low}."""\n'
                f"    @@\n        return {high}\n    return {low}\n"
            )
            good, bad = (f"if {a} {op} {b}:" for op in (right, wrong))
            calls = _around(draw, name)
        case _:
            code = f'def {name}({a}, {b}):\n    """Those of {a} that are {ORDERS[right]} {b}."""\n    @@\n'
            good, bad = (f"return [one for one in {a} if one {op} {b}]" for op in (right, wrong))
            calls = [
                f"{name}({[n - 1, n, n, n + 1 + draw.number(1, 5)]}, {n})"
                for n in draw.random.sample(range(2, 40), 10)
            ] + [f"{name}([], {n})" for n in draw.numbers(2)]
    return Draft(code, good, bad, calls, [name])


def constant(draw: Draw, name: str) -> Draft:
    a, b = draw.noun(), draw.noun()
    right = draw.number(11, 99)
    wrong = draw.near_miss(right)
    around = sorted({min(right, wrong), max(right, wrong), *draw.numbers(4, 1, 120)})
    calls = [f"{name}({n + shift})" for n in around for shift in (0, 1)]
    match draw.random.randrange(4):
        case 0:
            code = f'def {name}({a}):\n    """The {a} plus {right}."""\n    @@\n'
            good, bad = (f"return {a} + {n}" for n in (right, wrong))
        case 1:
            code = f'def {name}({a}):\n    """The {a}, but never more than {right}."""\n    @@\n'
            good, bad = (f"return min({a}, {n})" for n in (right, wrong))
            calls = [f"{name}({n})" for n in (100, 1, 150, 3, 220, 2, 130, 5)]
        case 2:
            meaning = f"The {a} without the {b}, which is {right}."
            code = f'@@\n\n\ndef {name}({a}):\n    """{meaning}"""\n    return {a} - {b.upper()}\n'
            good, bad = (f"{b.upper()} = {n}" for n in (right, wrong))
        case _:
            meaning = f"The {a} times the {b}, which is {right}."
            code = f'def {name}({a}):\n    """{meaning}"""\n    @@\n    return {a} * {b}\n'
            good, bad = (f"{b} = {n}" for n in (right, wrong))
            calls = [*calls, f"{name}(0)"]
    return Draft(code, good, bad, calls, [name])


def default(draw: Draw, name: str) -> Draft:
    a, b = draw.noun(), draw.noun()
    right = draw.number(2, 60)
    wrong = draw.near_miss(right)
    given = [f"{name}({x}, {y})" for x, y in zip(draw.numbers(3), draw.numbers(3, 1, 9), strict=True)]
    sign, does = draw.choice([("+", "plus"), ("-", "minus"), ("*", "times")])
    match draw.random.randrange(3):
        case 0:
            meaning = f"The {a} {does} {b}. The {b} is {right} unless given."
            body = f'    """{meaning}"""\n    return {a} {sign} {b}\n'
            calls = [f"{name}({n})" for n in draw.numbers(6, 1)] + given
        case 1:
            right, wrong = right % 6 + 1, (right + draw.number(1, 5)) % 6 + 1
            meaning = f"The first {b} of {a}. The {b} is {right} unless given."
            body = f'    """{meaning}"""\n    return {a}[:{b}]\n'
            calls = [f"{name}({draw.numbers(7)})" for _ in range(5)] + [
                f"{name}({draw.numbers(4)}, {n})" for n in draw.numbers(3, 1, 4)
            ]
        case _:
            truth = draw.choice([True, False])
            body = (
                f'    """The {a} in order, largest first if {b}. By default {b} is {truth}."""\n'
                f"    return sorted({a}, reverse={b})\n"
            )
            calls = [f"{name}({draw.numbers(4)})" for _ in range(5)] + [
                f"{name}({draw.numbers(3)}, {flag})" for flag in (True, False)
            ]
            good, bad = (f"def {name}({a}, {b}={value}):" for value in (truth, not truth))
            return Draft("@@\n" + body, good, bad, calls, [name])
    good, bad = (f"def {name}({a}, {b}={n}):" for n in (right, wrong))
    return Draft("@@\n" + body, good, bad, calls, [name])


def swapped(draw: Draw, name: str) -> Draft:
    a, b, c = draw.noun(), draw.noun(), draw.noun()
    helper = f"{draw.choice(VERBS)}_{c}"
    xs, ys = draw.numbers(9), draw.numbers(9, 1, 9)
    pairs = [f"{name}({x}, {y})" for x, y in zip(xs, ys, strict=True)] + [f"{name}({n}, {n})" for n in ys[:2]]
    match draw.random.randrange(3):
        case 0:
            op, does = draw.choice([("-", "minus"), ("//", "divided by"), ("%", "modulo")])
            code = (
                f'def {helper}({a}, {b}):\n    """The {a} {does} {b}."""\n    return {a} {op} {b}\n\n\n'
                f'def {name}({a}, {b}):\n    """The {a} {does} {b}, plus one."""\n    @@\n'
            )
            good, bad = f"return {helper}({a}, {b}) + 1", f"return {helper}({b}, {a}) + 1"
        case 1:
            code = f'def {name}({c}, {a}, {b}):\n    """Replace each {a} in {c} by {b}."""\n    @@\n'
            good, bad = f"return {c}.replace({a}, {b})", f"return {c}.replace({b}, {a})"
            words = [draw.noun() for _ in range(6)]
            calls = [f"{name}('{w} {w[0]}', '{w[0]}', '{w[1]}')" for w in words]
            return Draft(
                code, good, bad, [*calls, f"{name}('{a}', '0', '1')", f"{name}('', 'a', 'b')"], [name]
            )
        case _:
            meaning = f"Whole numbers from {a} up to {b}, {b} not included."
            code = f'def {name}({a}, {b}):\n    """{meaning}"""\n    @@\n'
            good, bad = f"return list(range({a}, {b}))", f"return list(range({b}, {a}))"
            pairs = [f"{name}({x}, {x + y})" for x, y in zip(xs, ys, strict=True)] + [
                f"{name}({n}, {n})" for n in ys[:2]
            ]
    return Draft(code, good, bad, pairs, [name])


def off_by_one(draw: Draw, name: str) -> Draft:
    a, b = draw.noun(), draw.noun()
    lists = [draw.numbers(draw.number(3, 6), 1) for _ in range(7)]
    ones = [f"{name}({values})" for values in lists]
    match draw.random.randrange(4):
        case 0:
            start = draw.choice([1, 2])
            code = f'def {name}({a}):\n    """Sum of {start} to {a}, {a} included."""\n    @@\n'
            good = f"return sum(range({start}, {a} + 1))"
            bad = draw.choice([f"return sum(range({start}, {a}))", f"return sum(range({start}, {a} + 2))"])
            calls = [f"{name}({n})" for n in (*draw.random.sample(range(2, 20), 6), 0, -3)]
        case 1:
            code = f'def {name}({a}, {b}):\n    """The first {b} of {a}."""\n    @@\n'
            good, bad = f"return {a}[:{b}]", f"return {a}[: {b} {draw.choice('+-')} 1]"
            calls = [f"{name}({values}, {draw.number(1, 2)})" for values in lists] + [
                f"{name}([], {draw.number(1, 4)})"
            ]
        case 2:
            code = f'def {name}({a}):\n    """The last of {a}."""\n    @@\n    return {a}[{b}]\n'
            good = f"{b} = len({a}) - 1"
            bad = draw.choice([f"{b} = len({a}) - 2", f"{b} = len({a})"])
            calls = ones
        case _:
            code = (
                f'def {name}({a}):\n    """The sum of all {a}."""\n    {b} = 0\n    @@\n'
                f"        {b} += {a}[place]\n    return {b}\n"
            )
            good = f"for place in range(len({a})):"
            bad = draw.choice([f"for place in range(1, len({a})):", f"for place in range(len({a}) - 1):"])
            calls = [*ones, f"{name}([])"]
    return Draft(code, good, bad, calls, [name])


def missing_return(draw: Draw, name: str) -> Draft:
    a, b, c = draw.noun(), draw.noun(), draw.noun()
    op = draw.choice(["+", "-", "*"])
    meaning = draw.choice(MEANINGS[op]).format(a=a, b=b)
    pairs = [f"{name}({x}, {y})" for x, y in zip(draw.numbers(8), draw.numbers(8, 1, 30), strict=True)]
    match draw.random.randrange(3):
        case 0:
            code = f'def {name}({a}, {b}):\n    """{meaning}"""\n    @@\n'
            good, bad = f"return {a} {op} {b}", f"{a} {op} {b}"
        case 1:
            code = f'def {name}({a}, {b}):\n    """{meaning}"""\n    @@\n'
            good, bad = f"{c} = {a} {op} {b}\n    return {c}", f"{c} = {a} {op} {b}"
        case _:
            n = draw.number(2, 9)
            meaning = f"The {b} times {n} when {a} is more than {b}, else {a}."
            code = (
                f'def {name}({a}, {b}):\n    """{meaning}"""\n    if {a} > {b}:\n        @@\n    return {a}\n'
            )
            good, bad = f"return {b} * {n}", f"{b} * {n}"
            pairs = _around(draw, name)
    return Draft(code, good, bad, pairs, [name])


def inverted(draw: Draw, name: str) -> Draft:
    a, b = draw.noun(), draw.noun()
    n = draw.number(1, 60)
    lists = [draw.numbers(draw.number(2, 5), 1) for _ in range(6)]
    match draw.random.randrange(4):
        case 0:
            code = (
                f'def {name}({a}):\n    """The largest of {a}, or {n} when there is none."""\n    @@\n'
                f"        return {n}\n    return max({a})\n"
            )
            good, bad = f"if not {a}:", f"if {a}:"
            calls = [f"{name}({values})" for values in lists]
        case 1:
            meaning = f"The {a} plus {b}, which counts as {n} when it is None."
            code = (
                f'def {name}({a}, {b}):\n    """{meaning}"""\n    @@\n'
                f"        {b} = {n}\n    return {a} + {b}\n"
            )
            good, bad = f"if {b} is None:", f"if {b} is not None:"
            calls = [
                f"{name}({x}, {y})" for x, y in zip(draw.numbers(6), draw.numbers(6, 61, 99), strict=True)
            ]
            calls = [*calls, *(f"{name}({x}, None)" for x in draw.numbers(2)), f"{name}(1, {n})"]
        case 2:
            meaning = f"The {a} with {b} at the end, unless {b} is already among them."
            code = (
                f'def {name}({a}, {b}):\n    """{meaning}"""\n'
                f"    @@\n        return {a}\n    return {a} + [{b}]\n"
            )
            good, bad = f"if {b} in {a}:", f"if {b} not in {a}:"
            calls = [f"{name}({values}, {draw.choice([values[0], 77])})" for values in lists]
        case _:
            even = draw.choice([True, False])
            word, signs = ("even", ("==", "!=")) if even else ("odd", ("!=", "=="))
            code = f'def {name}({a}):\n    """Those of {a} that are {word}."""\n    @@\n'
            good, bad = (f"return [one for one in {a} if one % 2 {sign} 0]" for sign in signs)
            calls = [*(f"{name}({values})" for values in lists), f"{name}([])"]
    return Draft(code, good, bad, calls, [name])


def attribute(draw: Draw, name: str) -> Draft:
    a, b, c, thing = draw.noun(), draw.noun(), draw.noun(), draw.noun()
    kind = thing.title()
    op = draw.choice(["+", "-", "*"])
    method = draw.choice([True, False])
    owner = "self" if method else thing
    a_of, b_of, c_of = (f"{owner}.{word}" for word in (a, b, c))
    meaning = draw.choice(MEANINGS[op]).format(a=a_of, b=b_of)
    good = f"return {a_of} {op} {b_of}"
    bad = draw.choice([f"return {a_of} {op} {c_of}", f"return {c_of} {op} {b_of}"])
    order = draw.random.sample([a, b, c], 3)
    sets = "".join(f"        self.{word} = {word}\n" for word in order)
    head = f"class {kind}:\n    def __init__(self, {', '.join(order)}):\n{sets}"
    values = [", ".join(map(str, draw.numbers(3, 1))) for _ in range(7)] + ["4, 4, 4", "1, 1, 1"]
    if method:
        code = f'{head}\n    def {name}(self):\n        """{meaning}"""\n        @@\n'
        return Draft(code, good, bad, [f"{kind}({row}).{name}()" for row in values], [kind])
    code = f'{head}\n\ndef {name}({thing}):\n    """{meaning}"""\n    @@\n'
    return Draft(code, good, bad, [f"{name}({kind}({row}))" for row in values], [name, kind])


@dataclass(frozen=True)
class Family:
    short: str
    """For task ids."""
    make: Callable[[Draw, str], Draft]
    difficulty: int
    """1: one character or one operator; 2: a word or a line."""


FAMILIES: dict[str, Family] = {
    "operator": Family("op", operator, 1),
    "comparison": Family("cmp", comparison, 1),
    "constant": Family("const", constant, 1),
    "default": Family("default", default, 2),
    "swapped_arguments": Family("swap", swapped, 2),
    "off_by_one": Family("off", off_by_one, 1),
    "missing_return": Family("return", missing_return, 2),
    "inverted_condition": Family("invert", inverted, 2),
    "wrong_attribute": Family("attr", attribute, 2),
}
"""The families of one edit in one file; :mod:`tasks.two_files` is the tenth."""


def _around(draw: Draw, name: str) -> list[str]:
    """Calls with a smaller, an equal and a larger first argument."""
    numbers = draw.random.sample(range(2, 60), 9)
    steps = [(0, -1, 1)[place % 3] * draw.number(1, 9) for place in range(9)]
    return [f"{name}({n + step}, {n})" for n, step in zip(numbers, steps, strict=True)]
