"""A model source or a module comes in; a :class:`Capture` goes out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.capture import batch as batching
from autoplan.capture import build, diagnose, normalise, opaque, settings
from autoplan.capture.build import DTYPES, FakeModel, build_fake
from autoplan.capture.forked import Beside
from autoplan.capture.internals import FakeTensorMode
from autoplan.capture.program import BatchForm, Capture, ParameterInfo
from autoplan.capture.source import (
    Inputs,
    ModelSource,
    NoScalarLossError,
    checked_inputs,
    load_model_source,
)
from autoplan.capture.trace import FIXED_NUMEL_LIMIT, Traced, named_inputs, trace
from autoplan.errors import AutoplanError, BadInputError, CaptureError

CONSTANT_NUMEL_LIMIT = 1 << 24
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def capture_model(
    source: Path | str | ModelSource,
    *,
    dtype: str,
    sizes: Mapping[str, int] | None = None,
    opaque: Sequence[str] = (),
    batch: int = 1,
) -> Capture:
    """Trace forward and loss of a ``model.py`` or ``config.json`` without allocating the model.

    ``dtype`` is one of ``bf16 fp16 fp32 fp64`` (``model.to(dtype)``); ``sizes`` go to ``example_inputs``;
    ``opaque`` names sub-modules kept as one node. Captured at ``batch`` and one sample more, so that
    ``Capture.batch_form`` says how the graph grows. Raises :class:`BadInputError` for a file that cannot
    be used and :class:`CaptureError` for a model that cannot be traced.
    """
    started_s = time.perf_counter()
    if dtype not in DTYPES:
        raise BadInputError(f"unknown dtype `{dtype}`; known: {', '.join(DTYPES)}.")
    with settings.quiet():
        model_source = source if isinstance(source, ModelSource) else load_model_source(source)
        shot = _Shot(model_source, dtype, dict(sizes or {}), tuple(opaque))
        capture = shot.with_batch_form(batch)
    return replace(capture, capture_s=time.perf_counter() - started_s)


def capture_module(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    name: str,
    dtype: str | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    opaque: Sequence[str] = (),
) -> Capture:
    """Trace an existing module (real or meta parameters) at exactly the batch size of ``inputs``.

    The module is left as it was. ``dtype`` None keeps each tensor's own dtype.
    """
    started_s = time.perf_counter()
    source = ModelSource(name, name, lambda: model, lambda *_: inputs, loss_fn)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    target = DTYPES[dtype] if dtype else None
    training = {module: module.training for module in model.modules()}
    with settings.quiet():
        values = build.known_values(model, target)
        configs = settings.set_for_training(model)
        swapped = build.swap_tensors(model, build.fakes_of(model, mode, target))
        try:
            fake = FakeModel(model.train(), mode, values)
            shot = _Shot(source, dtype or own_dtype(model), {}, tuple(opaque))
            capture = shot.marked(shot.of(fake, checked_inputs(inputs, name)))
        finally:
            build.put_back(swapped)
            settings.restore(configs)
            for module, was_training in training.items():
                module.training = was_training
    return replace(capture, capture_s=time.perf_counter() - started_s)


def own_dtype(model: nn.Module) -> str:
    """The name of the dtype of the module's first floating parameter (``fp32`` when it has none)."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return names.get(next(floating, torch.float32), "fp32")


class _Shot:
    """One way to capture one source: dtype, sizes and opaque names fixed, the batch size free."""

    def __init__(
        self, source: ModelSource, dtype: str, sizes: dict[str, int], opaque_names: tuple[str, ...]
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.sizes = sizes
        self.opaque = opaque_names

    def with_batch_form(self, batch: int) -> Capture:
        """Capture at ``batch`` with the growth per sample; where the structure changes, one batch later."""
        fake = self._fake()
        capture, larger = self._two(fake, batch)
        if isinstance(capture, CaptureError):
            return self._without_one(fake, batch, larger, capture)
        if isinstance(larger, str):
            return self._fixed(capture, f"only batch {batch} can be traced ({larger})")
        smaller = batching.node_forms(capture.graph)
        if batching.same_structure(smaller, larger):
            return self._growing(capture, smaller, larger)
        later = self._one_later(fake, batch, larger)
        if later is None:
            return self._fixed(capture, "its graph has another structure at every batch size")
        return _warned(
            later,
            f"the graph at batch {batch} differs from larger ones; the graph of batch {batch + 1} is used",
        )

    def _two(
        self, fake: FakeModel, batch: int
    ) -> tuple[Capture | CaptureError, list[batching.NodeForm] | str]:
        """The capture at ``batch`` and the forms at one sample more, or why there is none."""
        inputs = self.source.example_inputs(batch, **self.sizes)
        self.source.require_batch_followed(inputs, batch, self.sizes)
        beside = Beside(lambda: self._forms(fake, batch + 1))
        started_s = time.perf_counter()
        try:
            capture = self.of(fake, inputs, batch)
        except CaptureError as error:
            capture = error
        elapsed_s = time.perf_counter() - started_s
        larger = beside.result(timeout_s=60 + 4 * elapsed_s)
        return capture, self._forms_or_reason(fake, batch + 1) if larger is None else larger

    def _without_one(
        self, fake: FakeModel, batch: int, larger: list[batching.NodeForm] | str, error: CaptureError
    ) -> Capture:
        """Batch 1 cannot be traced (statistics over one sample): take the next two batch sizes."""
        later = self._one_later(fake, batch, larger) if batch == 1 and not isinstance(larger, str) else None
        if later is None:
            raise error
        warning = f"batch 1 cannot be traced, so every micro-batch has at least 2 samples: {error}"
        return replace(_warned(later, warning), least_batch=2)

    def _one_later(self, fake: FakeModel, batch: int, larger: list[batching.NodeForm]) -> Capture | None:
        """The capture at ``batch + 1``, whose forms are ``larger``; None if its structure changes again."""
        largest = self._forms_or_reason(fake, batch + 2)
        if isinstance(largest, str) or not batching.same_structure(larger, largest):
            return None
        capture = self.of(fake, self.source.example_inputs(batch + 1, **self.sizes), batch + 1)
        return self._growing(capture, larger, largest)

    def _growing(
        self, capture: Capture, forms: list[batching.NodeForm], larger: list[batching.NodeForm]
    ) -> Capture:
        """The capture of ``forms`` with its batch form and a fingerprint that no batch size changes."""
        form = batching.batch_form(capture.graph, forms, larger)
        capture = replace(capture, batch_form=form, fingerprint=fingerprint_of(capture, forms, form))
        pairs = batching.node_of_pairs(capture.graph, form)
        if pairs is None:
            return capture
        where = diagnose.user_line(pairs, self.source.path)
        code = diagnose.code_at(where) or pairs.name
        warning = (
            f"{where}: `{code}` has a number for each pair of samples: the loss of a batch is not the mean "
            "of the losses of its parts"
        )
        return _warned(replace(capture, coupled_at=where), warning)

    def _fixed(self, capture: Capture, reason: str) -> Capture:
        return _warned(self.marked(capture), f"the batch size is fixed at {capture.batch}: {reason}")

    def _forms(self, fake: FakeModel, batch: int) -> list[batching.NodeForm] | str:
        inputs = self.source.example_inputs(batch, **self.sizes)
        traced = self._trace(fake, inputs)
        return batching.node_forms(traced.graph)

    def _forms_or_reason(self, fake: FakeModel, batch: int) -> list[batching.NodeForm] | str:
        try:
            return self._forms(fake, batch)
        except NoScalarLossError:  # a loss for each sample looks like a scalar at batch 1
            raise
        except AutoplanError as error:
            return str(error)

    def _fake(self) -> FakeModel:
        fake = build_fake(self.source, self.dtype)
        settings.set_for_training(fake.model)
        fake.model.train()
        return fake

    def _trace(self, fake: FakeModel, inputs: Inputs) -> Traced:
        floating = DTYPES[self.dtype]
        with opaque.kept_whole(fake.model, self.opaque):
            traced = self._trace_or_fix(fake, cast_inputs(inputs, floating))
        trainable = frozenset(name for name, p in fake.model.named_parameters() if p.requires_grad)
        opaque.mark(traced.graph)
        normalise.normalise(traced.graph, traced.constants, fake.values, trainable)
        return traced

    def _trace_or_fix(self, fake: FakeModel, inputs: Inputs) -> Traced:
        """Trace; where Python code reads values, again with the smallest integer inputs as constants."""
        reason: CaptureError | None = None
        for fixed in [frozenset[str](), *small_integer_inputs(inputs)]:
            try:
                traced = trace(fake, self.source.run, inputs, fixed)
            except AutoplanError:
                raise
            except Exception as error:
                reason = reason or diagnose.capture_error(error, self.source.path, fake.model)
                if not diagnose.is_data_dependent(error):
                    break
                continue
            symbols = diagnose.value_readers(traced.graph, self.source.path)
            if symbols is None:
                traced.fixed = tuple(sorted(fixed))
                return traced
            reason = reason or symbols
        assert reason is not None
        raise reason

    def marked(self, capture: Capture) -> Capture:
        """The capture with the fingerprint of its one batch size."""
        forms = batching.node_forms(capture.graph)
        return replace(capture, fingerprint=fingerprint_of(capture, forms, capture.batch_form))

    def of(self, fake: FakeModel, inputs: Inputs, batch: int | None = None) -> Capture:
        """One capture at the batch size of ``inputs``, its batch form not known and without a fingerprint."""
        traced = self._trace(fake, inputs)
        batch = batch if batch is not None else batch_of(inputs)
        parameters = parameter_infos(traced, fake.model)
        constants = {k: v for k, v in traced.constants.items() if v.numel() <= CONSTANT_NUMEL_LIMIT}
        return Capture(
            name=self.source.name,
            source=self.source.path,
            graph=traced.graph,
            batch=batch,
            batch_form=BatchForm(known=False),
            parameters=parameters,
            constants=constants,
            input_names=traced.input_names,
            dtype=self.dtype,
            sizes=self.sizes,
            tokens_per_sample=tokens_per_sample(inputs, batch, self.sizes),
            module_classes={n: type(m).__name__ for n, m in fake.model.named_modules(remove_duplicate=False)},
            opaque=self.opaque,
            warnings=(*fake.warnings, *_losses(traced)),
            fingerprint="",
            containers=frozenset(n for n, m in fake.model.named_modules() if isinstance(m, CONTAINERS)),
        )


def _warned(capture: Capture, warning: str) -> Capture:
    return replace(capture, warnings=(*capture.warnings, warning))


def _losses(traced: Traced) -> list[str]:
    """What the graph does not carry of the user's program."""
    words = [
        f"{where}: the model's own activation checkpointing is ignored; the plan decides what is recomputed"
        for where in traced.checkpoints
    ]
    if traced.fixed:
        words.append(
            f"the values of {', '.join(traced.fixed)} in example_inputs() shape the graph and are in it: "
            "every micro-batch must have the same"
        )
    if traced.updated:
        names = ", ".join(traced.updated[:3]) + ("..." if len(traced.updated) > 3 else "")
        words.append(
            f"buffers that forward updates ({names}) keep their start values: "
            "statistics over the batch are those of one micro-batch"
        )
    return words


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating inputs in the model's dtype, as a training script feeds them."""

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    if isinstance(inputs, Mapping):
        return {key: cast(value) for key, value in inputs.items()}
    return tuple(cast(value) for value in inputs)


def small_integer_inputs(inputs: Inputs) -> list[frozenset[str]]:
    """The smallest integer input, and the two smallest, of up to ``FIXED_NUMEL_LIMIT`` elements each."""
    small = [
        (value.numel(), key)
        for key, value in named_inputs(inputs)
        if isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.numel() <= FIXED_NUMEL_LIMIT
    ]
    names = [key for _, key in sorted(small)]
    return [frozenset(names[:count]) for count in (1, 2) if count <= len(names)]


def batch_of(inputs: Inputs) -> int:
    """The size of dim 0 of the first tensor input (1 when it has no dims)."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    shape = next(value.shape for value in values if isinstance(value, torch.Tensor))
    return int(shape[0]) if shape else 1


def tokens_per_sample(inputs: Inputs, batch: int, sizes: Mapping[str, int]) -> int:
    """Tokens in one sample: ``sequence`` if given, else those of the first [batch, length] integer input."""
    if "sequence" in sizes:
        return sizes["sequence"]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() >= 2:
            return max(1, value.numel() // batch)
    return 1


def parameter_infos(traced: Traced, model: nn.Module) -> dict[str, ParameterInfo]:
    """Facts about every parameter and buffer that the graph reads, by canonical name."""
    names: dict[str, list[str]] = {}
    for name, first in traced.canonical.items():
        names.setdefault(first, []).append(name)
    tensors = {n: (t, b) for n, t, b in build.named_tensors(model)}
    infos: dict[str, ParameterInfo] = {}
    for first, all_names in names.items():
        tensor, is_buffer = tensors[first]
        used = (
            any(n.meta["source"] == first for n in traced.graph.find_nodes(op="placeholder"))
            if is_buffer
            else True
        )
        if used:
            infos[first] = ParameterInfo(
                name=first,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                trainable=tensor.requires_grad and not is_buffer,
                is_buffer=is_buffer,
                tied_names=tuple(all_names[1:]),
            )
    return infos


def fingerprint_of(capture: Capture, forms: Sequence[batching.NodeForm], form: BatchForm) -> str:
    """sha256 over ops, arguments, shapes, parameters and sizes; with a known ``form``, at batch 0."""
    digest = hashlib.sha256()
    for node, node_form in zip(capture.graph.nodes, forms, strict=True):
        integers = _at_batch_zero(node_form.integers, form.arguments.get(node.name), capture.batch)
        dims = _at_batch_zero(node_form.dims, form.shapes.get(node.name), capture.batch)
        digest.update(f"{node_form.skeleton}{integers}{dims}".encode())
    for info in capture.parameters.values():
        digest.update(f"{info.name}{info.shape}{info.dtype}{info.trainable}{info.tied_names}".encode())
    digest.update(f"{sorted(capture.sizes.items())}{capture.dtype}".encode())
    return digest.hexdigest()


def _at_batch_zero(values: tuple[int, ...], growth: tuple[int, ...] | None, batch: int) -> tuple[int, ...]:
    return tuple(v - g * batch for v, g in zip(values, growth)) if growth else values
