"""A model's `tokenizer.json`, with a border between the template's text and everybody else's.

Chat markers such as `<|user|>` are single tokens. In text written by the template they must become
those tokens; in text that comes from a file, a command or an issue they must not, or whoever writes
such a file forges a turn of the conversation. The renderers encode both in one string, so text from
outside is wrapped in a mark (:meth:`TextTokenizer.outside`) that :meth:`TextTokenizer.encode` removes:
marked text is encoded by a copy of the tokenizer that knows no added tokens. Where no marker occurs
the ids are exactly those of the unmarked string, merges across the border included.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TokenizerError(Exception):
    """The model's tokenizer cannot be used. One line: cause, then cure."""


class TextTokenizer:
    """What `renderers` asks of a tokenizer (encode, decode, ids of markers), and the border."""

    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, path: Path) -> None:
        """Load `path` (a `tokenizer.json`, or the directory that has one). Raises `TokenizerError`."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = file.read_bytes()
            self._full = Tokenizer.from_buffer(content)
        except Exception as error:  # `tokenizers` raises bare Exception
            raise TokenizerError(f"cannot load {file}: {error}; point --model at a model directory") from None
        self.name_or_path = str(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        spec = json.loads(self._full.to_str())
        self._added = {token["content"]: int(token["id"]) for token in spec["added_tokens"]}
        spec["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(spec))
        longest_first = sorted(self._added, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        nonce = secrets.token_hex(12)  # not guessable, so that no text from outside can end its own mark
        self._open, self._close = f"<{nonce}:", f":{nonce}>"
        self._border = re.compile(f"{self._open}|{self._close}")
        self._check(file)

    def outside(self, text: str) -> str:
        """Mark text that did not come from the template: it will be encoded without added tokens."""
        return f"{self._open}{text}{self._close}"

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Token ids of a rendered string [tokens]; marks are removed and obeyed."""
        ids: list[int] = []
        run = ""  # plain text since the last marker: one piece, so that merges may cross the border
        for piece, is_outside in self._pieces(text):
            if is_outside:
                run += piece
                continue
            end = 0
            for marker in self._markers.finditer(piece):
                ids += self._encode_plain(run + piece[end : marker.start()])
                ids.append(self._added[marker.group()])
                run, end = "", marker.end()
            run += piece[end:]
        return ids + self._encode_plain(run)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of token ids; markers are written out unless `skip_special_tokens`."""
        return self._full.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Id of one token, None when the vocabulary lacks it."""
        return self._full.token_to_id(tokens)

    def __len__(self) -> int:
        return self._full.get_vocab_size(with_added_tokens=True)

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        pieces: list[tuple[str, bool]] = []
        depth = start = 0
        for mark in self._border.finditer(text):
            pieces.append((text[start : mark.start()], depth > 0))
            depth += 1 if mark.group() == self._open else -1
            start = mark.end()
        return [*pieces, (text[start:], depth > 0)]

    def _encode_plain(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids if text else []

    def _check(self, file: Path) -> None:
        """The border must be invisible to the template and impassable to everything else."""
        probe = "".join(f"a {marker} b\n\n{marker}\n" for marker in self._added) + "end."
        if self.encode(probe) != self._full.encode(probe, add_special_tokens=False).ids:
            raise TokenizerError(f"{file} treats spaces around its markers specially: not supported")
        own = set(self._added.values())
        for marker in self._added:
            if own & set(self.encode(self.outside(marker))):
                raise TokenizerError(f"{file} has {marker!r} as ordinary vocabulary: not supported")
