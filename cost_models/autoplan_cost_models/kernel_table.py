"""All kernels of a region as arrays, linear in the micro-batch, so that pricing one is a few vector steps.

Comes in: the operations of one region at one or two micro-batches. Goes out: a :class:`KernelTable` at
any micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.errors import BadInputError
from autoplan_cost_models.kernels import Kernel, Operation

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
AMOUNTS = ("bytes", "flops", "count", "m", "n", "k")


@dataclass(frozen=True)
class KernelTable:
    """One row a kernel; ``amounts`` has a row for each name in ``AMOUNTS``.

    ``groups`` lists (kind, dtype, causal, is_backward, head size) with the rows of each; ``operation``
    is the index of the operation that launches the kernel; ``deferrable`` are those that make gradients of
    weights which a split backward puts off.
    """

    amounts: Floats
    launches: Floats
    operation: NDArray[np.intp]
    is_backward: Flags
    deferrable: Flags
    groups: tuple[tuple[KernelGroup, NDArray[np.intp]], ...]

    def amount(self, name: str) -> Floats:
        return self.amounts[AMOUNTS.index(name)]

    def towards(self, other: KernelTable, steps: float) -> KernelTable:
        """This table plus ``steps`` times the difference to ``other``: linear inter- and extrapolation."""
        return replace(self, amounts=self.amounts + steps * (other.amounts - self.amounts))


@dataclass(frozen=True)
class KernelGroup:
    """What selects the rate of a kernel, apart from its sizes."""

    kind: str
    dtype: str
    causal: bool
    is_backward: bool
    head_dim: float


def kernel_table(operations: Sequence[Operation]) -> KernelTable:
    """Kernels in order of the operations, each one's forward before its backward."""
    kernels: list[Kernel] = []
    owners: list[int] = []
    backward: list[bool] = []
    for index, operation in enumerate(operations):
        for group, flag in ((operation.forward, False), (operation.backward, True)):
            kernels.extend(group)
            owners.extend([index] * len(group))
            backward.extend([flag] * len(group))
    rows: dict[KernelGroup, list[int]] = {}
    for row, (kernel, flag) in enumerate(zip(kernels, backward)):
        rows.setdefault(_group(kernel, flag), []).append(row)
    return KernelTable(
        amounts=np.array([[float(getattr(k, name)) for k in kernels] for name in AMOUNTS], dtype=np.float64),
        launches=np.array([k.launches for k in kernels], dtype=np.float64),
        operation=np.array(owners, dtype=np.intp),
        is_backward=np.array(backward, dtype=np.bool_),
        deferrable=np.array([k.deferrable for k in kernels], dtype=np.bool_),
        groups=tuple((group, np.array(members, dtype=np.intp)) for group, members in rows.items()),
    )


def _group(kernel: Kernel, is_backward: bool) -> KernelGroup:
    head_dim = kernel.k if kernel.kind == "attention" else 0.0
    return KernelGroup(kernel.kind, kernel.dtype, kernel.causal, is_backward, head_dim)


def check_same_kernels(first: Sequence[Operation], second: Sequence[Operation]) -> None:
    """Raise BadInputError when the graphs of two micro-batches do not launch the same kernels."""
    shapes = [[(o.name, len(o.forward), len(o.backward)) for o in group] for group in (first, second)]
    if shapes[0] != shapes[1]:
        differing = next((a[0] for a, b in zip(*shapes) if a != b), "the number of nodes")
        raise BadInputError(
            f"the region's graph at two micro-batches differs at {differing}: expected the same nodes with "
            "sizes linear in the batch; search with --pin micro_batch=1."
        )
