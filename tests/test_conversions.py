"""Models whose stored names and layouts are not their own: transformers' conversions, both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from weights_fixture import assert_same_files

from autoplan.capture import load_model_source
from autoplan.runtime.load import first_names
from autoplan.runtime.pretrained import library_of, named_sources, write_pretrained
from autoplan.runtime.safetensors_files import open_safetensors
from autoplan.runtime.sources import Held

MODELS = Path(__file__).parent / "models"
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "vocab_size": 96}


class Wrapped(nn.Module):
    """A library's model inside the user's own, which has a weight beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = load_model_source(MODELS / "tied_llama.py").build()
        self.scale = nn.Parameter(torch.ones(()))


def qwen3_moe() -> Any:
    sizes = {**TEXT, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def gpt_oss() -> Any:
    sizes = {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**TEXT))
    return transformers.LlavaForConditionalGeneration(config)


def from_file(name: str) -> Callable[[], Any]:
    return lambda: load_model_source(MODELS / f"{name}.py").build()


BUILDERS: dict[str, Callable[[], Any]] = {
    **{name: from_file(name) for name in ("tiny_deepseek", "tiny_t5", "tiny_bert")},
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "llava": llava,
    "wrapped": Wrapped,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_conversions_round_trip(name: str, tmp_path: Path) -> None:
    """Every tensor under the model's name, the files again as they were, and a folder without an original."""
    torch.manual_seed(0)
    model = BUILDERS[name]()
    inner = model.net if isinstance(model, Wrapped) else model
    inner.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    state, names = model.state_dict(), first_names(model)
    library = library_of(model)
    sources = named_sources(open_safetensors(tmp_path / "in"), library)
    stored = {names[alias] for alias in sources}
    assert set(names.values()) - stored <= {"scale"}
    assert not [alias for alias, one in sources.items() if not torch.equal(one.whole(), state[alias])]
    dtypes = {alias: value.dtype for alias, value in state.items()}
    held = {alias: Held(value) for alias, value in state.items()}
    write_pretrained(tmp_path / "out", held, dtypes, library, tmp_path / "in")
    assert_same_files(tmp_path / "in", tmp_path / "out")
    once = {alias: held[alias] for alias, first in names.items() if alias == first}
    write_pretrained(tmp_path / "fresh", once, dtypes, library_of(model), None)
    again = type(inner).from_pretrained(tmp_path / "fresh").state_dict()
    assert not [key for key, value in inner.state_dict().items() if not torch.equal(again[key], value)]
