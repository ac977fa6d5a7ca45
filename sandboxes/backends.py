"""Which backend a sandbox comes from: `oci` starts it in milliseconds, `docker` works everywhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

from sandboxes.oci import OciEngine
from sandboxes.oci_images import ImageStore
from sandboxes.oci_machine import lacking
from sandboxes.protocol import Engine, EngineUnavailable, Say
from sandboxes.warm import WarmEngine

Backend = Literal["auto", "oci", "docker"]


@asynccontextmanager
async def connect(backend: Backend, *, run_id: str, say: Say) -> AsyncGenerator[Engine]:
    """An engine for the sandboxes of one run. `auto` takes `oci` where it can, and says which and why.

    Raises :class:`EngineUnavailable` with what is missing for the backend asked for, or for either.
    """
    async with AsyncExitStack() as stack:
        engine: Engine | None = None
        if backend != "docker":
            try:
                engine = await stack.enter_async_context(OciEngine.connect())
            except EngineUnavailable as error:
                if backend == "oci":
                    raise
                say(f"sandboxes: docker ({error})")
            else:
                if backend == "auto":
                    say("sandboxes: oci (no daemon needed)")
        yield engine or await stack.enter_async_context(WarmEngine.connect(run_id=run_id))


def needs_no_daemon(image: str) -> bool:
    """Whether sandboxes of an image can start here while no Docker engine runs."""
    return not lacking() and ImageStore().known(image)
