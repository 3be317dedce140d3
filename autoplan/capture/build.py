"""A model source comes in; its model goes out with every parameter and buffer a fake tensor on cpu.

The model is built with its large tensors on the meta device (nothing is allocated), small factory
results real, so that buffers such as rope frequencies and causal masks keep their values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.capture import advice
from autoplan.capture.internals import FakeTensor, FakeTensorMode, factories, tensor_tables
from autoplan.capture.source import ModelSource
from autoplan.errors import AutoplanError, CaptureError

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# a factory result larger than this is made on meta (a 2048 x 2048 mask still has its values)
REAL_NUMEL_LIMIT = 1 << 22
# values kept of one buffer or constant for later proofs
KEEP_NUMEL_LIMIT = 1 << 24


class SmallTensorsReal(TorchFunctionMode):
    """Factories without a device give: ``torch.empty`` and large results on meta, small ones real."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in factories() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        on_meta = func is torch.empty
        if not on_meta and func not in (torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.asarray):
            with contextlib.suppress(Exception):
                on_meta = func(*args, **{**kwargs, "device": "meta"}).numel() > REAL_NUMEL_LIMIT
        return func(*args, **{**kwargs, "device": "meta"}) if on_meta else func(*args, **kwargs)


@dataclass
class FakeModel:
    """A model whose tensors are fake; ``values`` are the real values known of buffers, by qualified name."""

    model: nn.Module
    mode: FakeTensorMode
    values: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    warnings: tuple[str, ...] = ()


def build_fake(source: ModelSource, dtype: str) -> FakeModel:
    """Build the source's model without allocating it; floating tensors as ``model.to(dtype)`` leaves them."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, warnings = _construct(source, mode)
    values = known_values(model, DTYPES[dtype])
    swap_tensors(model, fakes_of(model, mode, DTYPES[dtype]))
    return FakeModel(model, mode, values, warnings)


def _construct(source: ModelSource, mode: FakeTensorMode) -> tuple[nn.Module, tuple[str, ...]]:
    """Build on meta (small tensors real), else all on meta, else fake, else for real; says when it had to."""
    attempts: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("", SmallTensorsReal),
        ("", lambda: torch.device("meta")),
        ("as fake tensors", lambda: mode),
        ("with real tensors", contextlib.nullcontext),
    )
    first: Exception | None = None
    for how, context in attempts:
        try:
            with context():
                model = source.construct_checked()
        except AutoplanError:
            raise
        except Exception as error:
            first = first or error
            continue
        if not how:
            return model, ()
        where = advice.user_frame(first, source.path) if first else source.path
        reason = advice.one_line(first) if first else ""
        return model, (f"the model was built {how}: its constructor needs values ({where}: {reason})",)
    assert first is not None
    where = advice.user_frame(first, source.path)
    code = f'"import {source.name}; {source.name}.build_model()"'
    raise CaptureError(
        f"{where}: build_model() failed: {advice.one_line(first)}. "
        + (advice.device_hint(first) or f"It should run on its own: try `python -c {code}`.")
    ) from first


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(qualified name, tensor, is it a buffer) of every parameter and buffer, tied names included."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, False
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, True


def known_values(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Real values of the buffers that have them and are small, cast as ``.to(dtype)`` would."""
    values: dict[str, torch.Tensor] = {}
    for name, tensor, is_buffer in named_tensors(model):
        unreal = isinstance(tensor, FakeTensor) or tensor.is_meta
        if is_buffer and not unreal and tensor.numel() <= KEEP_NUMEL_LIMIT:
            cast = dtype is not None and tensor.is_floating_point()
            values[name] = tensor.detach().to("cpu", dtype if cast else None)
    return values


def fakes_of(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
    """A fake cpu tensor for each distinct parameter and buffer of the model, by ``id``."""
    fakes: dict[int, torch.Tensor] = {}
    for _, tensor, _ in named_tensors(model):
        if id(tensor) in fakes:
            continue
        new_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=new_dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        fakes[id(tensor)] = fake
    return fakes


def swap_tensors(
    model: nn.Module, fakes: Mapping[int, torch.Tensor]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Put the fakes in place of the model's tensors (ties stay ties); returns what to put back."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for table in tensor_tables(module):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) in fakes:
                    before.append((table, name, tensor))
    for table, name, tensor in before:
        table[name] = fakes[id(tensor)]
    return before


def put_back(before: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Undo :func:`swap_tensors`."""
    for table, name, tensor in before:
        table[name] = tensor
