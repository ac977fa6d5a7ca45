"""The vocabulary of the tiny models: about a thousand BPE tokens that fit small repositories.

`trainer/tiny_tokenizer.json` is what :func:`build` makes; a test compares them. Names, digits, underscores
and punctuation are split apart before merging, so an identifier is the same tokens wherever it stands and a
small model can copy it. What is no name, such as `return` or `minus`, takes the spaces around it along, and a
new line its indentation: that makes episodes shorter by a quarter. All 256 bytes are in the alphabet: any
text can be encoded. Chat markers are not part of it: :mod:`trainer.tiny_model` adds each family's own on top.

`python -m trainer.tiny_tokenizer` writes the file again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

FILE = Path(__file__).with_name("tiny_tokenizer.json")
SIZE = 1500
"""BPE tokens; with the largest family's markers a model has at most 1,536."""


def build() -> Tokenizer:
    """Train the vocabulary on :func:`corpus`: a second or two, the same result every time."""
    tokenizer = Tokenizer(models.BPE())
    words = "|".join(WORDS.split())
    split = (
        rf"\./|\.py\b|__init__| ?\b(?:{words})\b ?|\p{{L}}+|\p{{N}}|_| ?[-+*/%<>=!]{{1,2}} ?|[,:.] "
        r"|[^\s\p{L}\p{N}_]{1,4}|\n+(?: {4})*| {4}| +|\s"  # a ruler of 80 `=` is worth no token
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def corpus() -> Iterator[str]:
    """The text that the tiny models meet: code, its tests and their output, commands, tool markup."""
    draw = random.Random(0)
    nouns, verbs = NOUNS.split(), VERBS.split()
    for number in range(400):
        noun, other = draw.sample(nouns, 2)
        verb, field = draw.choice(verbs), draw.choice(nouns)
        low, high = draw.randrange(10), draw.randrange(10, 100)
        function = f"{verb}_{noun}"
        code = CODE[number % len(CODE)].format(
            function=function, noun=noun, other=other, field=field, Noun=noun.title(), low=low, high=high
        )
        yield code
        yield TEST.format(module=noun, function=function, low=low, high=high, Noun=noun.title())
        yield PYTEST.format(module=noun, function=function, low=low, high=high, count=low + 1)
        old, new = code.splitlines()[-1], code.splitlines()[-1].replace(noun, other)
        yield TOOLS[number % len(TOOLS)].format(module=noun, old=old, new=new, function=function)
        yield ISSUE.format(function=function, noun=noun, low=low, high=high)
    yield from HEADERS * 10
    # the tasks are written in such words: each deserves a token of its own
    yield from [f"{word}\n{word}" for word in nouns + verbs] * 40
    yield from [word.upper() for word in nouns] * 40
    yield from [f"\n{word} ({word} 0 {word} ({word} 0 {word}." for word in WORDS.split()] * 12
    yield from [f"a {sign} a" for sign in OPERATORS.split()] * 40


NOUNS = """
account amount average balance batch bonus bound bucket buffer cache cart cell charge child clock color
column config cost count counter credit cursor data date day default delta depth digit discount distance edge
entry error event factor field file first flag format gap grade graph group height hour index input item key
label last left length level limit line list load lower margin mark mask matrix mean median member merge
message minute mode month name node number offset order output page pair parent parser path pause point
position prefix price queue quota range rank rate ratio record result right root row rule sample scale score
second segment share shift size slot source stack start state step stock store string sum table tag target tax
text threshold time token total tree unit upper user value version volume weight width window word year
"""

VERBS = """
add apply build calculate check clamp clean compute convert count decode encode extract fetch fill filter find
fold get insert is join make map move normalize parse pick pop print push read remove render replace reset
reverse round select set skip sort split strip swap take trim update validate write
"""

WORDS = """
Add all already among are around at away be Both Bug bug but By by called calls class correct counts def
divided docstring docstrings does down each elif else end equal even everywhere except expected False fits
Fix fix for from function functions give given gives gone greater How if import in included init into is
It its lambda largest least left len less list many max min minus modulo more most Multiply must needs
Never never None none not Now numbers odd of one or other pass Please plus product raise raises range
Rename Replace return returns rounded says self should Small so sorted Sum sum Take than that The them
then There there This Those times to tools True try Twice unless up What what when where Whether which
while Whole whole with without wrong
"""

OPERATORS = "+ - * / // % = == != < > <= >= += -="

CODE = [
    '''
def {function}({noun}, {other}):
    """Return the {noun} of {other}."""
    if {noun} < {low}:
        return {low}
    return {noun} + {other}
''',
    """
def {function}(items, {noun}={low}):
    total = 0
    for index, item in enumerate(items):
        if item is not None and item != {noun}:
            total += item * {high}
    return total / len(items)
""",
    """
class {Noun}:
    def __init__(self, {noun}, {other}={low}):
        self.{noun} = {noun}
        self.{field} = {other}

    def {function}(self, value):
        return self.{noun} - self.{field} - value
""",
    """
from .{other} import {function}

def {noun}_{field}(values):
    result = []
    while len(result) < {high} and values:
        result.append(max(values[-1], {low}))
        values = values[:-1]
    return sorted(result, reverse=True)
""",
    """
import os
import sys

def {function}(path, lines=None):
    with open(path, encoding="utf-8") as file:
        {noun} = file.read().split("\\n")
    if not {noun} or lines is True:
        raise ValueError(f"no {noun} in {{path!r}}")
    return [line.strip() for line in {noun} if line.startswith("{other}") or line.endswith("{field}")]
""",
    """
def {function}({noun}):
    try:
        {other} = dict({noun}=int({noun}), key=str({low}))
    except (TypeError, KeyError) as error:
        return False
    else:
        return {other}.get("{field}", {high}) >= min({low}, {high}) or {noun} <= {high} % 2 == 0
""",
]

TEST = """
import pytest
from {module} import {function}, {Noun}

def test_{function}():
    assert {function}({low}, {high}) == {high}
    assert not {function}([{low}, {high}, 0]) != [1, 2, 3]
"""

PYTEST = """
$ python -m pytest -q tests/test_{module}.py
F.                                                                       [100%]
=================================== FAILURES ===================================
____________________________ test_{function} ____________________________

    def test_{function}():
>       assert {function}({low}, {high}) == {high}
E       assert {low} == {high}
E        +  where {low} = {function}({low}, {high})

tests/test_{module}.py:{count}: AssertionError
=========================== short test summary info ============================
FAILED tests/test_{module}.py::test_{function} - assert {low} == {high}
1 failed, {count} passed in 0.0{count}s
PASSED tests/test_{module}.py::test_{function}
"""

TOOLS = [
    "bash\n<arg_key>command</arg_key>\n<arg_value>ls && cat {module}.py</arg_value>\n",
    "bash\n<arg_key>command</arg_key>\n<arg_value>grep -rn {function} . | head -n 20</arg_value>\n",
    "bash\n<arg_key>command</arg_key>\n<arg_value>cd /testbed && python -m pytest -q</arg_value>\n",
    "edit\n<arg_key>command</arg_key>\n<arg_value>create</arg_value>\n<arg_key>path</arg_key>\n<arg_value>"
    "./{module}.py</arg_value>\n<arg_key>file_text</arg_key>\n<arg_value>{new}\n</arg_value>\n",
    "bash\n<arg_key>command</arg_key>\n<arg_value>cat ./{module}.py</arg_value>\n",
    "\n<tool_response>\nWrote ./{module}.py.\n</tool_response>\n",
    "\n<tool_response>\nEdited ./{module}.py.\n</tool_response>\n",
    '\n{{"name": "edit", "arguments": {{"path": "{module}.py", "old": "{old}", "new": "{new}"}}}}\n',
    '{{"name": "bash", "parameters": {{"command": "sed -n 1,40p src/{module}.py"}}}}',
    "str_replace\n<arg_key>path</arg_key>\n<arg_value>/testbed/{module}.py</arg_value>\n<arg_key>old_str"
    "</arg_key>\n<arg_value>{old}</arg_value>\n<arg_key>new_str</arg_key>\n<arg_value>{new}</arg_value>\n",
    "\n<tool_response>\ngit diff\n--- a/{module}.py\n+++ b/{module}.py\n@@ -1,4 +1,4 @@\n-{old}\n+{new}\n"
    "exit code 1\n</tool_response>\n",
    "submit\n",
]

ISSUE = """
Fix the bug in `{function}`: it returns {low} but {high} is expected when the {noun} is {high}.
The tests fail. Find the cause, edit the file and submit.
"""

HEADERS = [
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\n<tools>\n",
    "For each function call, output the function name and arguments within the following XML format:\n"
    "{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n",
    "For each function call, return a json object with function name and arguments within XML tags:\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n',
    "Given the following functions, please respond with a JSON for a function call with its proper "
    'arguments that best answers the given prompt. Respond in the format {"name": function name, '
    '"parameters": dictionary of argument name and its value}. Do not use variables.\n',
    '{"type": "function", "function": {"name": "bash", "description": "Run a shell command in the '
    'repository.", "parameters": {"type": "object", "properties": {"command": {"type": "string", '
    '"description": "The command to run."}}, "required": ["command"]}}}',
    '{"name": "edit", "description": "Replace text in a file.", "parameters": {"type": "object", '
    '"properties": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}}, '
    '"required": ["path", "old", "new"]}}',
    "system user assistant observation tool ipython You are an engineer working in a repository.\n",
]


if __name__ == "__main__":
    build().save(str(FILE), pretty=True)
