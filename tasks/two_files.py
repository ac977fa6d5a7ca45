"""The tenth family: a change that is right only when it is made in two modules."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.draw import VERBS, Draw


@dataclass(frozen=True)
class TwoFiles:
    """A change that must be made in two modules to be right."""

    first: str
    second: str
    """Module names."""
    first_code: str
    second_code: str
    """As in :class:`Draft`; the second imports the first where `uses_first`."""
    first_edit: tuple[str, str]
    second_edit: tuple[str, str]
    """(bad line, good line)"""
    uses_first: bool
    problem: str
    """With `{first}` and `{second}`, in braces, where the paths of the files go."""
    breaks: list[str]
    """Bodies of hidden tests that fail before the change."""
    keeps: list[str]
    """Bodies of hidden tests that pass before and after."""


def two_files(draw: Draw, name: str) -> TwoFiles:
    first, second, a, b, c = (draw.noun() for _ in range(5))
    n = draw.number(11, 99)
    x, y, z = draw.random.sample(range(100, 999), 3)
    match draw.random.randrange(3):
        case 0:
            old, new = b.upper(), c.upper()
            op, does = draw.choice([("+", "plus"), ("-", "minus"), ("*", "times")])
            return TwoFiles(
                first, second,
                f"# The {c} in use everywhere.\n@@\n",
                f'def {name}({a}):\n    """The {a} {does} the {c}."""\n    @@\n',
                (f"{old} = {n}", f"{new} = {n}"),
                (f"return {a} {op} {first}.{old}", f"return {a} {op} {first}.{new}"),
                True,
                f"The number called `{old}` should be called `{new}`, in `{{first}}` and in `{{second}}`, "
                f"where `{name}` needs it. The old name must be gone.",
                [
                    f"assert {first}.{new} == {n}\nassert not hasattr({first}, '{old}')",
                    f"{first}.{new} = {x}\ntry:\n    assert {second}.{name}({y}) == {y} {op} {x}\nfinally:\n"
                    f"    {first}.{new} = {n}",
                ],
                [f"assert {second}.{name}({y}) == {y} {op} {n}\nassert {second}.{name}({z}) == {z} {op} {n}"],
            )  # fmt: skip
        case 1:
            wrong = draw.near_miss(n)
            other = f"{draw.choice(VERBS)}_{c}"
            return TwoFiles(
                first, second,
                f'def {other}({a}):\n    """The {a} plus the {b}, which is {n}."""\n    @@\n',
                f'def {name}({a}):\n    """The {a} minus the {b}, which is {n}."""\n    @@\n',
                (f"return {a} + {wrong}", f"return {a} + {n}"),
                (f"return {a} - {wrong}", f"return {a} - {n}"),
                False,
                f"The {b} is {n}. Both `{other}` in `{{first}}` and `{name}` in `{{second}}` get it wrong.",
                [
                    f"assert {first}.{other}({x}) == {x + n}\nassert {first}.{other}({y}) == {y + n}",
                    f"assert {second}.{name}({x}) == {x - n}\nassert {second}.{name}({z}) == {z - n}",
                ],
                [f"assert {first}.{other}({z}) > {z}\nassert {second}.{name}({z}) < {z}"],
            )  # fmt: skip
        case _:
            verbs = draw.random.sample(VERBS, 2)
            old, new = f"{verbs[0]}_{b}", f"{verbs[1]}_{b}"
            return TwoFiles(
                first, second,
                f'@@\n    """The {a} plus {n}."""\n    return {a} + {n}\n',
                f'def {name}({a}):\n    """Twice the {b} of {a}."""\n    @@\n',
                (f"def {old}({a}):", f"def {new}({a}):"),
                (f"return 2 * {first}.{old}({a})", f"return 2 * {first}.{new}({a})"),
                True,
                f"Rename the function `{old}` to `{new}` in `{{first}}`, and in `{{second}}` which calls it. "
                "The old name must be gone.",
                [f"assert {first}.{new}({x}) == {x + n}\nassert {first}.{new}({y}) == {y + n}\n"
                 f"assert not hasattr({first}, '{old}')"],
                [f"assert {second}.{name}({y}) == {2 * (y + n)}\n"
                 f"assert {second}.{name}({z}) == {2 * (z + n)}"],
            )  # fmt: skip
