"""The weights that are trained: loaded as float32, sharded from outside, saved as a directory.

The model stays transformers' own class. Sharding is put around it (FSDP2, a layer at a time, then the
:class:`~trainer.scoring.Scorer` as root), so that one rank and many run the same forward.

Not done: a checkpoint that fits on no single machine. Every rank reads all of it before it shards.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from swe_env.rundir import RunError
from swe_env.training import LoraConfig, ModelConfig
from trainer.scoring import Scorer


def load_scorer(directory: Path, config: ModelConfig, device: torch.device | str = "cpu") -> Scorer:
    """The model of `directory`, ready to be trained. Every rank calls this; it is a collective if sharded.

    Raises OSError or ValueError, of transformers, for a directory that holds no causal language model.
    """
    frozen = torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32
    dtype = frozen if config.lora is not None else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    if config.lora is not None:
        _add_adapters(model, config.lora)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scorer = Scorer(model.to(device))
    scorer.train()  # transformers checkpoints activations of models in training only
    if config.shard or ranks() > 1:
        _shard(scorer, config, torch.device(device).type)
    return scorer


def _add_adapters(model: Any, config: LoraConfig) -> None:
    """Freeze `model`, and put float32 matrices beside its targets, within the same class of model."""
    try:
        import peft
    except ImportError:
        raise RunError("peft is not installed: pip install 'swe-env[lora]'") from None
    names = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in config.targets]
    if not names:
        raise RunError(f"trainer.lora.targets: the model has no layers {', '.join(config.targets)}")
    asked = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=names, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # every rank draws the same matrices, of which it keeps its part
        model.add_adapter(asked)
    model._hf_peft_config_loaded = False  # else save_pretrained writes adapters instead of the model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def save_model(scorer: Scorer, source: Path, out: Path) -> None:
    """Write into `out`, which exists and is empty, what vLLM and transformers load as a model directory.

    `source` is the directory that the weights were loaded from: the new ones have its dtype and its names
    (one matrix an expert), and its other files, the tokenizer among them, are copied. A collective if
    sharded: every rank calls it, the first one writes. Making `out` appear whole is the caller's
    (`swe_env.rundir.appearing`).
    """
    state = _whole(scorer.model, dtype=stored_dtype(source))
    if rank() == 0:
        # transformers' own writer undoes what its loader did to the names
        scorer.model.save_pretrained(out, state_dict=state)
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.startswith(".") and not _is_weights(file):
                shutil.copyfile(file, out / file.name)
    barrier()


def ranks() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def total(values: Tensor) -> Tensor:
    """Sum over ranks, in place; the same on all of them afterwards."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def _shard(scorer: Scorer, config: ModelConfig, device_type: str) -> None:
    mesh = init_device_mesh(device_type, (ranks(),))
    half = config.compute_dtype == "bfloat16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32 if half else None
    )
    for layer in scorer.model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


@dataclass(frozen=True)
class Part:
    """One tensor of a model's state, where it is: sharded, perhaps beside its adapter."""

    name: str
    """In the model without adapters."""
    tensor: Tensor
    adapter: Any | None
    dtype: torch.dtype
    """What it is saved and published as."""

    def gathered(self) -> Tensor:
        """All of it, the adapter added in, on this rank's device. A collective if sharded."""
        whole, adapter = _gathered(self.tensor), self.adapter
        if adapter is not None:
            down, up = (_gathered(side["default"].weight) for side in (adapter.lora_A, adapter.lora_B))
            whole = whole.float() + adapter.scaling["default"] * (up.float() @ down.float())
        return whole.to(self.dtype)


def parts(model: Any, dtype: torch.dtype) -> Iterator[Part]:
    """What `model` consists of, in the order and with the names of transformers: parameters in `dtype`,
    buffers as they are (the router's correction bias must not be rounded), tied ones once."""
    adapters = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    parameters = {name for name, _ in model.named_parameters()}
    tied: set[str] = set(model.all_tied_weights_keys or ())
    for name, tensor in model.state_dict().items():
        if name in tied or ".lora_" in name:  # the same tensor as another, or part of one
            continue
        layer, is_adapted, rest = name.partition(".base_layer.")
        yield Part(
            name=f"{layer}.{rest}" if is_adapted else name,
            tensor=tensor,
            adapter=adapters[layer] if is_adapted and rest == "weight" else None,
            dtype=dtype if name in parameters else tensor.dtype,
        )


def _whole(model: Any, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of `model` on the first rank's CPU; nothing on the others.

    One tensor at a time is gathered: a rank's accelerator never holds the whole model.
    """
    state: dict[str, Tensor] = {}
    for part in parts(model, dtype):
        whole = part.gathered()
        if rank() == 0:
            state[part.name] = whole.to("cpu", copy=True)
    return state


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def stored_dtype(directory: Path) -> torch.dtype:
    """That of the weights in a model directory, as its config.json says."""
    config = json.loads((directory / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return getattr(torch, name)


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(
        ".index.json"
    )
