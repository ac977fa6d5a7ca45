"""One model family's way of writing a conversation as tokens, and of reading tool calls back.

The `renderers` package does the writing; this module adds what it leaves open: text from outside
never becomes a marker (:mod:`agents.tokenizer`), argument values arrive byte for byte, and what is
wrong with a call is named, so that the model can be told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict
from renderers.base import Message, ParsedToolCall, RenderedTokens, Renderer, ToolCallParseStatus, ToolSpec
from renderers.configs import GLM45RendererConfig, Llama3RendererConfig, Qwen3RendererConfig
from renderers.glm45 import GLM45Renderer
from renderers.llama_3 import Llama3Renderer
from renderers.qwen3 import Qwen3Renderer

from agents.tokenizer import TextTokenizer, TokenizerError

Family = Literal["glm-4.5", "qwen3", "llama-3"]
FAMILIES: dict[str, Family] = {
    "glm4_moe": "glm-4.5",
    "glm4": "glm-4.5",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "llama": "llama-3",
}
"""`model_type` in a model's config.json -> family."""

Problem = Literal["malformed", "truncated", "unknown_tool"]


class Call(BaseModel):
    """One attempt at a tool call, in the order sampled."""

    model_config = ConfigDict(frozen=True)

    name: str
    """As sampled; empty when none could be read."""
    arguments: dict[str, Any] = {}
    problem: Problem | None = None
    """Why it cannot be executed, None when it can."""
    raw: str = ""
    """The block as text, for the record."""


class Turn(BaseModel):
    """What the policy said in one turn."""

    model_config = ConfigDict(frozen=True)

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = []


class Chat:
    """Messages to token ids and back, for one tokenizer and one set of tools."""

    def __init__(
        self, tokenizer: TextTokenizer, family: Family, tools: list[dict[str, Any]], *, announce: bool = True
    ) -> None:
        """`tools` are JSON schemas in the OpenAI shape; without `announce` prompts do not describe them.

        Raises `TokenizerError` if markers are missing.
        """
        self.tokenizer = tokenizer
        self.family: Family = family
        self.tools = cast("list[ToolSpec]", tools)
        self._announced = self.tools if announce else None
        try:
            self._renderer = _renderer(tokenizer, family)
        except AssertionError as error:
            raise TokenizerError(
                f"{tokenizer.name_or_path} does not fit the {family} format: {error}; "
                "choose the model's own family with --family"
            ) from None
        self.stop_token_ids: list[int] = self._renderer.get_stop_token_ids()
        self._schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}

    def start(self, messages: list[dict[str, Any]]) -> list[int]:
        """The first prompt: all messages, and the marker after which the policy speaks [tokens]."""
        return self._renderer.render_ids(
            [self._mark(message) for message in messages], tools=self._announced, add_generation_prompt=True
        )

    def extend(
        self, prompt_ids: list[int], completion_ids: list[int], messages: list[dict[str, Any]]
    ) -> list[int] | None:
        """The next prompt: exactly `prompt_ids + completion_ids`, then the new messages [tokens].

        None when the template cannot go on from what was sampled (a stop token inside an open
        reasoning block): the conversation has to branch.
        """
        marked = [self._mark(message) for message in messages]
        bridged: RenderedTokens | None = self._renderer.bridge_to_next_turn(
            prompt_ids, completion_ids, marked, tools=self._announced
        )
        so_far = prompt_ids + completion_ids
        if bridged is None or bridged.token_ids[: len(so_far)] != so_far:
            return None
        return bridged.token_ids

    def parse(self, prompt_ids: list[int], completion_ids: list[int], *, truncated: bool) -> Turn:
        """Read a completion. Never raises: what cannot be read is a call with a `problem`."""
        try:
            parsed = self._renderer.parse_response(completion_ids, tools=self.tools, prompt_ids=prompt_ids)
        except RecursionError:  # JSON nested without end
            return Turn(calls=[Call(name="", problem="malformed")])
        body = completion_ids
        while body and body[-1] in self.stop_token_ids:
            body = body[:-1]
        thoughts = self._thoughts(body)
        calls = [
            self._call(call, body, truncated)
            for call in parsed.tool_calls
            if call.token_span is None or not any(call.token_span[0] in thought for thought in thoughts)
        ]
        content, reasoning = parsed.content or "", parsed.reasoning_content or ""
        if len(calls) < len(parsed.tool_calls):
            content = self.tokenizer.decode(body[thoughts[-1].stop + 1 :]).strip()
            reasoning = "\n".join(self.tokenizer.decode(body[span.start : span.stop]) for span in thoughts)
        return Turn(content=content, reasoning=reasoning.strip(), calls=calls)

    def speak(self, message: dict[str, Any]) -> list[int]:
        """The tokens with which a policy would have said `message` (for scripted policies) [tokens].

        The stop token is included: `<|observation|>` or `<|user|>` in GLM's format, the end-of-turn
        marker elsewhere.
        """
        user: dict[str, Any] = {"role": "user", "content": "x"}
        follower = {"role": "tool" if message.get("tool_calls") else "user", "content": "x"}
        prompt = self._renderer.render_ids(
            [self._mark(user)], tools=self._announced, add_generation_prompt=True
        )
        whole = self._renderer.render_ids(
            [self._mark(user), self._mark(message), self._mark(follower)], tools=self._announced
        )
        spoken = whole[len(prompt) :]
        for index, token in enumerate(spoken):
            if token in self.stop_token_ids:
                return spoken[: index + 1]
        return spoken

    def count(self, text: str) -> int:
        """Tokens that `text` takes as the content of a message."""
        return len(self.tokenizer.encode(self.tokenizer.outside(text)))

    def _mark(self, message: dict[str, Any]) -> Message:
        marked = dict(message)
        for key in ("content", "reasoning_content"):
            if isinstance(marked.get(key), str) and marked[key]:
                marked[key] = self.tokenizer.outside(marked[key])
        if message.get("tool_calls"):
            marked["tool_calls"] = [
                {"function": {"name": call["name"], "arguments": self._mark_values(call["arguments"])}}
                for call in message["tool_calls"]
            ]
        return cast("Message", marked)

    def _mark_values(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            key: self.tokenizer.outside(value) if isinstance(value, str) else value
            for key, value in arguments.items()
        }

    def _thoughts(self, body: list[int]) -> list[range]:
        """Where `<think>` was opened and closed again. Tool syntax in there is quoted, not called.

        Reasoning that is never closed is not listed: a call then ends it, as the parser has it.
        """
        opened, closed = map(self.tokenizer.convert_tokens_to_ids, ("<think>", "</think>"))
        spans: list[range] = []
        start: int | None = None
        for index, token in enumerate(body):
            if token == opened and start is None and opened is not None:
                start = index + 1
            elif token == closed and start is not None:
                spans.append(range(start, index))
                start = None
        return spans

    def _call(self, parsed: ParsedToolCall, body: list[int], truncated: bool) -> Call:
        name, status = _as_text(parsed.name or ""), parsed.status
        if status is ToolCallParseStatus.UNCLOSED_BLOCK:
            return Call(name=name, problem="truncated" if truncated else "malformed", raw=parsed.raw)
        if status is ToolCallParseStatus.UNKNOWN_TOOL or (name and name not in self._schemas):
            return Call(name=name, problem="unknown_tool", raw=parsed.raw)
        arguments = parsed.arguments
        if self.family == "glm-4.5" and parsed.token_span is not None:
            start, end = parsed.token_span
            arguments = self._exact_values(name, body[start:end])
        elif status is not ToolCallParseStatus.OK:
            arguments = None
        if not name or not isinstance(arguments, dict) or not _is_text(arguments):
            return Call(name=name, problem="malformed", raw=parsed.raw)
        return Call(name=name, arguments=arguments, raw=parsed.raw)

    def _exact_values(self, name: str, block: list[int]) -> dict[str, Any] | None:
        """GLM argument values as sampled, white space and all; None when the block is not well formed.

        `parse_response` strips values, which loses the indentation of every edit. The four markers
        are single tokens, so the values between them are cut out as tokens and decoded.
        """
        markers = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
        ids = [self.tokenizer.convert_tokens_to_ids(marker) for marker in markers]
        key_open, key_close, value_open, value_close = cast("list[int]", ids)
        properties: dict[str, Any] = self._schemas.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        at = 0
        try:
            while key_open in block[at:]:
                key_start = block.index(key_open, at) + 1
                key_end = block.index(key_close, key_start)
                value_start = block.index(value_open, key_end) + 1
                at = block.index(value_close, value_start)
                key = self.tokenizer.decode(block[key_start:key_end]).strip()
                text = self.tokenizer.decode(block[value_start:at])
                is_text = properties.get(key, {}).get("type", "string") == "string"
                arguments[key] = text if is_text else json.loads(text)
        except (ValueError, RecursionError):  # a marker is missing, or a value is not the JSON it should be
            return None
        return arguments


def _is_text(value: object) -> bool:
    """Whether all strings in a JSON value are text: an escaped half of a surrogate pair is not."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _as_text(sampled: str) -> str:
    return sampled.encode("utf-8", "replace").decode()


def _renderer(tokenizer: TextTokenizer, family: Family) -> Renderer:
    # thinking stays in the stream for good: dropping it would change tokens already sampled
    match family:
        case "glm-4.5":
            return GLM45Renderer(tokenizer, GLM45RendererConfig(thinking_retention="all"))
        case "qwen3":
            return Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
        case "llama-3":
            return Llama3Renderer(tokenizer, Llama3RendererConfig())


def load_chat(
    model: Path, tools: list[dict[str, Any]], family: Family | None = None, *, announce: bool = True
) -> Chat:
    """The chat format of a model directory, by its config.json unless `family` is given.

    The rest is :class:`Chat`'s. Raises :class:`TokenizerError`.
    """
    if family is None:
        try:
            model_type = json.loads((model / "config.json").read_text())["model_type"]
        except (OSError, ValueError, KeyError) as error:
            raise TokenizerError(
                f"cannot tell the model family of {model}: {error}; give a model directory or --family"
            ) from None
        if model_type not in FAMILIES:
            known = ", ".join(sorted(set(FAMILIES.values())))
            raise TokenizerError(
                f"model type {model_type!r} has no chat format here: choose --family {known}"
            )
        family = FAMILIES[model_type]
    return Chat(TextTokenizer(model), family, tools, announce=announce)
