"""``autoplan hw list``, ``show NAME`` and ``calibrate``: profiles in, tables or JSON out; or one measured.

Numbers that are estimates carry a ``~``; sources are numbered below the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.cli.feedback import add_feedback, feed_back
from autoplan.cli.subparsers import Subparsers
from autoplan.errors import BadInputError
from autoplan.hardware import CollectiveFit, Curve, HardwareProfile, Quantity, load_profile, profile_names
from autoplan.output_files import write_file
from autoplan.units import GIB

if TYPE_CHECKING:
    import torch

Number = Quantity | Curve | CollectiveFit

# Fields of a profile with the unit they are shown in: (name of the unit, size of one unit).
SHOWN_UNITS = {
    "memory_bytes": ("GiB", GIB),
    "reserve_bytes": ("GiB", GIB),
    "fragmentation": ("of memory", 1.0),
    "memory_bytes_per_s": ("GB/s", 1e9),
    "host_bytes_per_s": ("GB/s", 1e9),
    "nic_bytes_per_s": ("GB/s", 1e9),
    "launch_s": ("us", 1e-6),
    "sustained": ("of the short-run rate", 1.0),
    "variation": ("of the speed", 1.0),
    "peak_flops": ("TFLOP/s", 1e12),
    "node": ("devices", 1.0),
}


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``autoplan hw`` with its sub-commands."""
    parser = subparsers.add_parser("hw", help="the chips autoplan knows, and where each number is from")
    commands = parser.add_subparsers(dest="hw_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="all profiles, one line each")
    listing.set_defaults(run=run_list)
    showing = commands.add_parser("show", help="every number of one profile with its tag and source")
    showing.add_argument(
        "name", nargs="?", help="name, alias or path of a profile; default: the environment's AUTOPLAN_HW"
    )
    showing.set_defaults(run=run_show)
    measuring = commands.add_parser(
        "calibrate", help="measure this machine and write its profile; under torchrun its collectives too"
    )
    measuring.add_argument("-o", "--output", type=Path, default=Path("my.yaml"), metavar="FILE.yaml")
    measuring.add_argument(
        "--base", metavar="HW", help="profile of what is not measured (cpu, or the chip's own)"
    )
    measuring.add_argument("--quick", action="store_true", help="small sizes: a try, not a calibration")
    add_feedback(measuring)
    measuring.set_defaults(run=run_calibrate)
    for command in (listing, showing, measuring):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def run_list(args: argparse.Namespace) -> int:
    """Prints one line a profile; returns the exit code."""
    profiles = [load_profile(name) for name in profile_names()]
    if args.json:
        print(json.dumps({"profiles": [_overview(profile) for profile in profiles]}, indent=2))
        return 0
    from tabulate import tabulate

    rows = [_overview_row(profile) for profile in profiles]
    heads = ["name", "also", "GiB", "TFLOP/s peak", "achieved", "intra GB/s", "inter GB/s", "estimated"]
    right = ("left", "left", *["right"] * 6)
    print(tabulate(rows, heads, colalign=right, disable_numparse=True))
    print(
        "\n~ estimate. TFLOP/s in bf16 (or the dtype named); intra: all-reduce bus bandwidth of a node,\n"
        "inter: one device's share of the network. `autoplan hw show NAME` shows every number and its source."
    )
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Prints all numbers of one profile; returns the exit code."""
    profile = load_profile(args.name)
    if args.json:
        print(json.dumps(_as_json(profile), indent=2))
        return 0
    from tabulate import tabulate

    numbers = list(profile.sourced())
    sources = {number.source: 0 for _, number in numbers} | {profile.software.source: 0}
    for index, source in enumerate(sources, 1):
        sources[source] = index
    rows = [
        (
            path,
            ("~" if number.tag == "estimated" else "") + shown(path, number),
            number.tag,
            f"[{sources[number.source]}]",
        )
        for path, number in numbers
    ]
    print(f"{profile.name}: {profile.title}, {profile.vendor} (also {', '.join(profile.aliases)})")
    print(f"file {profile.file}\nfingerprint {profile.fingerprint}\n")
    print(tabulate(rows, ["number", "value", "tag", "from"], disable_numparse=True))
    print("\n" + "\n".join(_software_lines(profile, sources[profile.software.source])))
    print("\n" + tabulate(operator_rows(profile), ["op", "runs as"], disable_numparse=True))
    print("\nsources\n" + "\n".join(f"  [{index}] {source}" for source, index in sources.items()))
    return 0


def run_calibrate(args: argparse.Namespace) -> int:
    """Measures, writes the profile, prints the errors of the fits; returns the exit code."""
    from autoplan.calibration.profile import calibrate, calibrated_yaml
    from autoplan.cli.progress import progress
    from autoplan.profile_files import find_profile

    if args.from_log or args.from_trace:
        return feed_back(args)
    device, rank = _join_launched()
    base = args.base or ("cpu" if device.type == "cpu" else None)
    start = find_profile(base)
    load_profile(base)  # a broken one is refused before anything is measured
    if not args.output.resolve().parent.is_dir():
        raise BadInputError(f"-o {args.output}: the folder {args.output.parent} does not exist; make it.")
    with progress(quiet=args.json or rank > 0) as say:
        found = calibrate(device, say, quick=args.quick, links=_ranks() > 1)
    if rank:
        return 0
    write_file(args.output, calibrated_yaml(start, args.output.stem, found), "Give a file with -o.")
    load_profile(str(args.output.resolve()))
    if args.json:
        print(json.dumps({"profile": str(args.output), "residuals": found.residuals}))
        return 0
    print(f"wrote {args.output}: use it with --hw {args.output}")
    print("error of the fits (shapes held out; collectives over all sizes):")
    print("\n".join(f"  {what}: {error:.1%}" for what, error in found.residuals.items()))
    return 0


def _join_launched() -> tuple[torch.device, int]:
    """The device of this process, and its rank under torchrun (0 where it runs alone)."""
    import torch
    import torch.distributed as dist

    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0
    from autoplan.runtime.devices import local_device

    device = local_device()
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return device, dist.get_rank()


def _ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def shown(path: str, number: Number) -> str:
    """A number as short text in the unit a person expects; ``path`` is the one ``sourced`` gives."""
    if isinstance(number, CollectiveFit):
        ramp = (
            f" + {number.ramp_s * 1e6:.4g} us from {number.ramp_bytes / 2**20:.4g} MiB"
            if number.ramp_s
            else ""
        )
        return f"{number.alpha_s * 1e6:.4g} us + s F / {number.bytes_per_s / 1e9:.4g} GB/s{ramp}"
    if isinstance(number, Curve):
        return _curve_text(path, number)
    unit, size = SHOWN_UNITS[path.split(".")[0]]
    return f"{number.value / size:.5g} {unit}"


def _curve_text(path: str, curve: Curve) -> str:
    """``first .. last (n points)`` of a curve, with what is on both axes."""
    field = path.split(".")[0]
    rates = field == "attention" or path.endswith("by_m")
    size, unit = (1e12, " TFLOP/s") if rates else (1.0, "")
    step = 2**20 if field == "memory_efficiency" else 1
    axis = {"memory_efficiency": "MiB", "attention": "tokens"}.get(field, path[-1])
    points = [f"{x / step:g}: {y / size:.3g}" for x, y in zip(curve.x, curve.y)]
    rows = ["  ".join(points[i : i + 6]) for i in range(0, len(points), 6)]
    return f"by {axis}{',' + unit if unit else ''}\n" + "\n".join(rows)


def _software_lines(profile: HardwareProfile, source: int) -> list[str]:
    software = profile.software
    environment = " ".join(f"{name}={value}" for name, value in software.environment.items()) or "nothing"
    kernels, missing = (", ".join(names) for names in (profile.kernels, profile.forbidden))
    lines = [
        f"torch device `{software.device_type}`, collectives `{software.collective_backend}`, "
        f"torch {software.torch_version}  [{source}]",
        f"devices chosen by {', '.join(software.visible_devices_variables) or 'nothing'}; set {environment}",
        f"kernels {kernels or 'none'}; not available: {missing or 'none known'}",
    ]
    return lines + [f"note: {note}" for note in profile.notes]


def operator_rows(profile: HardwareProfile) -> list[tuple[str, str]]:
    """How each op that a plan can choose runs on the chip."""
    from autoplan.planner.fusion_space import EVERYWHERE, GROUPED_SINCE, fused_kernels
    from autoplan_passes.fusions import GROUPED_PRODUCT, KERNELS

    own, release = fused_kernels(profile), profile.software.release
    flash = "flash_attention" in profile.kernels
    rows = [
        ("matrix products", f"{', '.join(profile.gemm)}; not {', '.join(profile.forbidden) or 'none'}"),
        ("attention", "fused kernel" if flash else "products and softmax, scores kept"),
        ("attention kinds", ", ".join(sorted({rate.kernel for rate in profile.attention})) or "not measured"),
        (
            "grouped products",
            "torch._grouped_mm"
            if release >= GROUPED_SINCE
            else f"group by group (torch {release[0]}.{release[1]})",
        ),
    ]
    for name in (name for name in KERNELS if name != GROUPED_PRODUCT):
        how = "products in chunks" if name in EVERYWHERE else "fused kernel"
        rows.append((name, how if name in own else "unfused ops of torch"))
    return rows


def _main_dtype(profile: HardwareProfile) -> str:
    return (
        "bf16"
        if "bf16" in profile.gemm
        else max(profile.gemm, key=lambda d: profile.gemm[d].best_flops_per_s)
    )


def _overview(profile: HardwareProfile) -> dict[str, object]:
    """What ``hw list`` shows, in plain numbers."""
    dtype = _main_dtype(profile)
    numbers = [number for _, number in profile.sourced()]
    return {
        "name": profile.name,
        "title": profile.title,
        "aliases": list(profile.aliases),
        "memory_gib": profile.memory_bytes.value / GIB,
        "dtype": dtype,
        "peak_tflops": profile.peak_flops[dtype].value / 1e12,
        "achieved_tflops": profile.gemm[dtype].best_flops_per_s / 1e12,
        "intra_gb_per_s": profile.collectives["intra"]["all_reduce"][-1].bytes_per_s / 1e9,
        "inter_gb_per_s": profile.collectives["inter"]["all_reduce"][0].bytes_per_s / 1e9,
        "numbers": len(numbers),
        "estimated": sum(number.tag == "estimated" for number in numbers),
    }


def _overview_row(profile: HardwareProfile) -> tuple[str, ...]:
    facts = _overview(profile)
    dtype = _main_dtype(profile)
    shared: dict[str, Number] = {
        "memory_gib": profile.memory_bytes,
        "peak_tflops": profile.peak_flops[dtype],
        "achieved_tflops": profile.gemm[dtype].by_m,
        "intra_gb_per_s": profile.collectives["intra"]["all_reduce"][-1],
        "inter_gb_per_s": profile.collectives["inter"]["all_reduce"][0],
    }
    texts = [("~" if n.tag == "estimated" else "") + f"{facts[key]:.4g}" for key, n in shared.items()]
    if dtype != "bf16":
        texts[1] += f" {dtype}"
    return (
        profile.name,
        ", ".join(profile.aliases[:3]),
        *texts,
        f"{facts['estimated']} of {facts['numbers']}",
    )


def _as_json(profile: HardwareProfile) -> dict[str, object]:
    """The overview and every number in base units (bytes, seconds, FLOP/s) with tag and source."""
    numbers = [{"path": path, **dataclasses.asdict(number)} for path, number in profile.sourced()]
    return {
        **_overview(profile),
        "vendor": profile.vendor,
        "file": profile.file,
        "fingerprint": profile.fingerprint,
        "devices_per_node": profile.devices_per_node,
        "fast_domain": profile.fast_domain,
        "software": dataclasses.asdict(profile.software),
        "kernels": list(profile.kernels),
        "forbidden": list(profile.forbidden),
        "operators": dict(operator_rows(profile)),
        "notes": list(profile.notes),
        "numbers": numbers,
    }
