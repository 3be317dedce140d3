"""The architecture that a launch script states in, a model source that can be captured and priced out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from autoplan.capture.source import ModelSource, load_model_source
from autoplan.errors import BadInputError
from autoplan.importing.settings import Settings
from autoplan.validation.transformer import Shape, decoder_source

NEEDED = ("layers", "hidden", "heads", "vocab")


def model_of(settings: Settings) -> ModelSource:
    """A decoder of the stated sizes: gated or classic, dense or with experts (built by transformers).

    Raises BadInputError naming what the script does not state.
    """
    model = dict(settings.model)
    missing = [name for name in NEEDED if not model.get(name)]
    if missing:
        raise BadInputError(
            f"the script does not state the model's {', '.join(missing)}; give the model: --model model.py."
        )
    model.setdefault("ffn", 4 * model["hidden"])
    model.setdefault("kv_heads", model["heads"])
    model.setdefault("head_dim", model["hidden"] // model["heads"])
    if settings.gated or model.get("experts", 0) > 1:
        return _from_config(_config(model))
    return _classic(settings, model)


def _classic(settings: Settings, model: dict[str, int]) -> ModelSource:
    shape = Shape(
        hidden=model["hidden"],
        heads=model["heads"],
        kv_heads=model["kv_heads"],
        head_dim=model["head_dim"],
        ffn=model["ffn"],
        gated=False,
        vocab=model["vocab"],
        tied=not settings.has("--untie-embeddings-and-output-weights"),
        sequence=settings.sequence or 2048,
    )
    return decoder_source(shape, model["layers"])


def _config(model: dict[str, int]) -> dict[str, Any]:
    """A Hugging Face config with these sizes."""
    experts = model.get("experts", 0) > 1
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if experts else "llama",
        "num_hidden_layers": model["layers"],
        "hidden_size": model["hidden"],
        "intermediate_size": model["ffn"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"],
        "head_dim": model["head_dim"],
        "vocab_size": model["vocab"],
        "tie_word_embeddings": False,
        "max_position_embeddings": 2**20,
    }
    if experts:
        config |= {
            "num_experts": model["experts"],
            "num_experts_per_tok": model.get("topk", 2),
            "moe_intermediate_size": model.get("expert_ffn", model["ffn"]),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _from_config(config: dict[str, Any]) -> ModelSource:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return load_model_source(path)
