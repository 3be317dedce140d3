"""What went wrong with a user's model comes in; the sentence that says what to type next goes out."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

# functions whose presence in a failed call means that weights were wanted: (function, part of the file name)
WEIGHT_LOADERS = (
    ("from_pretrained", ""),
    ("load_state_dict_from_url", ""),
    ("hf_hub_download", ""),
    ("snapshot_download", ""),
    ("urlopen", "urllib"),
    ("urlretrieve", "urllib"),
    ("load", "torch/serialization"),
    ("load_file", "safetensors"),
)
LIBRARY_FOLDERS = ("/torch/", "/autoplan/", "<frozen", "<string>", "<eval_with_key>")


def described(value: Any) -> str:
    """A short description of a value for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if value is None:
        return "None"
    text = repr(value)
    short = text if len(text) <= 60 and "\n" not in text else ""
    return a_kind(value) + (f" ({short})" if short else "")


def a_kind(value: Any) -> str:
    """``a list``, ``an int``: the type of a value with its article."""
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeioAEIO" else f"a {kind}"


def one_line(error: BaseException) -> str:
    """``TypeName: first line of the message``, without a full stop: the sentence around it has one."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].strip().rstrip('.')}" if text else type(error).__name__


def place(file: str, line: int | None) -> str:
    """``file:line``, or the file alone where Python knows no line."""
    return f"{file}:{line}" if line else file


def place_of(function: Any, source: str) -> str:
    """``file:line`` of the definition of a function or class, else ``source``."""
    plain: Any = inspect.unwrap(function)
    try:
        return place(str(inspect.getsourcefile(plain)), inspect.getsourcelines(plain)[1])
    except (OSError, TypeError):
        return source


def device_hint(error: BaseException) -> str:
    """What to do where the error is that a device is not there, else ""."""
    if not re.search(r"CUDA|NVIDIA driver|not (compiled|linked) with", one_line(error)):
        return ""
    return (
        "A plan needs no device: leave out .cuda(), .to(device) and device=... there; the plan and the "
        "training script place the model."
    )


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Every frame of the error and of those that caused it, outermost first."""
    frames: list[traceback.FrameSummary] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = list(traceback.extract_tb(current.__traceback__)) + frames
        current = current.__cause__ or current.__context__
    return frames


def user_frame(error: BaseException, source: str) -> str:
    """``file:line`` of the innermost frame in the user's own folder, else outside torch and autoplan, else
    ``source``."""
    frames = frames_of(error)
    folder = str(Path(source).resolve().parent)
    own = [f for f in frames if _is_own(f.filename, folder)]
    other = [f for f in frames if not _is_library(f.filename)]
    chosen = (own or other)[-1:]
    return place(chosen[0].filename, chosen[0].lineno) if chosen else source


def _is_own(filename: str, folder: str) -> bool:
    return filename.startswith(folder) and "site-packages" not in filename and not _is_library(filename)


def _is_library(filename: str) -> bool:
    text = filename.replace("\\", "/")
    if text.startswith(str(Path(__file__).resolve().parent.parent)):
        return True
    return any(part in text for part in LIBRARY_FOLDERS if part != "/autoplan/")


def caller_of(frame: FrameType | None) -> str:
    """``file:line`` of the nearest frame outside torch and autoplan, from a live frame outwards."""
    while frame is not None:
        if not _is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def missing_file_message(path: Path) -> str:
    """The file is not there; names the nearest ones that are."""
    folder = path.parent if path.parent.is_dir() else Path()
    names = [p.name for p in folder.iterdir() if p.suffix in (".py", ".json")]
    near = get_close_matches(path.name, names, n=3, cutoff=0.5)
    hint = f" Near it: {', '.join(str(folder / n) for n in near)}." if near else ""
    return f"{path}: no such file; a model.py or a Hugging Face config.json is needed.{hint}"


def import_failure_message(error: BaseException, path: Path) -> str:
    """The user's file raised while it was imported."""
    where = user_frame(error, str(path))
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return (
            f"{where}: `{error.name}` cannot be imported: install it (pip install {package}) "
            "or put its folder on PYTHONPATH."
        )
    if isinstance(error, SystemExit):
        return (
            f"{where}: the file exits while it is imported: put the script part under "
            '`if __name__ == "__main__":`.'
        )
    return f"{where}: importing the file failed: {one_line(error)}. " + (
        device_hint(error) or f"It should import on its own: try `python {path}`."
    )


def weights_message(error: BaseException, source: str) -> str:
    """The message for a model that wants its weights, or "" when the error is of another kind."""
    frames = frames_of(error)
    wanted = [
        name for name, part in WEIGHT_LOADERS if any(f.name == name and part in f.filename for f in frames)
    ]
    if not wanted:
        return ""
    where = user_frame(error, source)
    return (
        f"{where}: build_model() needs weights ({wanted[0]} failed: {one_line(error)}). "
        "A plan needs the architecture alone: build it from its config "
        "(e.g. `AutoModelForCausalLM.from_config(config)`) and load the weights in the training script."
    )


def _module_classes(module: ModuleType) -> list[type[nn.Module]]:
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]
    used = {base for cls in own for base in cls.__mro__[1:]}
    outer = [cls for cls in own if cls not in used]
    sources = {cls: _source(cls) for cls in outer}
    whole = [
        cls
        for cls in outer
        if not any(f"{cls.__name__}(" in text for c, text in sources.items() if c is not cls)
    ]
    return whole or outer


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""


def _call_text(cls: type[nn.Module]) -> str:
    """``Net(width=..., depth=4)``: the call that builds the class, its needed arguments left to fill in."""
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return f"{cls.__name__}(...)"
    words = [
        f"{p.name}=..." if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return f"{cls.__name__}({', '.join(words)})"


def _forward_names(cls: type[nn.Module]) -> list[str]:
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ["x"]
    names = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return names or [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][:1] or ["x"]


def _inputs_lines(cls: type[nn.Module] | None) -> list[str]:
    names = _forward_names(cls) if cls else ["x"]
    tensors = ", ".join(f'"{name}": torch.zeros(batch_size, ...)' for name in names)
    return ["def example_inputs(batch_size):", f"    return {{{tensors}}}"]


def no_build_model_message(path: Path, module: ModuleType) -> str:
    """No ``build_model``: the lines to add, filled in for the module classes found in the file."""
    classes = _module_classes(module)
    found = ", ".join(cls.__name__ for cls in classes) or "no torch.nn.Module class was found in it"
    call = _call_text(classes[-1]) if classes else "YourModel(...)"
    lines = ["def build_model():", f"    return {call}"]
    if not callable(getattr(module, "example_inputs", None)):
        lines += ["", *_inputs_lines(classes[-1] if classes else None)]
    return f"{path} defines no build_model() (classes found: {found}). Add to it:\n\n" + _indented(lines)


def no_example_inputs_message(path: Path, module: ModuleType) -> str:
    """No ``example_inputs``: the lines to add."""
    classes = _module_classes(module)
    lines = _inputs_lines(classes[-1] if classes else None)
    return f"{path} defines no example_inputs(batch_size). Add to it:\n\n" + _indented(lines)


def _indented(lines: Iterable[str]) -> str:
    return "\n".join("    " + line if line else "" for line in lines)


def no_loss_message(path: str, outputs: Any, value: Any, has_loss_fn: bool) -> str:
    """``forward`` (or ``loss_fn``) gave no scalar loss: the two ways to give one."""
    if has_loss_fn:
        return (
            f"{path}: loss_fn(outputs, inputs) should return a scalar floating tensor, "
            f"it returned {described(value)}. Reduce it, e.g. `return loss.mean()`."
        )
    if isinstance(outputs, torch.Tensor):
        came = described(outputs)
    elif value is outputs or isinstance(outputs, tuple | list | dict):
        came = described(outputs) if outputs is None else a_kind(outputs)
        came += f" with {list(outputs)}" if isinstance(outputs, dict) else ""
    else:
        came = described(value)
    return (
        f"{path}: no scalar loss: forward() returned {came}. Return the loss from forward() (a scalar such "
        "as `loss.mean()`, or an object or dict with `.loss`), or add to the file:\n\n"
        + _indented(
            [
                "def loss_fn(outputs, inputs):",
                '    labels = inputs["labels"].flatten()',
                "    return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), labels)",
            ]
        )
    )


def unknown_name_message(name: str, names: Iterable[str], what: str, where: str = "the model") -> str:
    """``name`` is not among ``names``: lists the nearest."""
    known = list(names)
    near = get_close_matches(name, known, n=5, cutoff=0.3) or known[:5]
    return f"{what} `{name}` is not in {where}; nearest: {', '.join(near)}."
