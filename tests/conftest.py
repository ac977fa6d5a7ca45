"""What is made once a session: the base image for tests marked `docker`, a served tiny model for `vllm`."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from sandboxes.engine import ensure_base_image, ensure_engine
from swe_env.serve import Server, serve

CONTEXT = 8192
"""Tokens a shared server takes: prompt and completion together."""


MAKE_MODELS = """
import sys
from pathlib import Path
from trainer.tiny_model import make_tiny_model

for shape in ("glm", "qwen", "llama"):
    make_tiny_model(Path(sys.argv[1]) / shape, shape=shape)
"""


@dataclass(frozen=True)
class RunningModel:
    url: str
    model_dir: Path
    context: int


@pytest.fixture(scope="session")
def base_image() -> str:
    """The image of shipped tasks (made on the first use, about a minute)."""
    ensure_engine(print)
    return ensure_base_image(print)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one tiny random model a family: glm, qwen, llama."""
    models = tmp_path_factory.mktemp("models")
    # in a process of its own: torch stays out of this one
    subprocess.run([sys.executable, "-c", MAKE_MODELS, str(models)], check=True, timeout=120)
    return models


@pytest.fixture(scope="session")
def tiny_glm(tiny_models: Path) -> Path:
    """A tiny random GLM-4.5-shaped model directory (float32)."""
    return tiny_models / "glm"


@pytest.fixture(scope="session")
def glm_server(tiny_glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningModel]:
    """vLLM serving `tiny_glm` as `policy`; about half a minute at the first use."""
    with running(tiny_glm, tmp_path_factory.mktemp("vllm") / "server.log") as server:
        yield RunningModel(server.url, tiny_glm, CONTEXT)


@contextmanager
def running(model_dir: Path, log_path: Path) -> Iterator[Server]:
    """`serve` for synchronous tests: its trio loop lives in a thread until the block is left."""
    started: queue.Queue[tuple[Server, trio.Event, trio.lowlevel.TrioToken] | BaseException] = queue.Queue()

    async def keep() -> None:
        async with serve(model_dir, log_path=log_path, max_model_len=CONTEXT) as server:
            stop = trio.Event()
            started.put((server, stop, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def body() -> None:
        try:
            trio.run(keep)
        except BaseException as error:  # handed to the test
            started.put(error)

    thread = threading.Thread(target=body, name="vllm")
    thread.start()
    outcome = started.get(timeout=400)
    if isinstance(outcome, BaseException):
        raise outcome
    server, stop, token = outcome
    try:
        yield server
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=token)
        thread.join(timeout=30)
