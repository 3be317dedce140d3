"""A user's ``model.py`` or Hugging Face ``config.json`` comes in; a :class:`ModelSource` goes out.

A source knows how to build the model (with real parameters), how to make example inputs of any batch
size, and how to get the scalar loss from what ``forward`` returns.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autoplan.capture import advice
from autoplan.capture.settings import as_script, offline, set_for_training
from autoplan.errors import AutoplanError, BadInputError

Inputs = Mapping[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; ``sizes_known`` are the keywords ``example_inputs`` takes."""

    name: str
    path: str
    construct: Callable[[], Any] = field(repr=False)
    make_inputs: Callable[..., Any] = field(repr=False)
    loss_fn: Callable[[Any, Any], Any] | None = field(default=None, repr=False)
    size_names: tuple[str, ...] | None = None
    required_sizes: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """The model with real parameters, in training mode, set to be trained (see ``set_for_training``)."""
        model = self.construct_checked()
        set_for_training(model)
        return model.train()

    def construct_checked(self) -> nn.Module:
        """What ``build_model()`` returns, under whatever torch modes are active."""
        try:
            with offline(), as_script(self.path):
                model = self.construct()
        except AutoplanError:
            raise
        except (Exception, SystemExit) as error:
            needs_weights = advice.weights_message(error, self.path)
            if needs_weights:
                raise BadInputError(needs_weights) from error
            if isinstance(error, SystemExit):
                where = advice.user_frame(error, self.path)
                raise BadInputError(f"{where}: build_model() exits: make it return the model.") from error
            raise
        if not isinstance(model, nn.Module):
            raise BadInputError(
                f"{self.path}: build_model() should return a torch.nn.Module, "
                f"it returned {advice.described(model)}. End it with `return model`."
            )
        return model

    def example_inputs(self, batch: int, **sizes: int) -> Inputs:
        """Example inputs of ``batch`` samples: a dict (keywords of ``forward``) or a tuple of tensors."""
        self._check_sizes(sizes)
        try:
            with as_script(self.path):
                inputs = self.make_inputs(batch, **sizes)
        except AutoplanError:
            raise
        except (Exception, SystemExit) as error:
            where = advice.user_frame(error, self.path)
            wanted = "Make it return a dict (or tuple) of tensors whose first dim is the batch size."
            raise BadInputError(
                f"example_inputs({batch}) failed at {where}: {advice.one_line(error)}. "
                + (advice.device_hint(error) or wanted)
            ) from error
        return checked_inputs(inputs, self.path)

    def loss(self, outputs: Any, inputs: Inputs) -> torch.Tensor:
        """The scalar loss: ``loss_fn(outputs, inputs)`` if there is one, else what ``forward`` returned."""
        value = self.loss_fn(outputs, inputs) if self.loss_fn else loss_of(outputs)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
            return value if value.dim() == 0 else value.reshape(())
        raise NoScalarLossError(advice.no_loss_message(self.path, outputs, value, self.loss_fn is not None))

    def run(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """The scalar loss of ``model`` on ``inputs``."""
        if isinstance(inputs, Mapping):
            taken = inputs if self.loss_fn is None else accepted_by(model, inputs)
            self._require_taken(model, (), taken)
            return self.loss(model(**taken), inputs)
        self._require_taken(model, inputs, {})
        return self.loss(model(*inputs), inputs)

    def _require_taken(self, model: nn.Module, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Raises BadInputError where ``forward`` cannot be called with the example inputs."""
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*values, **named)
        except TypeError as error:
            where = advice.place_of(self.make_inputs, self.path)
            given = ", ".join(named) or f"{len(values)} tensors by position"
            raise BadInputError(
                f"{where}: example_inputs() gives {given}, and {type(model).__name__}.forward() takes "
                f"{', '.join(signature.parameters) or 'no input'} ({error}). "
                "Name its entries as forward() does."
            ) from error

    def require_batch_followed(self, inputs: Inputs, batch: int, sizes: Mapping[str, int]) -> None:
        """Raises BadInputError where ``inputs`` of ``batch`` samples have the shapes of those of one more."""
        try:
            larger = _shapes(self.example_inputs(batch + 1, **sizes))
        except AutoplanError:  # one batch size alone: found out and said by the capture
            return
        if larger == _shapes(inputs):
            shapes = ", ".join(f"{name} of shape {shape}" for name, shape in larger.items())
            where = advice.place_of(self.make_inputs, self.path)
            raise BadInputError(
                f"{where}: example_inputs() should follow the batch size it is given: "
                f"for {batch} and for {batch + 1} it returned {shapes}. Make the first dim its "
                "first argument, e.g. `torch.zeros(batch_size, ...)`."
            )

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        if self.size_names is None:
            return
        for name in sizes:
            if name not in self.size_names:
                known = ", ".join(_size_option(n) for n in self.size_names) or "none"
                raise BadInputError(
                    f"{self.path}: example_inputs() takes no size `{name}` (sizes it takes: {known}). "
                    f"Leave out {_size_option(name, sizes[name])}, or add it: "
                    f"`def example_inputs(batch_size, {name}={sizes[name]})`."
                )
        for name in self.required_sizes:
            if name not in sizes:
                raise BadInputError(f"{self.path}: the size `{name}` is needed: add {_size_option(name)}.")


class NoScalarLossError(BadInputError):
    """``forward`` (or ``loss_fn``) gives no scalar."""


def _size_option(name: str, value: int | str = "N") -> str:
    """How the size is typed on the command line."""
    return f"--sequence {value}" if name == "sequence" else f"--size {name}={value}"


def _shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    items = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return {str(key): tuple(value.shape) for key, value in items if isinstance(value, torch.Tensor)}


def accepted_by(model: nn.Module, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inputs that ``forward`` takes; the others (labels, weights) are for ``loss_fn``."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return inputs
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in inputs.items() if name in names}


def loss_of(outputs: Any) -> Any:
    """The loss inside what ``forward`` returned: itself, ``.loss``, ``["loss"]``, or a tuple's first."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    if isinstance(outputs, tuple | list) and outputs:
        return outputs[0]
    return outputs


def checked_inputs(inputs: Any, path: str) -> Inputs:
    """``inputs`` as a dict or tuple whose values are tensors (or None or bool options), rows in order:
    strides decide whether a reshape copies, and at run time each rank gets contiguous samples."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    wanted = f"{path}: example_inputs() should return a dict or tuple of tensors"
    if isinstance(inputs, Mapping):
        named = {str(key): value for key, value in inputs.items()}
    elif isinstance(inputs, tuple):
        named = {str(index): value for index, value in enumerate(inputs)}
    else:
        raise BadInputError(f"{wanted}, it returned {advice.described(inputs)}.")
    for key, value in named.items():
        if not (isinstance(value, torch.Tensor | bool) or value is None):
            raise BadInputError(f"{wanted}; its entry `{key}` is {advice.described(value)}.")
    if not any(isinstance(value, torch.Tensor) for value in named.values()):
        raise BadInputError(f"{wanted}, it returned no tensor at all.")
    dense = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in named.items()}
    return dense if isinstance(inputs, Mapping) else tuple(dense.values())


def load_model_source(path: Path | str) -> ModelSource:
    """Read ``model.py`` or ``config.json``; :class:`BadInputError` says in one sentence what is wrong."""
    path = Path(path)
    if not path.exists():
        raise BadInputError(advice.missing_file_message(path))
    if path.is_dir():
        inside = [path / name for name in ("model.py", "config.json") if (path / name).exists()]
        hint = f" Type {inside[0]} instead." if inside else ""
        raise BadInputError(f"{path} is a folder; a model.py or a Hugging Face config.json is needed.{hint}")
    if path.suffix == ".json":
        from autoplan.capture.huggingface import config_source

        return config_source(path)
    if path.suffix != ".py":
        raise BadInputError(
            f"{path}: a model is a .py file or a Hugging Face config.json, not `{path.suffix}`."
        )
    return _python_source(path)


def _python_source(path: Path) -> ModelSource:
    module = _import_file(path)
    build = getattr(module, "build_model", None)
    if not callable(build):
        raise BadInputError(advice.no_build_model_message(path, module))
    _require_call(build, "build_model", (), path)
    inputs = getattr(module, "example_inputs", None)
    if not callable(inputs):
        raise BadInputError(advice.no_example_inputs_message(path, module))
    loss_fn = getattr(module, "loss_fn", None)
    if callable(loss_fn):
        _require_call(loss_fn, "loss_fn", ("outputs", "inputs"), path)
    names, required = _size_names(inputs, path)
    return ModelSource(
        name=path.stem,
        path=str(path),
        construct=build,
        make_inputs=inputs,
        loss_fn=loss_fn if callable(loss_fn) else None,
        size_names=names,
        required_sizes=required,
    )


def _require_call(function: Callable[..., Any], name: str, arguments: tuple[str, ...], path: Path) -> None:
    """Raises BadInputError at the function's line where it cannot be called with just these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise BadInputError(
            f"{advice.place_of(function, str(path))}: {name}() must take {' and '.join(arguments) or 'no'} "
            f"arguments ({error}): write `def {name}({', '.join(arguments)}):`, what else it needs inside it "
            "or with a default."
        ) from error
    except ValueError:  # a builtin, which does not tell what it takes
        return


def _size_names(function: Callable[..., Any], path: Path) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The size keywords of ``example_inputs`` (None: any) and those without a default."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise BadInputError(
            f"{advice.place_of(function, str(path))}: example_inputs() should take the batch size: "
            "`def example_inputs(batch_size):`."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None, ()
    sizes = [p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(p.name for p in sizes), tuple(p.name for p in sizes if p.default is p.empty)


def _import_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own; its folder is importable while it runs."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"autoplan_model_{digest}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        with as_script(str(path)):
            spec.loader.exec_module(module)
    except SyntaxError as error:
        raise BadInputError(
            f"{advice.place(error.filename or str(path), error.lineno)}: syntax error: {error.msg}"
            + (f": `{error.text.strip()}`." if error.text else ".")
        ) from error
    except (Exception, SystemExit) as error:
        raise BadInputError(advice.import_failure_message(error, path)) from error
    finally:
        sys.path.remove(folder)
    return module
