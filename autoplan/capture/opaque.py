"""Names of sub-modules come in; while they are kept whole, each is one node of a traced graph.

A kept sub-module is replaced by a custom op that takes its tensor inputs, parameters and buffers. The op
runs the module's own forward; its backward runs it again under autograd. Modules of equal structure share
one op, so that blocks stay equal. The ops live in this process: a process that is to run a graph with
opaque nodes captures the model first.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autoplan.capture import advice
from autoplan.capture.internals import (
    PLAIN_APPLY,
    PLAIN_CALL,
    FakeTensorMode,
    OpOverload,
    disable_current_modes,
    disable_torch_function,
    schema_of,
)
from autoplan.errors import BadInputError, CaptureError

NAMESPACE = "autoplan_opaque"
# the largest module (elements of its parameters) that is run for real to learn its output shapes
REAL_RUN_NUMEL_LIMIT = 1 << 28
INITIAL_SCALE = 0.02

_REGISTRY: dict[str, OpaqueOp] = {}


def matching_modules(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Qualified module name -> the NAME that asked for it (a qualified name, a pattern or a class name)."""
    found: dict[str, str] = {}
    modules = {name: module for name, module in model.named_modules() if name}
    for name in names:
        hits = [m for m in modules if fnmatch.fnmatchcase(m, name)]
        hits = hits or [m for m, module in modules.items() if type(module).__name__ == name]
        if not hits:
            known = [*modules, *sorted({type(m).__name__ for m in modules.values()})]
            raise BadInputError(advice.unknown_name_message(name, known, "--opaque: the sub-module"))
        found.update(dict.fromkeys(hits, name))
    return {m: n for m, n in found.items() if not any(m.startswith(other + ".") for other in found)}


@contextlib.contextmanager
def kept_whole(model: nn.Module, names: Sequence[str]) -> Generator[None]:
    """While this lasts, the named sub-modules run as custom ops."""
    modules = {name: model.get_submodule(name) for name in matching_modules(model, names)}
    try:
        for name, module in modules.items():
            module.__dict__["forward"] = _opaque_forward(name, module)
        yield
    finally:
        for module in modules.values():
            module.__dict__.pop("forward", None)


def _opaque_forward(name: str, module: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        held = _held_tensors(module)
        op = _op_for(name, module, leaves, structure)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return op.unpack(op.call(*inputs, *held.values()))

    return forward


def _held_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass
class OpaqueOp:
    """One custom op: how to run the module it stands for, and the shape of what comes out."""

    name: str
    module: nn.Module
    leaves: list[Any]
    structure: Any
    held_names: tuple[str, ...]
    tensor_inputs: int
    output_structure: Any = None
    outputs: int = 0
    flops: dict[str, int] = field(default_factory=dict[str, int])
    shapes: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=dict)
    call: Callable[..., Any] = field(init=False)

    def unpack(self, result: Any) -> Any:
        """The op's flat result in the structure that the module's forward returns."""
        tensors = [result] if isinstance(result, torch.Tensor) else list(result)
        return pytree.tree_unflatten(tensors, self.output_structure)

    def run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The module's own forward on these inputs, parameters and buffers; its tensors, flattened."""
        queue = list(tensors[: self.tensor_inputs])
        held = dict(zip(self.held_names, tensors[self.tensor_inputs :], strict=True))
        leaves = [queue.pop(0) if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        patched = self.module.__dict__.pop("forward", None)
        try:
            result = functional_call(self.module, held, args, kwargs)
        finally:
            if patched is not None:
                self.module.__dict__["forward"] = patched
        flat, self.output_structure = pytree.tree_flatten(result)
        given = {id(t) for t in tensors}
        return [t.clone() if id(t) in given or t._is_view() else t for t in flat]

    def fake(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Fake outputs: the module run on fakes, or once for real where it looks at values."""
        key = _metadata_key(tensors)
        if key in self.shapes:
            return self._empty(key, tensors)
        try:
            # a mode without symbols: what looks at values fails here instead of giving symbolic sizes
            with outside_tracing(), FakeTensorMode(), FlopCounterMode(display=False) as counter:
                outputs = self.run(*(torch.empty(tuple(map(int, t.shape)), dtype=t.dtype) for t in tensors))
        except Exception:
            outputs, counter = self._run_for_real(tensors)
        self.flops[key] = counter.get_total_flops()
        self.shapes[key] = [(tuple(map(int, t.shape)), t.dtype) for t in outputs]
        return self._empty(key, tensors)

    def _empty(self, key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with outside_tracing(), tensors[0].fake_mode:  # pyright: ignore[reportAttributeAccessIssue]: as above
            return [torch.empty(shape, dtype=dtype) for shape, dtype in self.shapes[key]]

    def _run_for_real(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], FlopCounterMode]:
        numel = sum(t.numel() for t in tensors)
        if numel > REAL_RUN_NUMEL_LIMIT:
            raise CaptureError(
                f"--opaque {self.name}: what it returns depends on values, and with {numel / 1e9:.1f} "
                "billion elements it is too large to be run once here. Give --opaque the name of the "
                "smaller part that looks at values."
            )
        with outside_tracing(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            real = [_random_like(t) for t in tensors]
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                outputs = self.run(*real)
        return outputs, counter


@contextlib.contextmanager
def outside_tracing() -> Generator[None]:
    """Nothing that runs in here is recorded, faked or seen by a torch function mode."""
    plain_call = mock.patch.object(nn.Module, "__call__", PLAIN_CALL)  # the tracer's hook is off
    plain_apply = mock.patch.object(
        torch.autograd.Function, "apply", PLAIN_APPLY
    )  # custom functions are allowed
    with disable_torch_function(), disable_current_modes(), plain_call, plain_apply:
        yield


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor among the arguments of an opaque module."""


def _random_like(tensor: torch.Tensor) -> torch.Tensor:
    shape = tuple(map(int, tensor.shape))
    if tensor.is_floating_point():
        return (torch.randn(shape) * INITIAL_SCALE).to(tensor.dtype)
    return torch.zeros(shape, dtype=tensor.dtype)


def _metadata_key(tensors: Sequence[torch.Tensor]) -> str:
    return " ".join(f"{t.dtype}{tuple(map(int, t.shape))}" for t in tensors)


def _op_for(name: str, module: nn.Module, leaves: Sequence[Any], structure: Any) -> OpaqueOp:
    """The op for a module called with these arguments; equal modules called alike share it."""
    slots = [_Slot() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    held = _held_tensors(module)
    identity = f"{_structure_of(module)} {slots} {structure} {[_metadata_key([t]) for t in held.values()]}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
    op_name = re.sub(r"\W", "_", f"{type(module).__name__}_{digest}").lower()
    op = _REGISTRY.get(op_name)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if op is None or (op.module is not module and op.held_names != tuple(held)):
        op = OpaqueOp(name, module, slots, structure, tuple(held), len(inputs))
        op.outputs = len(op.fake(*inputs, *held.values()))
        op.call = _define(op_name, op, len(inputs) + len(held))
        _REGISTRY[op_name] = op
    return op


def _structure_of(module: nn.Module) -> str:
    """Classes and plain settings of a module and everything in it."""
    words: list[str] = []
    for path, part in module.named_modules():
        settings = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str | bool | None)}
        words.append(f"{path}:{type(part).__qualname__}{sorted(settings.items())}")
    return ";".join(words)


def _define(op_name: str, op: OpaqueOp, inputs: int) -> Callable[..., Any]:
    """Register the custom op: forward, fake and backward."""
    arguments = ", ".join(f"Tensor t{i}" for i in range(inputs))
    returns = "Tensor" if op.outputs == 1 else "(" + ", ".join(["Tensor"] * op.outputs) + ")"

    def packed(outputs: Sequence[torch.Tensor]) -> Any:
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def forward(*tensors: torch.Tensor) -> Any:
        return packed(op.run(*tensors))

    def fake(*tensors: torch.Tensor) -> Any:
        return packed(op.fake(*tensors))

    def remember(ctx: Any, inputs: Sequence[torch.Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _gradients(op, ctx.saved_tensors, gradients)

    custom = torch.library.custom_op(
        f"{NAMESPACE}::{op_name}", forward, mutates_args=(), schema=f"({arguments}) -> {returns}"
    )
    custom.register_fake(fake)
    custom.register_autograd(backward, setup_context=remember)
    return getattr(getattr(torch.ops, NAMESPACE), op_name).default


def _gradients(
    op: OpaqueOp, saved: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Run the module again under autograd and differentiate it."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in saved]
        outputs = op.run(*inputs)
    pairs = [(o, g) for o, g in zip(outputs, gradients) if g is not None and o.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in inputs)


def mark(graph: fx.Graph) -> None:
    """Set ``meta["opaque"]`` (module name) and ``meta["flops"]`` (forward, where it could be counted)."""
    for node in graph.nodes:
        op = op_of(node)
        if op is None:
            continue
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        node.meta["opaque"] = stack[-1][0] if stack else op.name
        node.meta["flops"] = flops_of(node)


def op_of(node: fx.Node) -> OpaqueOp | None:
    """The opaque op that a node calls, if it does."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or target.namespace != NAMESPACE:
        return None
    return _REGISTRY.get(schema_of(target).name.partition("::")[2])


def flops_of(node: fx.Node) -> int:
    """Forward FLOPs of an opaque node at the shapes of its inputs (0 when nothing in it could be counted)."""
    op = op_of(node)
    values = [n.meta["val"] for n in node.args if isinstance(n, fx.Node)]
    return op.flops.get(_metadata_key(values), 0) if op else 0


def registered() -> Mapping[str, OpaqueOp]:
    """The opaque ops of this process by op name."""
    return _REGISTRY
