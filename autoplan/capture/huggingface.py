"""A Hugging Face ``config.json`` comes in; a :class:`ModelSource` of that architecture goes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autoplan.capture.advice import unknown_name_message
from autoplan.capture.source import ModelSource
from autoplan.errors import BadInputError

# end of the class name -> which labels its loss wants
LABELS: tuple[tuple[str, str], ...] = (
    ("ForCausalLM", "tokens"),
    ("LMHeadModel", "tokens"),
    ("ForMaskedLM", "tokens"),
    ("ForPreTraining", "tokens"),
    ("ForConditionalGeneration", "tokens"),
    ("ForImageTextToText", "tokens"),
    ("ForTokenClassification", "classes by token"),
    ("ForSequenceClassification", "class"),
    ("ForImageClassification", "class"),
    ("ForAudioClassification", "class"),
    ("ForQuestionAnswering", "span"),
)


def config_source(path: Path) -> ModelSource:
    """The source for ``config.json``: class from ``architectures``, inputs and labels made to fit it."""
    settings = _read(path)
    try:
        import transformers
    except ImportError as error:
        raise BadInputError(
            f"{path}: a Hugging Face config needs the transformers package: "
            "pip install 'autoplan-fx[transformers]'."
        ) from error
    cls = _architecture(settings, path, transformers)
    labels = next((kind for end, kind in LABELS if cls.__name__.endswith(end)), None)
    if labels is None:
        ends = ", ".join(end for end, _ in LABELS)
        raise BadInputError(
            f"{path}: {cls.__name__} computes no loss; set `architectures` to the class to be trained "
            f"(its name ends in one of {ends})."
        )
    config = _config(cls, settings, path)
    tokens = cls.main_input_name == "input_ids"

    def construct() -> Any:
        return cls(config)

    return ModelSource(
        name=_name(settings, path, cls),
        path=str(path),
        construct=construct,
        make_inputs=_inputs_of(config, cls.main_input_name, labels, path),
        size_names=("sequence",) if tokens or labels == "tokens" else (),
        required_sizes=("sequence",) if tokens or labels == "tokens" else (),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", 1)
        raise BadInputError(f"{path}:{line}: not valid JSON: {getattr(error, 'msg', error)}.") from error
    if not isinstance(settings, dict) or not (settings.get("architectures") or settings.get("model_type")):
        raise BadInputError(
            f"{path}: not a Hugging Face model config: it should be an object with `model_type` and "
            '`architectures`, e.g. "architectures": ["LlamaForCausalLM"].'
        )
    return settings


def _architecture(settings: dict[str, Any], path: Path, transformers: Any) -> Any:
    names = settings.get("architectures") or []
    if not names:
        raise BadInputError(
            f'{path}: `architectures` is missing: add e.g. "architectures": ["LlamaForCausalLM"].'
        )
    cls = getattr(transformers, names[0], None)
    if cls is None:
        known = [name for name in dir(transformers) if any(name.endswith(end) for end, _ in LABELS)]
        raise BadInputError(
            f"{path}: " + unknown_name_message(names[0], known, "architecture", "transformers")
        )
    return cls


def _config(cls: Any, settings: dict[str, Any], path: Path) -> Any:
    try:
        config = cls.config_class.from_dict(dict(settings))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(f"{path}: {cls.config_class.__name__} refuses it: {reason}.") from error
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if getattr(text, "num_labels", None) == 1:
        config.num_labels = 2
    return config


def _name(settings: dict[str, Any], path: Path, cls: Any) -> str:
    given = str(settings.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return given or (path.resolve().parent.name if path.name == "config.json" else path.stem) or cls.__name__


def _inputs_of(config: Any, main_input: str, labels: str, path: Path) -> Callable[..., dict[str, Any]]:
    """The ``example_inputs`` function of an architecture."""
    text = config.get_text_config()

    def example_inputs(batch_size: int, sequence: int = 1) -> dict[str, Any]:
        inputs = _main_input(config, main_input, batch_size, sequence, path)
        classes = int(getattr(config, "num_labels", 2) or 2)
        if labels == "tokens":
            vocabulary = int(text.vocab_size)
            length = min(sequence, int(getattr(text, "max_target_positions", sequence) or sequence))
            same = inputs.get("input_ids")
            own = same is None or getattr(config, "is_encoder_decoder", False)
            inputs["labels"] = torch.randint(vocabulary, (batch_size, length)) if own else same
        elif labels == "classes by token":
            inputs["labels"] = torch.randint(classes, (batch_size, sequence))
        elif labels == "class":
            inputs["labels"] = torch.randint(classes, (batch_size,))
        else:
            inputs["start_positions"] = torch.randint(sequence, (batch_size,))
            inputs["end_positions"] = torch.randint(sequence, (batch_size,))
        return inputs

    return example_inputs


def _main_input(config: Any, main_input: str, batch: int, sequence: int, path: Path) -> dict[str, Any]:
    text = config.get_text_config()
    vision = getattr(config, "vision_config", None)
    if main_input == "pixel_values":
        return {"pixel_values": _images(config, batch)}
    if main_input in ("input_features", "input_values"):
        return {main_input: _sound(config, main_input, batch)}
    limit = int(text.vocab_size)
    special = [
        getattr(config, name, None) for name in ("image_token_id", "image_token_index", "pad_token_id")
    ]
    tokens = torch.randint(limit, (batch, sequence))
    for token in special:
        if isinstance(token, int) and 0 <= token < limit:
            tokens[tokens == token] = (token + 1) % limit
    inputs: dict[str, Any] = {"input_ids": tokens}
    image_token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if vision is not None and image_token is not None:
        count = int(getattr(config, "image_seq_length", 0) or _patches(vision))
        if count >= sequence:
            raise BadInputError(
                f"{path}: one image takes {count} tokens: --sequence must be larger than that."
            )
        tokens[:, :count] = image_token
        inputs["pixel_values"] = _images(vision, batch)
    return inputs


def _patches(vision: Any) -> int:
    return (int(vision.image_size) // int(vision.patch_size)) ** 2


def _images(config: Any, batch: int) -> torch.Tensor:
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    return torch.randn(batch, int(getattr(config, "num_channels", 3)), height, width)


def _sound(config: Any, main_input: str, batch: int) -> torch.Tensor:
    """Log-mel frames (twice the encoder's positions) or one second of 16 kHz samples."""
    if main_input == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * int(getattr(config, "max_source_positions", 1500))
        return torch.randn(batch, int(config.num_mel_bins), frames)
    return torch.randn(batch, 16000)
