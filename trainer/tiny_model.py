"""A tiny random model directory, made in seconds: the real architecture, about a million parameters.

`python -m trainer.tiny_model OUT --shape glm|qwen|llama` writes config, weights, generation config and
tokenizer as `save_pretrained` does, so that vLLM, transformers and renderers load OUT like any model
from a hub. Weights are random: the model has the family's format to learn, and everything else.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import (
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer.tiny_copying import prepare_to_copy
from trainer.tiny_tokenizer import FILE

Shape = Literal["glm", "qwen", "llama"]


def make_tiny_model(
    out: Path,
    *,
    shape: Shape = "glm",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    to_learn: bool = False,
) -> int:
    """Write a model directory to `out` and return its number of parameters.

    Its weights are such that mistakes show (no bias is zero, no distribution flat), or, `to_learn`, such
    that a short training gets far.
    """
    tokenizer = family_tokenizer(shape)
    stops = [token_id(tokenizer, token) for token in STOPS[shape]]
    torch.manual_seed(seed)
    model = _build(shape, vocab_size=len(tokenizer), stops=stops)
    if not to_learn:
        _make_nontrivial(model)
    elif shape == "glm":
        prepare_to_copy(model)
    model.to(dtype)
    model.generation_config = GenerationConfig(
        eos_token_id=stops, pad_token_id=stops[0], do_sample=True, temperature=1.0
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def family_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """The shared vocabulary with one family's markers added after it (never inside it)."""
    inner = Tokenizer.from_file(str(FILE))
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL[shape]])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN[shape]])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=STOPS[shape][0],
        pad_token=STOPS[shape][0],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Id of one token that must exist."""
    found: Any = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int), f"{token!r} is not in the tokenizer"
    return found


CONTEXT = 131_072
"""Positions [tokens]; a server may allow fewer."""

SPECIAL: dict[Shape, list[str]] = {
    "glm": [
        *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": [
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>"),
    ],
}
"""Markers that decoding may skip."""

PLAIN: dict[Shape, list[str]] = {
    "glm": [
        *("/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"),
        *("</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ],
    "qwen": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    "llama": [],
}
"""Markers that are always text as well."""

STOPS: dict[Shape, list[str]] = {
    "glm": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "llama": ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
}
"""Tokens that end a turn; the first is also the padding."""


def _build(shape: Shape, *, vocab_size: int, stops: list[int]) -> Any:
    shared: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.05,
        "eos_token_id": stops,
        "pad_token_id": stops[0],
    }
    # A small rope theta: with 64 dimensions and episodes of some hundred tokens, 1e6 leaves most
    # frequencies constant, and a model this small then learns to copy far more slowly.
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    no_mtp: dict[str, Any] = {"num_nextn_predict_layers": 0}  # read by vLLM, unknown to transformers
    match shape:
        case "glm":  # GLM-4.5(-Air): a dense first layer, then experts, half of each head rotated
            return Glm4MoeForCausalLM(
                Glm4MoeConfig(
                    **shared,
                    rope_parameters={**rope, "partial_rotary_factor": 0.5},
                    moe_intermediate_size=96,
                    n_routed_experts=4,
                    num_experts_per_tok=2,
                    n_shared_experts=1,
                    n_group=1,
                    topk_group=1,
                    first_k_dense_replace=1,
                    norm_topk_prob=True,
                    routed_scaling_factor=1.0,
                    attention_bias=True,
                    use_qk_norm=False,
                    tie_word_embeddings=False,
                    **no_mtp,
                )
            )
        case "qwen":  # the small Qwen3 models tie their embeddings
            return Qwen3ForCausalLM(Qwen3Config(**shared, rope_parameters=rope, tie_word_embeddings=True))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**shared, rope_parameters=rope, tie_word_embeddings=False))


def _make_nontrivial(model: Any) -> None:
    """Fresh biases are zero and fresh logits near uniform: parity tests on such a model prove nothing."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                scale = 0.05 if name.endswith("e_score_correction_bias") else 0.02
                tensor.copy_(torch.randn_like(tensor) * scale)
        model.get_output_embeddings().weight.mul_(4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=get_args(Shape), default="glm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--to-learn", action="store_true", help="weights to train, not to test with")
    args = parser.parse_args()
    start = time.monotonic()
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    count = make_tiny_model(args.out, shape=args.shape, seed=args.seed, dtype=dtype, to_learn=args.to_learn)
    print(f"{args.out}: {args.shape}, {count:,} parameters, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
