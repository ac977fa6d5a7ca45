"""The vLLM policy: exact tokens and logprobs from a real server, and what becomes of a server's lies."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio

from agents.policy import Completion, ContextOverflow, PolicyError, Sampling
from agents.vllm import VllmPolicy, check
from tests.agents.liars import STOP, answer, answering, span
from tests.conftest import RunningModel

PROMPT = [992 + 2, 992 + 4, 40, 41, 42, 300, 301, 302]


# --- a server that is not what it should be ----------------------------------------------------


def complete(url: str, *, deadline: float = 20, max_tokens: int = 8, **options: Any) -> Completion:
    async def body() -> Completion:
        async with VllmPolicy.connect(url, stop_token_ids=[STOP], deadline=deadline, **options) as policy:
            return await policy.complete(PROMPT, max_tokens=max_tokens)

    return trio.run(body)


def test_a_good_answer_is_taken_word_for_word() -> None:
    spans = [span("default", 0, 1), span("step-12", 1, 2), span("13", 2, 3)]
    with answering((200, answer(spans=spans))) as (url, asked):
        completion = complete(url, sampling=Sampling(temperature=0.7), max_tokens=5)
    assert completion == Completion(
        token_ids=[5, 6, STOP], logprobs=[-1.0, -0.5, 0.0], policy_versions=[0, 12, 13], finish_reason="stop"
    )
    [request] = asked
    params = request["sampling_params"]
    assert request["token_ids"] == PROMPT
    assert (params["temperature"], params["max_tokens"], params["stop_token_ids"]) == (0.7, 5, [STOP])
    assert not {"seed", "top_p", "top_k"} & set(params)


GARBAGE = {
    "not json": b"<html>504 Gateway</html>",
    "empty": b"",
    "not an object": b"[]",
    "no completion": b'{"choices": []}',
    "two completions": json.dumps({"choices": json.loads(answer())["choices"] * 2}).encode(),
    "no tokens": answer(ids=(), reason="length"),
    "float ids": answer(ids=(5.0, 6.5, STOP)),
    "text ids": answer(ids=("5", "6", "7")),
    "boolean ids": answer(ids=(True, 6, STOP)),
    "negative ids": answer(ids=(-5, 6, STOP)),
    "too few logprobs": answer(logprobs=(-1.0, -0.5)),
    "no logprobs": answer().replace(b'"content"', b'"contents"'),
    "logprobs of other tokens": answer().replace(b'"token_id": 6', b'"token_id": 5'),
    "logprob nan": answer(logprobs=(-1.0, float("nan"), 0.0)),
    "logprob infinite": answer(logprobs=(-1.0, float("-inf"), 0.0)),
    "logprob null": answer(logprobs=(-1.0, None, 0.0)),
    "logprob of vLLM for nan": answer(logprobs=(-1.0, -9999.0, 0.0)),
    "logprob positive": answer(logprobs=(-1.0, 0.1, 0.0)),
    "given up after a stop token": answer(reason="abort"),
    "error": answer(reason="error"),
    "stop without a stop token": answer(ids=(5, 6, 8)),
    "length after a stop token": answer(reason="length"),
    "on after a stop token": answer(ids=(5, STOP, STOP)),
    "more than asked for": answer(ids=(5,) * 9, logprobs=(-1.0,) * 9, reason="length"),
    "version gap": answer(spans=[span("1", 0, 1), span("2", 2, 3)]),
    "version overlap": answer(spans=[span("1", 0, 2), span("2", 1, 3)]),
    "versions too short": answer(spans=[span("1", 0, 2)]),
    "versions too long": answer(spans=[span("1", 0, 4)]),
    "version of no token": answer(spans=[span("1", 0, 0), span("1", 0, 3)]),
}


def test_a_completion_that_the_server_gives_up_is_gone_on_with() -> None:
    first = answer((5, 6), (-1.0, -0.5), "abort", [span("step-3", 0, 2)])
    nothing = answer((), (), "abort")
    rest = answer((8, STOP), (-2.0, 0.0), "stop", [span("step-4", 0, 2)])
    with answering((200, first), (200, nothing), (200, rest)) as (url, asked):
        completion = complete(url, max_tokens=5)
    assert completion == Completion(
        token_ids=[5, 6, 8, STOP],
        logprobs=[-1.0, -0.5, -2.0, 0.0],
        policy_versions=[3, 3, 4, 4],
        finish_reason="stop",
    )
    assert [request["token_ids"] for request in asked] == [PROMPT, [*PROMPT, 5, 6], [*PROMPT, 5, 6]]
    assert [request["sampling_params"]["max_tokens"] for request in asked] == [5, 3, 3]


def test_a_completion_that_is_given_up_with_its_last_token_is_whole() -> None:
    with answering((200, answer((5, 6), (-1.0, -0.5), "abort"))) as (url, asked):
        assert complete(url, max_tokens=2).finish_reason == "length"
    assert len(asked) == 1


def test_a_server_that_gives_up_every_completion_is_an_error() -> None:
    with (
        answering((200, answer((), (), "abort"))) as (url, _),
        pytest.raises(PolicyError, match="did not finish a completion within 1 s: it gives it up each time"),
    ):
        complete(url, deadline=1)


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_an_error_of_one_line_and_not_asked_for_twice(body: bytes) -> None:
    with answering((200, body)) as (url, asked):
        with pytest.raises(PolicyError) as caught:
            complete(url)
        assert len(asked) == 1
    message = str(caught.value)
    assert "\n" not in message
    assert url in message
    assert len(message) < 450


@pytest.mark.parametrize("first", [(500, b"boom"), (503, b""), (0, b"")], ids=["500", "503", "hang up"])
def test_a_passing_failure_is_tried_again(first: tuple[int, bytes]) -> None:
    with answering(first, first, (200, answer())) as (url, asked):
        assert complete(url).token_ids == [5, 6, STOP]
    assert len(asked) == 3


def test_a_lasting_failure_is_given_up_after_three_tries() -> None:
    body = json.dumps({"error": {"message": "EngineCore\n  encountered an issue", "code": 500}}).encode()
    with answering((500, body)) as (url, asked):
        with pytest.raises(PolicyError, match="HTTP 500 .EngineCore encountered an issue"):
            complete(url)
        assert len(asked) == 3


REFUSALS: dict[str, tuple[int, str, type[Exception], str]] = {
    "closed endpoint": (403, "forbidden", PolicyError, "--enable-scale-out"),
    "other model": (404, "The model `x` does not exist.", PolicyError, "--served-model-name"),
    "other server": (404, "Not Found", PolicyError, "vLLM 0.32"),
    "bad request": (400, "Token id 5000 is out of vocabulary", PolicyError, "out of vocabulary"),
    "too long": (400, "prompt (length 9) is longer than the maximum model length of 8", ContextOverflow, "9"),
    "too long, older": (400, "This model's maximum context length is 8 tokens", ContextOverflow, "8"),
}


@pytest.mark.parametrize(("status", "text", "error", "says"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_names_its_cure(status: int, text: str, error: type[Exception], says: str) -> None:
    with answering((status, json.dumps({"error": {"message": text}}).encode())) as (url, asked):
        with pytest.raises(error, match=says) as caught:
            complete(url)
        assert len(asked) == 1
    assert "\n" not in str(caught.value)


def test_nobody_listens() -> None:
    start = time.monotonic()
    for ask in (complete, lambda url: trio.run(check, url)):
        with pytest.raises(PolicyError, match="no vLLM answers at .*start one with"):
            ask("http://127.0.0.1:9")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://127.0.0.1", "http://127.0.0.1:nope"])
def test_not_a_url(url: str) -> None:
    with pytest.raises(PolicyError) as caught:
        complete(url)
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_meets_the_deadline() -> None:
    start = time.monotonic()
    with answering((200, answer()), delay=5) as (url, _asked):
        with pytest.raises(PolicyError, match="within 0.5 s"):
            complete(url, deadline=0.5)
        assert time.monotonic() - start < 4.5


# --- the real one ------------------------------------------------------------------------------


def with_policy(server: RunningModel, body: Callable[[VllmPolicy], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with VllmPolicy.connect(server.url, **{"stop_token_ids": [], **options}) as policy:
            return await body(policy)

    return trio.run(run)


@pytest.mark.vllm
def test_check_reports_what_is_served(glm_server: RunningModel) -> None:
    served = trio.run(check, glm_server.url)
    assert (served.model, served.max_model_len, served.processed_logprobs) == (
        "policy",
        glm_server.context,
        True,
    )
    assert served.vllm_version.startswith("0.")

    async def ask_for_another() -> None:
        await check(glm_server.url, model="other")

    with pytest.raises(PolicyError, match=r"serves 'policy', not 'other': add --served-model-name other"):
        trio.run(ask_for_another)


@pytest.mark.vllm
def test_tokens_are_the_servers_own(glm_server: RunningModel) -> None:
    params = {"temperature": 0, "max_tokens": 40, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": params}
    raw = httpx.post(f"{glm_server.url}/inference/v1/generate", json=body, timeout=60, trust_env=False).json()

    async def sample(policy: VllmPolicy) -> Completion:
        return await policy.complete(PROMPT, max_tokens=40)

    completion = with_policy(glm_server, sample, sampling=Sampling(temperature=0))
    assert completion.token_ids == raw["choices"][0]["token_ids"]
    assert completion.finish_reason == "length"
    assert completion.policy_versions == [0] * 40


@pytest.mark.vllm
def test_logprobs_of_a_stream_in_pieces_equal_its_score(glm_server: RunningModel) -> None:
    draw = random.Random(0)

    async def episode(policy: VllmPolicy) -> None:
        stream, sampled = list(PROMPT), {}
        for _turn in range(4):
            completion = await policy.complete(stream, max_tokens=50)
            assert completion.logprobs is not None
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
                sampled[len(stream)] = logprob
                stream.append(token)
            stream += [draw.randrange(992) for _ in range(100)]  # what the tools said
        scores = await policy.score(stream)
        assert len(scores) == len(stream)
        assert scores[0] is None
        assert max(abs(logprob - scores[at]) for at, logprob in sampled.items()) < 1e-4  # type: ignore[operator]

    with_policy(glm_server, episode)


@pytest.mark.vllm
def test_logprobs_are_those_of_the_sampled_temperature(glm_server: RunningModel) -> None:
    """At T = 0.5 a greedy-ish token is likelier than at T = 1: raw logprobs would be the same."""

    async def sample(policy: VllmPolicy) -> None:
        completion = await policy.complete(PROMPT, max_tokens=60)
        scores = (await policy.score(PROMPT + completion.token_ids))[len(PROMPT) :]
        assert completion.logprobs is not None
        pairs = zip(completion.logprobs, scores, strict=True)
        assert sum(logprob - (score or 0) for logprob, score in pairs) / 60 > 0.2

    with_policy(glm_server, sample, sampling=Sampling(temperature=0.5))


@pytest.mark.vllm
def test_the_stop_token_is_the_last_one_and_the_only_one(glm_server: RunningModel) -> None:
    stops = set(range(0, 992, 4))

    async def sample(policy: VllmPolicy) -> None:
        for _ in range(10):
            completion = await policy.complete(PROMPT, max_tokens=500)
            assert completion.finish_reason == "stop"
            assert completion.token_ids[-1] in stops
            assert not stops & set(completion.token_ids[:-1])
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids) == len(completion.policy_versions)

    with_policy(glm_server, sample, stop_token_ids=stops)


@pytest.mark.vllm
def test_only_our_stop_tokens_stop(glm_server: RunningModel) -> None:
    """generation_config.json of the model names three; none of them was asked for."""

    async def sample(policy: VllmPolicy) -> None:
        completion = await policy.complete(PROMPT, max_tokens=2000)
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 2000

    with_policy(glm_server, sample)


@pytest.mark.vllm
def test_the_context_ends_a_completion_and_refuses_a_prompt(glm_server: RunningModel) -> None:
    async def sample(policy: VllmPolicy) -> None:
        nearly_full = PROMPT * 1023
        assert len(nearly_full) == glm_server.context - 8
        completion = await policy.complete(nearly_full, max_tokens=100)
        assert (len(completion.token_ids), completion.finish_reason) == (8, "length")
        for prompt in (PROMPT * 1024, PROMPT * 1100):
            with pytest.raises(ContextOverflow, match="8192"):
                await policy.complete(prompt, max_tokens=100)

    with_policy(glm_server, sample)


@pytest.mark.vllm
def test_many_at_once_do_not_mix(glm_server: RunningModel) -> None:
    async def sample(policy: VllmPolicy) -> None:
        async def one(number: int) -> None:
            prompt = [*PROMPT, number]
            completion = await policy.complete(prompt, max_tokens=30)
            scores = (await policy.score(prompt + completion.token_ids))[len(prompt) :]
            assert completion.logprobs is not None
            pairs = zip(completion.logprobs, scores, strict=True)
            assert max(abs(logprob - (score or 0)) for logprob, score in pairs) < 1e-4

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, number)

    with_policy(glm_server, sample)


@pytest.mark.vllm
def test_a_version_label_is_stamped_on_the_tokens_it_sampled(glm_server: RunningModel) -> None:
    async def label(version: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(
                f"{glm_server.url}/update_weight_version", json={"new_version": version}
            )
            assert answer.status_code == 200, answer.text

    async def relabelled(policy: VllmPolicy, after: float) -> Completion:
        completions: list[Completion] = []

        async def one() -> None:
            completions.append(await policy.complete(PROMPT, max_tokens=2000))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one)
                await trio.sleep(after)
                await label("step-7")
        finally:
            await label("default")
        return completions[0]

    async def sample(policy: VllmPolicy) -> Completion:
        # when sampling begins and ends is the server's and chance's: try until the label comes between
        for attempt in range(30):
            completion = await relabelled(policy, after=0.05 * (attempt + 1))
            if len(set(completion.policy_versions)) > 1:
                break
        return completion

    versions = with_policy(glm_server, sample).policy_versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}


@pytest.mark.vllm
def test_a_cancelled_request_leaves_the_server(glm_server: RunningModel) -> None:
    async def sample(policy: VllmPolicy) -> None:
        with trio.move_on_after(0.5) as scope:
            await policy.complete(PROMPT, max_tokens=6000)
        assert scope.cancelled_caught
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(50):
                metrics = (await client.get(f"{glm_server.url}/metrics")).text
                line = next(
                    line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")
                )
                if float(line.rsplit(" ", 1)[1]) == 0:
                    return
                await trio.sleep(0.1)
        raise AssertionError(line)

    with_policy(glm_server, sample)
