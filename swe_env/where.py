"""`--where`: which episodes of a run, as a condition over their fields. It is read, never executed.

    reward == 1 and turns <= 12 and end != 'token_limit'

Comparisons of fields and constants, joined by `and`, `or`, `not`; anything else is refused. An episode that
infrastructure ended has no reward: `reward == None` is true of it, and `<`, `>` are false of it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from swe_env.episode import Episode
from swe_env.rundir import RunError

Value = str | float | bool | None
Condition = Callable[[Episode], bool]

FIELDS: dict[str, Callable[[Episode], Value]] = {
    "id": lambda episode: episode.id,
    "task_id": lambda episode: episode.task_id,
    "group_id": lambda episode: episode.group_id,
    "policy": lambda episode: episode.policy,
    "end": lambda episode: str(episode.end),
    "error": lambda episode: episode.error,
    "reward": lambda episode: episode.reward,
    "turns": lambda episode: len(episode.turns),
    "tokens": lambda episode: episode.tokens,
    "action_tokens": lambda episode: episode.action_tokens,
    "segments": lambda episode: len(episode.segments),
    "patch_bytes": lambda episode: len(episode.patch),
    "network_attempts": lambda episode: episode.network_attempts,
    "seconds": lambda episode: episode.timings.total,
}

_TEXT = {"id", "task_id", "group_id", "policy", "end", "error"}
"""Fields that are text; the others are numbers."""

_LONGEST = 1000
"""Characters. A condition that a person writes is shorter."""

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda part, whole: part in whole,
    ast.NotIn: lambda part, whole: part not in whole,
}


def parse_where(text: str) -> Condition:
    """The condition that `text` is; without text, one that is true of every episode.

    Raises :class:`RunError` for anything that is not such a condition, before it sees an episode.
    """
    if not text.strip():
        return lambda _: True
    if len(text) > _LONGEST:
        raise RunError(f"--where has {len(text)} characters, more than {_LONGEST}: shorten it")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise RunError(f'--where {text!r} cannot be read: write something like "reward == 1"') from None
    return _condition(tree.body)


def _condition(node: ast.expr) -> Condition:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            parts = [_condition(value) for value in values]
            return lambda episode: all(part(episode) for part in parts)
        case ast.BoolOp(op=ast.Or(), values=values):
            parts = [_condition(value) for value in values]
            return lambda episode: any(part(episode) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _condition(operand)
            return lambda episode: not inner(episode)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            steps = [
                _comparison(one, op, other)
                for one, op, other in zip([left, *rights], ops, rights, strict=False)
            ]
            return lambda episode: all(step(episode) for step in steps)
        case ast.Constant(value=bool(value)):
            return lambda _: value
        case _:
            raise _refused(node, "is not a condition: compare it with something")


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Condition:
    compare = _COMPARE.get(type(op))
    if compare is None:
        raise _refused(right, "is compared with `is`: write == or !=")
    of_left, of_right = _value(left), _value(right)
    kinds = {_kind(left), _kind(right)}
    if isinstance(op, ast.In | ast.NotIn):
        if kinds != {"text"}:
            raise _refused(right, "is searched with `in`, which is for text in text: compare with == instead")
    elif kinds >= {"text", "number"}:
        raise _refused(right, "is text on one side and a number on the other: put quotes around text only")
    ordering = not isinstance(op, ast.Eq | ast.NotEq)

    def holds(episode: Episode) -> bool:
        one, other = of_left(episode), of_right(episode)
        return not (ordering and (one is None or other is None)) and compare(one, other)

    return holds


def _value(node: ast.expr) -> Callable[[Episode], Value]:
    match node:
        case ast.Name(id=name) if name in FIELDS:
            return FIELDS[name]
        case ast.Name(id=name):
            raise RunError(f"--where: there is no field {name!r}: use {', '.join(FIELDS)}")
        case ast.Constant(value=str() | int() | float() | None as value):
            return lambda _: value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda _: -number
        case _:
            raise _refused(node, "is neither a field nor a constant")


def _kind(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return "text" if name in _TEXT else "number"
        case ast.Constant(value=str()):
            return "text"
        case ast.Constant(value=None):
            return "nothing"
        case _:
            return "number"


def _refused(node: ast.expr, why: str) -> RunError:
    return RunError(f"--where: `{ast.unparse(node)}` {why}")
