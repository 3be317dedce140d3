"""Every kernel as a training step of a 7B model launches it in, what the compiler made of it out.

Triton compiles for a chip that is not there: ``python -m autoplan_codegen.kernels.triton.compiled`` prints,
for each kernel and chip, the widths of its accesses to memory in bits, the registers it spills and its
shared memory. The widths are read from the assembly (``ld.global.v4.b32``, ``global_load_dwordx4``), the
spills from the binary.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner

from autoplan_codegen.kernels.triton.launches import LAUNCHES, Launch

CHIPS: Mapping[str, tuple[str, int | str, int]] = {
    "cuda 9.0": ("cuda", 90, 32),
    "cuda 10.0": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
CUDA_ACCESS = re.compile(r"\b(ld|st)\.(?:[a-z_:]+\.)*global\.(?:[\w:]+\.)*?(?:v(\d)\.)?[bfus](\d+)")
AMD_ACCESS = re.compile(
    r"(?:global|buffer)_(load|store)_(?:lds_)?(dwordx4|dwordx3|dwordx2|dword|[us]?short|[us]?byte|b\d+)"
)
ASYNC_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x\w+|\d+)[,;]")
AMD_BITS = {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


@dataclass(frozen=True)
class Compiled:
    """Accesses are counts by width in bits, as written in the code (a loop counts once)."""

    kernel: str
    chip: str
    loads: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[int, int] = field(default_factory=dict)
    spilled_bytes: int = 0
    shared_bytes: int = 0


def compile_launch(name: str, launch: Launch, chip: str) -> Compiled:
    """Compile one kernel for one chip. Needs no device."""
    cuda = CHIPS[chip][0] == "cuda"
    launch = launch if cuda else launch.on_amd()
    kernel = launch.kernel.fn if isinstance(launch.kernel, Autotuner) else launch.kernel
    constants = {n: v for n, v in launch.arguments.items() if not isinstance(v, str) or n in launch.constants}
    signature = {n: "constexpr" if n in constants else str(v) for n, v in launch.arguments.items()}
    names = list(kernel.arg_names)
    aligned = [n for n in names if signature[n].startswith("*") or n in launch.multiples]
    source = ASTSource(
        kernel,
        {n: signature[n] for n in names},
        {(names.index(n),): v for n, v in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    made: Any = triton.compile(source, target=GPUTarget(*CHIPS[chip]), options=options)
    text = made.asm["ptx" if cuda else "amdgcn"]
    loads, stores = _cuda_accesses(text) if cuda else _amd_accesses(text)
    spilled = _cuda_spills(made.asm["cubin"]) if cuda else _amd_spills(text)
    return Compiled(name, chip, loads, stores, spilled, int(made.metadata.shared))


def _count(found: Iterable[tuple[bool, int]]) -> tuple[dict[int, int], dict[int, int]]:
    counts: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for store, bits in found:
        counts[store][bits] = counts[store].get(bits, 0) + 1
    return counts


def _cuda_accesses(ptx: str) -> tuple[dict[int, int], dict[int, int]]:
    plain = [(m[1] == "st", int(m[2] or 1) * int(m[3])) for m in CUDA_ACCESS.finditer(ptx)]
    copies = [(False, 8 * int(m[1], 0)) for m in ASYNC_COPY.finditer(ptx)]
    return _count([*plain, *copies])


def _amd_accesses(text: str) -> tuple[dict[int, int], dict[int, int]]:
    def bits(width: str) -> int:
        return AMD_BITS.get(width) or (16 if "short" in width else 8 if "byte" in width else int(width[1:]))

    return _count((m[1] == "store", bits(m[2])) for m in AMD_ACCESS.finditer(text))


def _cuda_spills(cubin: bytes) -> int:
    """Bytes of a thread's stack and local memory: 0 where everything is in registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", text))


def _amd_spills(text: str) -> int:
    return sum(4 * int(count) for count in re.findall(r"[sv]gpr_spill_count: (\d+)", text))


def compile_all(chips: Iterable[str] = CHIPS, kernels: Iterable[str] = LAUNCHES) -> list[Compiled]:
    return [compile_launch(name, LAUNCHES[name], chip) for name in kernels for chip in chips]


def main() -> None:
    """Print one line a kernel and chip, or with ``--json`` one object."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kernel", action="append", help="a kernel of launches.LAUNCHES (all)")
    parser.add_argument("--chip", choices=list(CHIPS), action="append")
    given = parser.parse_args()
    rows = compile_all(given.chip or CHIPS, given.kernel or LAUNCHES)
    if given.json:
        print(json.dumps({"kernels": [asdict(row) for row in rows]}))
        return
    for row in rows:
        print(
            f"{row.kernel:32} {row.chip:10} loads {dict(row.loads)} stores {dict(row.stores)}"
            f" spilled {row.spilled_bytes} B, shared {row.shared_bytes} B"
        )


if __name__ == "__main__":
    main()
