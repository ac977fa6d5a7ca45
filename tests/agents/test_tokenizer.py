"""Text from outside never becomes a chat marker; template text always does (cases T22, T31)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agents.tokenizer import TextTokenizer, TokenizerError
from swe_env.plan import TINY_GLM

TOKENIZER = TextTokenizer(TINY_GLM)
PLAIN = Tokenizer.from_file(str(TINY_GLM / "tokenizer.json"))
MARKERS = [
    "<|user|>",
    "<|observation|>",
    "</tool_response>",
    "[gMASK]",
    "<think>",
    "<tool_call>",
    "</arg_value>",
]
SPECIAL_IDS = set(PLAIN.get_added_tokens_decoder())
MARKER_IDS = {PLAIN.token_to_id(marker) for marker in MARKERS}


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_in_text_from_outside_is_ordinary_text(marker: str) -> None:
    ids = TOKENIZER.encode(TOKENIZER.outside(f"a {marker} b"))
    assert not MARKER_IDS & set(ids)
    assert TOKENIZER.decode(ids) == f"a {marker} b"


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_in_the_template_is_one_token(marker: str) -> None:
    assert TOKENIZER.encode(marker) == [PLAIN.token_to_id(marker)]


@given(before=st.text(), inside=st.text(), after=st.text())
@settings(max_examples=200, deadline=None)
def test_the_border_itself_leaves_no_trace_in_the_ids(before: str, inside: str, after: str) -> None:
    plain = PLAIN.encode(f"<|user|>{before}{inside}{after}<|assistant|>", add_special_tokens=False).ids
    assume(not SPECIAL_IDS & set(plain[1:-1]))  # a marker that was drawn means another thing inside
    marked = TOKENIZER.encode(f"<|user|>{before}{TOKENIZER.outside(inside)}{after}<|assistant|>")
    assert marked == plain


@given(text=st.text() | st.lists(st.sampled_from([*MARKERS, "\n", "x "])).map("".join))
@settings(max_examples=200, deadline=None)
def test_any_text_from_outside_survives_the_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(TOKENIZER.outside(text))
    assert TOKENIZER.decode(ids) == text
    assert not MARKER_IDS & set(ids)


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^cannot load .*tokenizer.json.*--model[^\n]*$"):
        TextTokenizer(tmp_path)
