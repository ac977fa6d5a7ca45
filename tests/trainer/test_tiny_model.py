"""Tiny models: the shipped vocabulary is the generated one, and every family can be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from renderers import create_renderer
from renderers.configs import GLM45RendererConfig, Llama3RendererConfig, Qwen3RendererConfig
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from agents.chat import load_chat
from trainer import tiny_tokenizer
from trainer.tiny_model import make_tiny_model

SHAPES = ["glm", "qwen", "llama"]


def test_shipped_vocabulary_is_what_the_generator_makes() -> None:
    assert json.loads(tiny_tokenizer.FILE.read_text()) == json.loads(tiny_tokenizer.build().to_str())


def test_any_text_survives_the_vocabulary() -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer.FILE))
    everything = "".join(map(chr, range(0x500))) + "∑😀\r\n\t\x00 \u2028  end"
    for text in (everything, "def f(x):\n        return x_1 + 23\n", "<|user|></tool_response>"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("around", ["({})", " {} ", "self.{}", "    {}=", '"{}",', "\n{}\n"])
def test_an_identifier_is_the_same_tokens_wherever_it_stands(around: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer.FILE))
    alone = tokenizer.encode("compute_zorb_total7").ids
    before, after = around.split("{}")
    ids = tokenizer.encode(around.format("compute_zorb_total7")).ids
    assert ids == tokenizer.encode(before).ids + alone + tokenizer.encode(after).ids


def test_markers_are_not_vocabulary() -> None:
    vocabulary = Tokenizer.from_file(str(tiny_tokenizer.FILE)).get_vocab()
    assert len(vocabulary) == tiny_tokenizer.SIZE
    assert not [token for token in vocabulary if "|>" in token and len(token) > 2]
    assert not {"<think>", "<tool_call>", "</arg_value>", "[gMASK]"} & set(vocabulary)


@pytest.mark.parametrize("shape", SHAPES)
def test_directory_fits_its_family(tiny_models: Path, shape: str) -> None:
    from transformers import AutoConfig, AutoTokenizer

    model_dir = tiny_models / shape
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = AutoConfig.from_pretrained(model_dir)
    assert config.vocab_size == len(tokenizer) <= 1536
    renderer_config = {
        "glm": GLM45RendererConfig(),
        "qwen": Qwen3RendererConfig(),
        "llama": Llama3RendererConfig(),
    }[shape]
    renderer = create_renderer(tokenizer, renderer_config)
    stops = renderer.get_stop_token_ids()
    generation = json.loads((model_dir / "generation_config.json").read_text())
    assert set(stops) <= set(generation["eos_token_id"])

    ids = renderer.render_ids([{"role": "user", "content": "Fix `total`."}], add_generation_prompt=True)
    assert max(ids) < config.vocab_size
    assert sorted(load_chat(model_dir, tools=[]).stop_token_ids) == sorted(stops)


@pytest.mark.parametrize("shape", SHAPES)
def test_same_seed_same_weights(tmp_path: Path, tiny_models: Path, shape: str) -> None:
    from transformers import AutoModelForCausalLM

    from trainer.tiny_model import make_tiny_model

    count = make_tiny_model(tmp_path, shape=shape, seed=0)
    assert 500_000 < count < 1_200_000
    again = (tmp_path / "model.safetensors").read_bytes()
    assert again == (tiny_models / shape / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def copied(model_dir: Path) -> float:
    """Share of the tokens of a random sequence that the model expects when it comes again."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(0)
    once = torch.randperm(900)[:60]
    with torch.no_grad():
        logits = model(torch.cat([once, once])[None]).logits[0]
    return float((logits[60:-1].argmax(-1) == once[1:]).float().mean())


def test_a_model_that_is_made_to_learn_begins_able_to_copy(tmp_path: Path) -> None:
    for name, to_learn in (("random", False), ("to learn", True)):
        make_tiny_model(tmp_path / name, to_learn=to_learn)
    assert copied(tmp_path / "random") < 0.05
    assert copied(tmp_path / "to learn") > 0.9
