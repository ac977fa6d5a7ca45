"""A stand-in for NCCL, on machines without a GPU: tensors go through the store where the group meets.

Everything around it is real: vLLM's engine on both sides, its server and its requests. Importing this module
puts it in the place of NCCL, in the process that imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from trainer import nccl_sender
from trainer.vllm_weights import pack_again


class Group:
    """What vLLM asks of NCCL to move weights."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: object) -> None:
        self._group = StatelessProcessGroup.create(host, port, rank, world_size)

    def broadcast(self, tensor: Tensor, src: int, stream: object) -> None:
        tensor.copy_(self._group.broadcast(tensor, src))

    def destroy(self) -> None:
        pass


class Worker:
    """vLLM mixes this class into its workers; it is here to have the module imported."""


def install() -> None:
    there_is_none: Callable[..., Any] = lambda *_: None  # noqa: E731
    nccl_common.stateless_init_process_group = Group
    torch.cuda.current_stream = there_is_none
    torch.accelerator.current_device_index = lambda: 0
    nccl_sender.sender = partial(nccl_sender.sender, packed=False)  # large buffers are filled on GPUs
    finish = NCCLWeightTransferEngine.finish_weight_update

    def finish_on_cpu(self: Any) -> None:
        finish(self)
        for module in self.model.modules():
            pack_again(module)

    NCCLWeightTransferEngine.finish_weight_update = finish_on_cpu


install()
