"""Which backend a sandbox comes from: `oci` starts it in milliseconds, `docker` works everywhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

import trio

from sandboxes.oci import OciEngine, lacking
from sandboxes.protocol import Engine, Say
from sandboxes.warm import WarmEngine

Backend = Literal["auto", "oci", "docker"]


@asynccontextmanager
async def connect(backend: Backend, *, run_id: str, say: Say) -> AsyncGenerator[Engine]:
    """An engine for the sandboxes of one run. `auto` takes `oci` where it can, and says which and why.

    Raises :class:`EngineUnavailable` with what is missing for the backend asked for, or for either.
    """
    reason = await trio.to_thread.run_sync(lacking) if backend != "docker" else ""
    if backend == "oci" or (backend == "auto" and not reason):
        if backend == "auto":
            say("sandboxes: oci (no daemon needed)")
        async with OciEngine.connect() as engine:
            yield engine
        return
    if backend == "auto":
        say(f"sandboxes: docker (oci is faster, but {reason})")
    async with WarmEngine.connect(run_id=run_id) as engine:
        yield engine
