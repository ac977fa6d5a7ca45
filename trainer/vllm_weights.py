"""Runs inside vLLM: new weights from a directory, into the server that is running.

vLLM is started with `swe_env.serve.UPDATABLE`, which names this module; importing it in a worker registers
a weight-transfer backend `disk` beside vLLM's own `nccl` and `ipc`. It reads what `save_pretrained` writes.

vLLM's layerwise reload leaves two copies of weights behind on CPU: expert matrices that were packed for the
CPU's kernels when the model was first loaded, and a packed head that shares its embedding. It answers that
all went well, and samples from a mixture of old and new weights. Here both are packed again. What the
server samples from is compared with the trainer after each update in any case (:mod:`swe_env.publish`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import reload

_reload: Any = reload
_safe_open: Any = safe_open


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is nothing to set up."""


@dataclass
class Directory(WeightTransferUpdateInfo):
    """Where the weights are: a model directory that every worker can read."""

    path: str


class DiskEngine(WeightTransferEngine[Nothing, Directory]):
    """Weights by way of a file system that trainer and workers share."""

    init_info_cls = Nothing
    update_info_cls = Directory

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        _reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # vLLM's own method asks for one
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Directory) -> None:
        model: Any = self.model
        model.load_weights(_tensors(Path(update_info.path)))

    def finish_weight_update(self) -> None:
        _reload.finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            pack_again(module)

    def shutdown(self) -> None:
        pass


class Worker:
    """vLLM mixes this class into its workers; it is here to have the module imported."""


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no .safetensors file")
    for file in files:
        with _safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is not a mapping
                yield name, stored.get_tensor(name)


def pack_again(module: Any) -> None:
    """What vLLM does to a layer's weights for the CPU's kernels after the first load, and only then."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    if kernel is not None and hasattr(module, "w13_weight") and module.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(module)
    elif isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
        dispatch_cpu_unquantized_gemm(module, remove_weight=False)


with suppress(ValueError):  # it is there already: a worker may import this twice
    WeightTransferEngineFactory.register_engine("disk", DiskEngine)
