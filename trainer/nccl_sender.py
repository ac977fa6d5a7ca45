"""New weights from the trainer's GPUs into a running vLLM server's, by vLLM's own NCCL engine.

The first rank is the sender. Together with the server's workers it forms a group of NCCL: all of them need
GPUs of their own. The server is held while weights come, as it is when they come from a directory, and loads
them by the names that its model has on disk.

Not done: a server on another machine (the group meets at 127.0.0.1), several servers.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from swe_env.weight_client import UpdateFailed, WeightClient
from trainer.model import Part, parts, rank, stored_dtype
from trainer.scoring import Scorer


class TrainedWeights(WeightSource):
    """What is trained, a tensor at a time, with names and dtype of the model directory that it came from.

    Iterating is a collective if the model is sharded.
    """

    def __init__(self, scorer: Scorer, dtype: torch.dtype) -> None:
        self._model: Any = scorer.model
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        found: list[ParamMeta] = []
        for part in parts(self._model, self._dtype):
            shape_only = torch.empty(part.tensor.shape, dtype=part.dtype, device="meta")
            for name, tensor in self._stored(part, shape_only):
                found.append(ParamMeta(name, tensor.dtype, tuple(tensor.shape)))
        return found

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for part in parts(self._model, self._dtype):
            yield from self._stored(part, part.gathered())

    def _stored(self, part: Part, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """One matrix an expert, where the model holds those of all experts in one tensor."""
        yield from revert_weight_conversion(self._model, {part.name: whole}).items()


class _Client(WeightClient):
    """The rank that asks also waits in NCCL for the server, and would go on waiting for one that refused."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        with _refusal_ends_this_process():
            super().init_weight_transfer_engine(init_info)

    def update_weights(self, update_info: Any) -> None:
        with _refusal_ends_this_process():
            super().update_weights(update_info)


class Sender:
    """Make it with :func:`sender`."""

    def __init__(
        self, engine: NCCLTrainerWeightTransferEngine, client: WeightClient, deadline: float
    ) -> None:
        self._engine = engine
        self._client = client
        self._deadline = deadline

    def send(self, version: int) -> None:
        """Have the server sample from the present weights, called `version`. A collective.

        Raises `UpdateFailed`, or ends the process, with the server's words; the server is then left held.
        """
        self._client.version = version
        with _ends_in_time(self._deadline, f"sending the weights of version {version}"):
            self._engine.send_weights()


@contextmanager
def sender(
    scorer: Scorer, source: Path, url: str, *, deadline: float, packed: bool = True
) -> Generator[Sender]:
    """Meet the workers of the server at `url`, which was started to take weights by NCCL. A collective.

    `source` is the directory that the weights were loaded from; `deadline` [s] bounds the meeting and each
    sending: past it the process ends, and so it does where the server refuses. `packed` sends large buffers
    instead of single tensors. Raises `UpdateFailed`.
    """
    client = _Client(url, deadline)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    asked = NCCLTrainerInitInfo(
        master_address="127.0.0.1",
        master_port=port,
        world_size=1 + (client.workers() if rank() == 0 else 0),  # only the first rank is in the group
        packed=packed,
        rank=rank(),
    )
    weights = TrainedWeights(scorer, stored_dtype(source))
    with _ends_in_time(deadline, f"meeting the workers of {url}"):
        engine = NCCLTrainerWeightTransferEngine.trainer_init(asked, client=client, source=weights)
    try:
        yield Sender(engine, client, deadline)
    finally:
        engine.shutdown()


@contextmanager
def _refusal_ends_this_process() -> Generator[None]:
    try:
        yield
    except UpdateFailed as error:
        _end(str(error))


@contextmanager
def _ends_in_time(seconds: float, what: str) -> Generator[None]:
    """End this process if the block takes longer: nothing else interrupts a wait in NCCL."""
    timer = threading.Timer(seconds, _end, [f"{what} took more than {seconds:g} s: see the server's log"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(reason: str) -> NoReturn:
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)
