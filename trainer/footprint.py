"""What a model takes, before anybody buys the machines: bytes to train and to serve it, FLOPs of a token.

`swe-env plan` runs this as `python -m trainer.footprint DIR [ADAPTED_LAYER ...]` and is answered one line of
JSON. The model is built on torch's meta device: its configuration is enough, no weights are read.

Parameters are exact, and so are the bytes of weights, gradients and moments that follow from them. What a
forward pass keeps is an estimate: it depends on kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from swe_env.footprint import Footprint

HALF = 2
"""Bytes of a bfloat16."""


def footprint(directory: Path, adapted: Sequence[str] = ()) -> Footprint:
    """Measure the model whose `config.json` is in `directory`, and its layers named as in `adapted`.

    Raises OSError or ValueError, of transformers, if there is none, or it is of no causal language model.
    """
    config = cast("Any", AutoConfig).from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = cast("Any", AutoModelForCausalLM).from_config(config)
    layers = [_parameters(layer) for layer in model.get_decoder().layers]
    everything = _parameters(model)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    experts: int = getattr(config, "num_experts_per_tok", 0) or 0
    wide = getattr(config, "moe_intermediate_size", 0) * (experts + getattr(config, "n_shared_experts", 0))
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    kept = 4 * config.hidden_size + (2 * heads + 2 * keys) * size + 4 * (wide or config.intermediate_size)
    return Footprint(
        parameters=everything,
        active=_active(model, experts),
        largest_layer=max(layers),
        outside_layers=everything - sum(layers),
        layers=len(layers),
        hidden=config.hidden_size,
        attention=heads * size,
        vocabulary=config.vocab_size,
        adapter_width=sum(
            layer.in_features + layer.out_features
            for name, layer in model.named_modules()
            if name.rsplit(".", 1)[-1] in adapted
        ),
        kv_bytes=2 * len(layers) * keys * size * HALF,
        layer_bytes=kept * HALF,
    )


def _parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _active(model: Any, experts: int) -> int:
    """Parameters that one token meets: of routed experts, those it is sent to. The embedding is a lookup."""
    count, embedding = 0, model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is embedding and embedding is not model.get_output_embeddings().weight:
            continue
        if parameter.ndim == 3 and ".experts." in name:  # [experts, ...]: one tensor holds all of them
            count += parameter.numel() // len(parameter) * min(experts, len(parameter))
        else:
            count += parameter.numel()
    return count


def main() -> None:
    transformers_logging.set_verbosity_error()
    try:
        print(footprint(Path(sys.argv[1]), sys.argv[2:]).model_dump_json(), flush=True)
    except (OSError, ValueError, AttributeError) as error:
        sys.exit(f"cannot size the model of {sys.argv[1]}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
