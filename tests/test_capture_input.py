"""Bad model files and configs give one clear sentence; a config.json is a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import NET, net, write

from autoplan.capture import capture_model, load_model_source
from autoplan.errors import AutoplanError, BadInputError
from autoplan.regions import find_regions

GOOD = NET.format(body="return self.inner(x).mean()")


# what the file holds -> words of the one message
BAD_FILES = {
    "def build_model(:\n": ("model.py:4: syntax error",),
    "import nothing_like_this\n": ("`nothing_like_this` cannot be imported", "pip install"),
    "raise SystemExit(3)\n": ("exits while it is imported", "__main__"),
    "1 / 0\n": ("model.py:4", "ZeroDivisionError"),
    "class Inner(nn.Module):\n    pass\n"
    "class Net(nn.Module):\n    def __init__(self, width, depth=2):\n        self.i = Inner()\n"
    "    def forward(self, tokens, mask):\n        pass\n": (
        "defines no build_model()",
        "return Net(width=..., depth=2)",
        '"tokens": torch.zeros(batch_size, ...)',
    ),
    GOOD.replace("def example_inputs", "def other"): (
        "defines no example_inputs(batch_size)",
        '{"x": torch.zeros(batch_size',
    ),
    GOOD.replace("return Net()", "return 3"): ("should return a torch.nn.Module", "returned an int (3)"),
    GOOD.replace("return Net()", "Net()"): ("should return a torch.nn.Module", "returned None"),
    GOOD.replace("return Net()", "return torch.load('w.pt')"): (
        "model.py:",
        "needs weights",
        "architecture alone",
    ),
    GOOD.replace("return Net()", "return Net().cuda()"): (
        "model.py:13: build_model() failed",
        "leave out .cuda()",
    ),
    GOOD.replace("return Net()", "raise SystemExit"): ("model.py:13: build_model() exits",),
    GOOD.replace("build_model()", "build_model(x)"): ("model.py:12: build_model() must take no arg", "'x'"),
    GOOD + "\0": ("model.py: syntax error: source code",),
    GOOD.replace("return Net()", "return Net(1, 2, 3)"): ("model.py:", "build_model() failed", "TypeError"),
    GOOD.replace('{"x": torch.randn(batch_size, 8)}', '{"x": [1, 2]}'): ("entry `x` is a list",),
    GOOD.replace('{"x": torch.randn(batch_size, 8)}', "None"): ("dict or tuple of tensors", "returned None"),
    GOOD.replace('{"x": torch.randn(batch_size, 8)}', "{}"): ("no tensor at all",),
    GOOD.replace("torch.randn(batch_size, 8)", "torch.randn(batch, 8)"): (
        "example_inputs(1) failed at",
        "NameError",
    ),
    GOOD.replace("example_inputs(batch_size)", "example_inputs()"): ("should take the batch size",),
    GOOD.replace("randn(batch_size", "randn(4"): ("model.py:15: example_inputs()", "x of shape (4, 8)"),
    GOOD.replace("randn(batch_size", "randn(1"): ("for 1 and for 2 it returned x of shape (1, 8)",),
    GOOD.replace('"x":', '"z":'): ("model.py:15: example_inputs() gives z", "Net.forward() takes x"),
    GOOD.replace(", 8)}", ", 8), 'y': None}"): ("example_inputs() gives x, y", "takes x"),
    GOOD.replace("mean()", "mean(1)"): ("no scalar loss", "shape (2,)", "loss.mean()"),
    GOOD.replace(".mean()", ""): ("no scalar loss", "shape (1, 8)", "def loss_fn(outputs, inputs)"),
    GOOD.replace("return self.inner(x).mean()", "return {'logits': x}"): ("no scalar loss", "['logits']"),
    GOOD + "\ndef loss_fn(outputs):\n    return outputs\n": ("model.py:18: loss_fn() must take outputs and",),
    GOOD + "\ndef loss_fn(outputs, inputs):\n    return inputs['x']\n": (
        "loss_fn(outputs, inputs) should return a scalar",
    ),
}


@pytest.mark.parametrize("text", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_model_files_give_one_clear_message(text: str, tmp_path: Path) -> None:
    """Each used to end in a traceback."""
    with pytest.raises(AutoplanError) as error:
        capture_model(write(tmp_path, text), dtype="fp32", sizes={})
    assert error.value.exit_code == 2
    for words in BAD_FILES[text]:
        assert words in str(error.value)


def test_from_pretrained_is_refused_without_asking_the_network(tmp_path: Path) -> None:
    """It fell back to a real build and tried to download."""
    body = "from transformers import AutoModel\n    return AutoModel.from_pretrained('no/such')"
    text = GOOD.replace("return Net()", body)
    with pytest.raises(BadInputError, match=r"needs weights \(from_pretrained"):
        capture_model(write(tmp_path, text), dtype="fp32", sizes={})


def test_bad_paths_sizes_dtypes_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that do not fit the model name what does."""
    monkeypatch.chdir(tmp_path)
    path = net(tmp_path, "return self.inner(x).mean()")
    cases = (
        (lambda: load_model_source(tmp_path / "modle.py"), "no such file.*model.py"),
        (lambda: load_model_source("nowhere/model.py"), r"no such file.*Near it: model.py\."),
        (lambda: load_model_source(tmp_path), "is a folder.*model.py"),
        (lambda: load_model_source(write(tmp_path, "", "model.txt")), "not `.txt`"),
        (lambda: capture_model(path, dtype="fp32", sizes={"sequence": 8}), "Leave out --sequence 8"),
        (lambda: capture_model(path, dtype="fp32", sizes={"image": 3}), "takes no.*Leave out --size image=3"),
        (lambda: capture_model(path, dtype="int8", sizes={}), "bf16, fp16, fp32, fp64"),
        (
            lambda: capture_model(path, dtype="fp32", sizes={}, opaque=("iner",)),
            "`iner` is not in the model; nearest: inner",
        ),
    )
    for call, words in cases:
        with pytest.raises(BadInputError, match=words):
            call()


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 64,
    "max_source_positions": 50,
    "pad_token_id": 0,
}


VIT = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
}


VIT |= {"num_attention_heads": 4, "intermediate_size": 48, "image_size": 32, "patch_size": 8}


# config -> (sizes, inputs)
CONFIGS = (
    (LLAMA, {"sequence": 16}, ("input_ids", "labels")),
    (WHISPER, {"sequence": 16}, ("input_features", "labels")),
    (VIT, {}, ("pixel_values", "labels")),
)


@pytest.mark.parametrize("config, sizes, names", CONFIGS, ids=[c[0]["model_type"] for c in CONFIGS])
def test_config_json_is_a_model(
    config: dict[str, object], sizes: dict[str, int], names: tuple[str, ...], tmp_path: Path
) -> None:
    """Decoder start tokens, labels and images are made for the user."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    capture = capture_model(path, dtype="bf16", sizes=sizes)
    assert capture.input_names == names and capture.batch_form.known
    assert capture.tokens_per_sample == sizes.get("sequence", 1)
    assert len(find_regions(capture)) >= 4


def test_bad_configs_give_one_clear_message(tmp_path: Path) -> None:
    """Each names the entry to change."""
    path = tmp_path / "config.json"
    cases = (
        ("{", "config.json:1: not valid JSON"),
        ("[]", "not a Hugging Face model config"),
        (json.dumps({"model_type": "llama"}), "`architectures` is missing"),
        (json.dumps({**LLAMA, "architectures": ["LlamaForCasualLM"]}), "nearest: LlamaForCausalLM"),
        (json.dumps({**LLAMA, "architectures": ["LlamaModel"]}), "computes no loss"),
        (json.dumps(LLAMA), "the size `sequence` is needed: add --sequence N"),
    )
    for text, words in cases:
        path.write_text(text)
        with pytest.raises(BadInputError, match=words):
            capture_model(path, dtype="fp32", sizes={})
