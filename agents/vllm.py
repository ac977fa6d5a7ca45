"""The policy behind a vLLM server: token ids out, sampled ids with logprobs and weight versions back.

Uses vLLM's token-in, token-out endpoint (`/inference/v1/generate`), so nothing is ever detokenised.
Believes nothing: an answer whose ids, logprobs or versions do not fit each other is a
:class:`PolicyError`, never a training sample. Deliberately sends no `seed` (seeded sampling with
chunked prefill kills vLLM's CPU engine) and no `top_p` or `top_k` (the trainer cannot replay them).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import trio
from pydantic import BaseModel, ConfigDict, FiniteFloat, StrictInt, ValidationError

from agents.policy import Completion, ContextOverflow, PolicyError, Sampling


class Served(BaseModel):
    """What a server said about itself when asked."""

    model_config = ConfigDict(frozen=True)

    model: str
    max_model_len: int
    """Prompt and completion together [tokens]."""
    vllm_version: str
    processed_logprobs: bool
    """Logprobs are of the distribution sampled from (temperature applied), not of the raw logits."""


async def check(url: str, *, model: str = "policy", sampling: Sampling | None = None) -> Served:
    """Ask a server, before any episode, whether it can serve one; sample one token to be sure.

    That first token may take half a minute: vLLM compiles its sampler then. Raises
    :class:`PolicyError` with the cure when the server is not up, does not serve `model`, keeps its
    token endpoint closed, or reports logprobs that training at this temperature cannot use.
    """
    temperature = (sampling or Sampling()).temperature
    async with client_for(url, deadline=120) as client:
        models = _read(_Models, await _exchange(client, "GET", "/v1/models", deadline=120), url)
        served = {entry.id: entry.max_model_len for entry in models.data}
        if model not in served:
            names = ", ".join(map(repr, served)) or "nothing"
            raise PolicyError(f"{url} serves {names}, not {model!r}: add --served-model-name {model}")
        version = _read(_Version, await _exchange(client, "GET", "/version", deadline=120), url).version
        # One token is allowed, so where logprobs are of the sampled distribution its logprob is 0.
        probe = {"temperature": 1.0, "max_tokens": 1, "logprobs": 0, "detokenize": False}
        body = {"model": model, "token_ids": [0], "sampling_params": {**probe, "allowed_token_ids": [0]}}
        answer = _read(_Answer, await _exchange(client, "POST", GENERATE, deadline=120, body=body), url)
    _, completion = _checked(answer, url, stop_token_ids=frozenset(), max_tokens=1)
    processed = completion.logprobs == [0.0]
    if not processed and temperature not in (0.0, 1.0):
        raise PolicyError(
            f"{url} reports raw logprobs, which at temperature {temperature:g} are not those of sampling: "
            "start vLLM with --logprobs-mode processed_logprobs"
        )
    return Served(
        model=model,
        max_model_len=served[model],
        vllm_version=version,
        processed_logprobs=processed,
    )


class VllmPolicy:
    """A :class:`~agents.policy.Policy`, made by :meth:`connect`; one serves any number of episodes."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        sampling: Sampling,
        stop_token_ids: Collection[int],
        deadline: float,
        label: str,
    ) -> None:
        self.sampling = sampling
        self._client = client
        self._url = str(client.base_url).rstrip("/")
        self._model = model
        self._stop_token_ids = frozenset(stop_token_ids)
        self._deadline = deadline
        self._label = label

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        *,
        stop_token_ids: Collection[int],
        model: str = "policy",
        sampling: Sampling | None = None,
        deadline: float = 900,
        label: str | None = None,
    ) -> AsyncGenerator[VllmPolicy]:
        """A policy on the server at `url`; its connections close with the block.

        `stop_token_ids` are the chat format's, and the only ones: the server's own notion of an end
        is switched off, so both sides agree on what ends a turn. `deadline` [s] bounds each request,
        retries included; keep it below an episode's clock, or a server that hangs looks like a slow
        policy. `label` is what records call the model. Awaits nothing and does not touch the server: see
        :func:`check`.
        """
        async with client_for(url, deadline) as client:
            drawn = sampling or Sampling()
            yield cls(client, model, drawn, stop_token_ids, deadline, label or model)

    @property
    def name(self) -> str:
        """For tables and records."""
        return f"vllm:{self._label}"

    async def complete(self, prompt_ids: list[int], *, max_tokens: int) -> Completion:
        """Sample at most `max_tokens` tokens after `prompt_ids`.

        Awaits the whole completion; cancelling closes the connection, and vLLM drops the request. One that
        the server gives up, as it may when its weights change, is gone on with from the tokens that it has.
        Raises :class:`ContextOverflow` when the prompt fills the context, :class:`PolicyError` when
        the server is gone, too slow, or answers something that is not a completion.
        """
        found = Completion(token_ids=[], logprobs=[], policy_versions=[], finish_reason="length")
        until = trio.current_time() + self._deadline  # each request has the same for itself
        while trio.current_time() < until:
            answer = await self._generate(
                prompt_ids + found.token_ids,
                {
                    "temperature": self.sampling.temperature,
                    "max_tokens": max_tokens - len(found.token_ids),
                    "logprobs": 0,  # the sampled token's own, no alternatives
                    "stop_token_ids": sorted(self._stop_token_ids),
                    "ignore_eos": True,  # generation_config.json may name other stop tokens than ours
                },
            )
            given_up, part = _checked(
                answer,
                self._url,
                stop_token_ids=self._stop_token_ids,
                max_tokens=max_tokens - len(found.token_ids),
            )
            found = _joined(found, part)
            if not given_up or len(found.token_ids) == max_tokens:
                return found
            await trio.sleep(BACKOFF)
        raise PolicyError(
            f"{self._url} did not finish a completion within {self._deadline:g} s: it gives it up each time"
        )

    async def score(self, token_ids: list[int]) -> list[float | None]:
        """Logprob of every token given those before it, by the server's present weights [tokens].

        The first is None. From the raw logits: temperature 1, whatever the server samples at.
        Raises as :meth:`complete` does; the stream must leave room for one token.
        """
        answer = await self._generate(token_ids, {"max_tokens": 1, "prompt_logprobs": 0})
        scores = answer.prompt_logprobs
        if scores is None or len(scores) != len(token_ids) or scores[0] is not None:
            raise PolicyError(f"{self._url} did not score every prompt token: is it vLLM?")
        logprobs: list[float | None] = [None]
        for token, score in zip(token_ids[1:], scores[1:], strict=True):
            if score is None or token not in score:
                raise PolicyError(f"{self._url} left out the logprob of prompt token {token}")
            logprobs.append(_checked_logprob(score[token].logprob, self._url))
        return logprobs

    async def _generate(self, token_ids: list[int], params: dict[str, Any]) -> _Answer:
        body = {
            "model": self._model,
            "token_ids": token_ids,
            "sampling_params": {"temperature": 1.0, "detokenize": False, **params},
        }
        content = await _exchange(self._client, "POST", GENERATE, deadline=self._deadline, body=body)
        return _read(_Answer, content, self._url)


GENERATE = "/inference/v1/generate"
TRIES = 3
"""Attempts at a request that the server dropped or answered with 5xx; nothing had been received."""
BACKOFF = 0.5
"""Wait before the second attempt, doubled before the third [s]."""
NO_LOGPROB = -9999.0
"""What vLLM writes for a logprob that is not a number, or is minus infinity."""


Shape = TypeVar("Shape", bound=BaseModel)


class _Span(BaseModel):
    version: str
    start: StrictInt
    end: StrictInt


class _TokenLogprob(BaseModel):
    token_id: StrictInt
    logprob: FiniteFloat


class _Logprobs(BaseModel):
    content: list[_TokenLogprob]


class _Choice(BaseModel):
    token_ids: list[StrictInt]
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _PromptLogprob(BaseModel):
    logprob: FiniteFloat


class _Answer(BaseModel):
    """The part of vLLM's answer that is used. A field of another shape is an error."""

    choices: list[_Choice]
    prompt_logprobs: list[dict[int, _PromptLogprob] | None] | None = None


class _Model(BaseModel):
    id: str
    max_model_len: int


class _Models(BaseModel):
    data: list[_Model]


class _Version(BaseModel):
    version: str


def client_for(url: str, deadline: float) -> httpx.AsyncClient:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise PolicyError(f"{url!r} is not a URL ({error}): give one like http://127.0.0.1:8000") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise PolicyError(f"{url!r} is not a web address: give one like http://127.0.0.1:8000")
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(connect=10, read=deadline, write=60, pool=10),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=2),  # vLLM closes idle ones after 5 s
        trust_env=False,  # a proxy for the web is not one for an inference server
    )


async def _exchange(
    client: httpx.AsyncClient, method: str, path: str, *, deadline: float, body: dict[str, Any] | None = None
) -> bytes:
    """Send a request until it is answered, and return a 200's content; everything else raises."""
    url = str(client.base_url).rstrip("/")
    failure = ""
    with trio.move_on_after(deadline):  # httpx's own timeouts never end a trickle
        for attempt in range(TRIES):
            if attempt:
                await trio.sleep(BACKOFF * 2 ** (attempt - 1))
            try:
                response = await client.request(method, path, json=body)
            except httpx.ReadTimeout:
                break
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = (
                    f"no vLLM answers at {url} ({one_line(error)}): start one with "
                    "`vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs`"
                )
                continue
            except httpx.TransportError as error:
                failure = f"{url} broke off ({one_line(error)}): see the server's log"
                continue
            except httpx.HTTPError as error:  # undecodable, redirects in a circle
                raise PolicyError(f"{url} answers garbled HTTP ({one_line(error)}): is it vLLM?") from None
            if response.status_code == 200:
                return response.content
            if response.status_code < 500:
                raise _refusal(response, url)
            failure = (
                f"{url} failed, HTTP {response.status_code} ({explanation(response)}): see the server's log"
            )
        if failure:
            raise PolicyError(failure)
    raise PolicyError(
        f"{url} gave no whole answer to {path} within {deadline:g} s{f' ({failure})' if failure else ''}: "
        "allow more time, or fewer episodes at once"
    )


def _refusal(response: httpx.Response, url: str) -> PolicyError | ContextOverflow:
    message, status = explanation(response), response.status_code
    if status == 400 and re.search(r"maximum (model|context) length", message):
        return ContextOverflow(message)
    match status:
        case 403:
            cure = "start vLLM with --enable-scale-out"
        case 404 if "does not exist" in message:
            cure = "name the served model, or start vLLM with --served-model-name"
        case 404:
            cure = "vLLM 0.32 or newer is needed"
        case _:
            cure = "see the server's log"
    return PolicyError(f"{url} refused {response.request.url.path} with HTTP {status} ({message}): {cure}")


def explanation(response: httpx.Response) -> str:
    """The server's own explanation, on one line."""
    try:
        return one_line(response.json()["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return one_line(response.text) or "no explanation"


def one_line(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= 300 else line[:300] + "..."


def _read(shape: type[Shape], content: bytes, url: str) -> Shape:
    try:
        return shape.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise PolicyError(f"{url} answered as vLLM does not ({one_line(what)}): is it vLLM?") from None


def _checked(
    answer: _Answer, url: str, *, stop_token_ids: frozenset[int], max_tokens: int
) -> tuple[bool, Completion]:
    """Whether the server gave the completion up, and what there is of it, if it all fits together."""
    if len(answer.choices) != 1:
        raise PolicyError(f"{url} sent {len(answer.choices)} completions where 1 was asked for")
    [choice] = answer.choices
    ids, reason = choice.token_ids, choice.finish_reason
    if reason not in ("stop", "length", "abort"):
        raise PolicyError(f"{url} gave a completion up ({reason!r}): see the server's log")
    if reason == "abort" and not ids:
        return True, Completion(token_ids=[], logprobs=[], policy_versions=[], finish_reason="length")
    if not 0 < len(ids) <= max_tokens or min(ids) < 0:
        raise PolicyError(f"{url} sent {len(ids)} token ids where 1 to {max_tokens} were asked for")
    if any(token in stop_token_ids for token in ids[:-1]):
        raise PolicyError(f"{url} sampled on after a stop token: it ignores stop_token_ids")
    if (reason == "stop") != (ids[-1] in stop_token_ids):
        raise PolicyError(f"{url} says {reason!r}, its last token {ids[-1]} does not: the answer is garbled")
    logprobs = choice.logprobs.content if choice.logprobs else []
    if [entry.token_id for entry in logprobs] != ids:
        raise PolicyError(f"{url} sent logprobs of other tokens than it sampled: the answer is garbled")
    return reason == "abort", Completion(
        token_ids=ids,
        logprobs=[_checked_logprob(entry.logprob, url) for entry in logprobs],
        policy_versions=_versions(choice.weight_versions, len(ids), url),
        finish_reason="stop" if reason == "stop" else "length",
    )


def _joined(first: Completion, second: Completion) -> Completion:
    return Completion(
        token_ids=first.token_ids + second.token_ids,
        logprobs=(first.logprobs or []) + (second.logprobs or []),
        policy_versions=first.policy_versions + second.policy_versions,
        finish_reason=second.finish_reason,
    )


def _checked_logprob(logprob: float, url: str) -> float:
    if logprob <= NO_LOGPROB or logprob > 1e-6:
        raise PolicyError(f"{url} sent {logprob:g} as a logprob: the weights give no valid distribution")
    return logprob


def _versions(spans: list[_Span] | None, count: int, url: str) -> list[int]:
    """Version of each token. A label counts by the number at its end (`step-7` is 7), others as 0.

    vLLM's label before the first update is `default`; servers without versions send no spans.
    """
    versions: list[int] = []
    for span in spans or [_Span(version="default", start=0, end=count)]:
        if span.start != len(versions) or not span.start < span.end <= count:
            break
        number = re.search(r"[0-9]+$", span.version)
        versions += [int(number.group()) if number else 0] * (span.end - span.start)
    if len(versions) != count:
        raise PolicyError(f"{url} does not say which weights sampled each token: its version spans have gaps")
    return versions
