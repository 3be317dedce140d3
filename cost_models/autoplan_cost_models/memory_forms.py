"""A region's memory as linear forms in the micro-batch.

Comes in: memory traces at one or two micro-batches. Goes out: :class:`MemoryForms`, which gives saved
and transient bytes by recompute kind, with the names of what they are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan_cost_models.memory import MemoryTrace, NamedBytes


@dataclass(frozen=True)
class Form:
    """``base + slope * steps``, never below 0; steps are samples beyond the measured micro-batch."""

    base: float
    slope: float = 0.0

    @staticmethod
    def through(values: Sequence[float], samples: int) -> Form:
        """The line through the values at the base micro-batch and ``samples`` more (or the one value)."""
        return Form(values[0], (values[1] - values[0]) / samples if len(values) > 1 else 0.0)

    def at(self, steps: float) -> float:
        return max(0.0, self.base + self.slope * steps)


NamedForms = tuple[tuple[str, Form], ...]


@dataclass(frozen=True)
class StepForms:
    """The steps of backward: ``extra`` and ``largest`` are [2, steps] arrays of base and slope."""

    extra: NDArray[np.float64]
    largest: NDArray[np.float64]
    names: tuple[str, ...]

    def peak(self, steps: float) -> tuple[float, NamedBytes]:
        """Most live bytes beyond the saved ones, and the largest gradient alive then."""
        extra = self.extra[0] + self.extra[1] * steps
        worst = int(np.argmax(extra))
        largest = float(self.largest[0, worst] + self.largest[1, worst] * steps)
        return max(0.0, float(extra[worst])), NamedBytes(self.names[worst], largest)


@dataclass(frozen=True)
class MemoryForms:
    """``saved`` and ``kept`` exclude the inputs; see :class:`MemoryTrace`."""

    inputs: NamedForms
    side_inputs: NamedForms
    saved: NamedForms
    kept: NamedForms
    recomputed_selective: Form
    recomputed_full: Form
    forward_peak: Form
    forward_extra: Form
    backward: StepForms
    output_bytes: Form
    last_saver: int
    deferred: NamedForms = ()

    def saved_items(self, steps: float) -> dict[str, tuple[NamedBytes, ...]]:
        """What one micro-batch in flight keeps, by recompute kind, largest first."""
        inputs = [NamedBytes(name, form.at(steps)) for name, form in self.inputs]
        beyond: Mapping[str, NamedForms] = {"none": self.saved, "selective": self.kept, "full": ()}
        return {
            kind: _largest_first([*inputs, *(NamedBytes(name, form.at(steps)) for name, form in forms)])
            for kind, forms in beyond.items()
        }

    def side_items(self, steps: float) -> tuple[NamedBytes, ...]:
        return tuple(NamedBytes(name, form.at(steps)) for name, form in self.side_inputs)

    def deferred_items(self, steps: float) -> tuple[NamedBytes, ...]:
        """What a split backward of one micro-batch keeps until the weights get their gradients."""
        return tuple(NamedBytes(name, form.at(steps)) for name, form in self.deferred)

    def transient_items(self, steps: float) -> dict[str, tuple[NamedBytes, ...]]:
        """What lives only while the region runs, by recompute kind, largest first.

        Recompute makes the activations again before the backward begins, so they add to its peak.
        """
        gradients, largest = self.backward.peak(steps)
        again = {
            "none": 0.0,
            "selective": self.recomputed_selective.at(steps),
            "full": self.recomputed_full.at(steps),
        }
        forward = {"none": self.forward_extra, "selective": self.forward_peak, "full": self.forward_peak}
        return {kind: _transients(again[kind], gradients, largest, forward[kind].at(steps)) for kind in again}


def memory_forms(traces: Sequence[MemoryTrace], samples: int) -> MemoryForms:
    """Lines through one or two traces; items of one name are summed."""
    first = traces[0]

    def named(attribute: str) -> NamedForms:
        sums = [_sum_by_name(getattr(trace, attribute)) for trace in traces]
        return tuple((name, Form.through([one.get(name, 0.0) for one in sums], samples)) for name in sums[0])

    def form(attribute: str) -> Form:
        return Form.through([getattr(trace, attribute) for trace in traces], samples)

    return MemoryForms(
        inputs=named("inputs"),
        side_inputs=named("side_inputs"),
        saved=named("saved"),
        kept=named("kept"),
        recomputed_selective=form("recomputed_selective"),
        recomputed_full=form("recomputed_full"),
        forward_peak=form("forward_peak"),
        forward_extra=form("forward_extra"),
        backward=StepForms(
            extra=_line([trace.backward.extra_bytes for trace in traces], samples),
            largest=_line([trace.backward.largest_bytes for trace in traces], samples),
            names=first.backward.largest_names,
        ),
        output_bytes=form("output_bytes"),
        last_saver=first.last_saver,
        deferred=named("deferred"),
    )


def _line(values: Sequence[Sequence[float]], samples: int) -> NDArray[np.float64]:
    first = np.array(values[0], dtype=np.float64)
    slope = (np.array(values[1], dtype=np.float64) - first) / samples if len(values) > 1 else 0.0 * first
    return np.stack([first, slope])


def _sum_by_name(items: Sequence[NamedBytes]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for item in items:
        sums[item.name] = sums.get(item.name, 0.0) + item.bytes
    return sums


def _transients(
    again: float, gradients: float, largest: NamedBytes, forward: float
) -> tuple[NamedBytes, ...]:
    if forward > again + gradients:
        return (NamedBytes("tensors alive in forward", forward),)
    named = min(largest.bytes, gradients)
    parts = (
        NamedBytes("recomputed activations", again),
        NamedBytes(largest.name or "gradients", named),
        NamedBytes("other gradients and temporaries", gradients - named),
    )
    return _largest_first([part for part in parts if part.bytes > 0])


def _largest_first(items: Sequence[NamedBytes]) -> tuple[NamedBytes, ...]:
    return tuple(sorted((item for item in items if item.bytes > 0), key=lambda item: -item.bytes))
