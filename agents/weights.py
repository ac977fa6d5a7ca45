"""New weights into a running vLLM server, between two tokens of whatever it is sampling.

Requests in flight are held, not ended: they go on after the update, and the server says of each token which
weights sampled it. What the old weights left in the cache is thrown away, of those requests too, so that no
token is sampled from a mixture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import trio

from agents.policy import PolicyError
from agents.vllm import client_for, explanation, one_line


class UpdateFailed(PolicyError):
    """A server did not take new weights, and may hold a part of them: end it. One line, in its own words."""


Step = tuple[str, dict[str, Any] | None]
"""Path and body of a request."""
HOLD: list[Step] = [("/pause?mode=keep", None), ("/start_weight_update", None)]
"""Nothing more is sampled, and weights may come."""


def let_go(version: int) -> list[Step]:
    """The weights are there, and are called `version` from now on."""
    return [
        ("/finish_weight_update", {"weight_version": f"step-{version}"}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/resume", None),
    ]


async def update_weights(url: str, weights: Path, *, version: int, deadline: float = 600) -> None:
    """Have the server at `url` load the model directory `weights`, and call it `version` from then on.

    `weights` is an absolute path, which the server must be able to read. It must have been started with
    `swe_env.serve.UPDATABLE`. `deadline` [s] bounds the whole update.

    Raises :class:`UpdateFailed`; the server is then left held, so that nothing is sampled from weights of
    which nobody knows what they are. So it is after a cancellation.
    """
    load: Step = ("/update_weights", {"update_info": {"path": str(weights)}})
    await take_steps(url, [*HOLD, load, *let_go(version)], deadline)


async def take_steps(url: str, steps: Sequence[Step], deadline: float) -> None:
    """Have the server take these steps, one after the other, within `deadline` [s] for all of them.

    Raises :class:`UpdateFailed`.
    """
    async with client_for(url, deadline) as client:
        at = ""
        with trio.move_on_after(deadline):
            for at, body in steps:
                await _post(client, at, body)
            return
    raise UpdateFailed(f"{url} did not finish {at} within {deadline:g} s: see the server's log")


async def workers(url: str, deadline: float) -> int:
    """In how many processes the server at `url` runs its model. Raises :class:`UpdateFailed`."""
    async with client_for(url, deadline) as client:
        try:
            answer = await client.get("/get_world_size")
            return int(answer.json()["world_size"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise UpdateFailed(f"{url} does not say how many workers it has ({one_line(error)})") from None


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any] | None) -> None:
    url = str(client.base_url).rstrip("/")
    try:
        response = await client.post(path, json=body)
    except httpx.HTTPError as error:
        raise UpdateFailed(f"{url} broke off at {path} ({one_line(error)}): see the server's log") from None
    if response.status_code == 404:
        raise UpdateFailed(
            f"{url} has no {path}: start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1 and "
            "--weight-transfer-config, as `swe-env train` does"
        )
    if response.status_code != 200:
        why = explanation(response)
        raise UpdateFailed(f"{url} refused {path} with HTTP {response.status_code} ({why}): end the server")
    if path.startswith("/reset_prefix_cache") and not _succeeded(response):
        raise UpdateFailed(f"{url} keeps what the old weights cached: end the server")


def _succeeded(response: httpx.Response) -> bool:
    try:
        return bool(response.json()["success"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return False
