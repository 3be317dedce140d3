"""A profile's YAML file in, the :class:`~autoplan.hardware.HardwareProfile` it describes out.

Every field is checked for its unit and range; a wrong one is a BadProfileError with file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from autoplan.checked_yaml import Entry, Unit, read_yaml
from autoplan.errors import BadProfileError
from autoplan.hardware import (
    ATTENTION_KERNELS,
    COLLECTIVES,
    DEVICE_TYPES,
    DTYPES,
    KERNELS,
    SPANS,
    AttentionRates,
    CollectiveFit,
    Curve,
    GemmRates,
    HardwareProfile,
    Quantity,
    Software,
    Tag,
)

_GIB, _FRACTION, _FACTOR = 2.0**30, Unit("fraction", 1, 0, 0.5), Unit("factor", 1, 0.001, 1.5)
_TFLOPS = Unit("TFLOP/s", 1e12, 1e-5, 1e5)
_LINK = Unit("GB/s (1e9 bytes/s)", 1e9, 1e-3, 1e4)
_MICROSECONDS = Unit("microseconds", 1e-6, 0, 1e5)

_SHARE = Unit("fraction", 1, 0.1, 1)
_SIZE = Unit("elements", 1, 1, 2**40)
_FIT = {
    "alpha_us": _MICROSECONDS,
    "gb_per_s": _LINK,
    "ramp_us": _MICROSECONDS,
    "ramp_mib": Unit("MiB", 2.0**20, 0, 2**20),
}
_QUANTITIES = {
    "memory": {
        "usable_gib": Unit("GiB", _GIB, 0.25, 4096),
        "reserve_gib": Unit("GiB", _GIB, 0, 64),
        "fragmentation": _FRACTION,
        "bandwidth_gb_per_s": Unit("GB/s (1e9 bytes/s)", 1e9, 1, 1e5),
    },
    "links": {"host_gb_per_s": _LINK, "nic_gb_per_s": _LINK},
    "node": {"devices_per_node": Unit("devices", 1, 1, 1024), "fast_domain": Unit("devices", 1, 1, 1024)},
}
_SOURCES = ("sources", "fitted_sources")
_TOP = (
    *("name", "title", "vendor", "aliases", "node", "memory", "launch_us", "sustained", "variation"),
    *("peak_tflops", "links"),
    *("software", "kernels", "memory_efficiency", "gemm", "attention", "collectives"),
)


def read_profile(path: Path) -> HardwareProfile:
    """The profile in ``path``, checked field by field; raises :class:`BadProfileError`."""
    root = read_yaml(path, BadProfileError)
    top = root.fields(_TOP, (*_SOURCES, "notes", "forbidden"))
    named = (top[part].mapping() for part in _SOURCES if part in top)
    sources = {name: source.text() for part in named for name, source in part.items()}
    read = _Reader(sources)
    if top["name"].text() != path.stem:
        top["name"].fail(f"the file's own name `{path.stem}`")
    parts = {part: read.quantities(top[part], units) for part, units in _QUANTITIES.items()}
    memory, node = parts["memory"], _check_node(top["node"].mapping(), parts["node"])
    if memory["reserve_gib"].value >= memory["usable_gib"].value:
        top["memory"].mapping()["reserve_gib"].fail(
            "less than usable_gib", f"{memory['reserve_gib'].value / _GIB:g}"
        )
    peaks = {k: read.quantity(v, _TFLOPS) for k, v in _keyed(top["peak_tflops"], DTYPES).items()}
    canonical = json.dumps(root.value, sort_keys=True)
    return HardwareProfile(
        name=path.stem,
        title=top["title"].text(),
        vendor=top["vendor"].text(),
        aliases=top["aliases"].texts(),
        devices_per_node=int(node["devices_per_node"].value),
        fast_domain=int(node["fast_domain"].value),
        memory_bytes=memory["usable_gib"],
        reserve_bytes=memory["reserve_gib"],
        fragmentation=memory["fragmentation"],
        memory_bytes_per_s=memory["bandwidth_gb_per_s"],
        memory_efficiency=read.curve(
            top["memory_efficiency"], ("mib", Unit("MiB", 2.0**20, 1e-6, 2**20)), ("fraction", _FACTOR)
        ),
        launch_s=read.quantity(top["launch_us"], _MICROSECONDS),
        sustained={k: read.quantity(v, _SHARE) for k, v in _keyed(top["sustained"], DTYPES).items()},
        variation=read.quantity(top["variation"], Unit("fraction", 1, 0, 0.5)),
        peak_flops=peaks,
        gemm=read.gemm(top["gemm"], peaks),
        attention=tuple(read.attention(item) for item in top["attention"].items()),
        collectives={
            span: {kind: read.fits(fits) for kind, fits in _keyed(kinds, COLLECTIVES, all_of=True).items()}
            for span, kinds in top["collectives"].fields(SPANS).items()
        },
        host_bytes_per_s=parts["links"]["host_gb_per_s"],
        nic_bytes_per_s=parts["links"]["nic_gb_per_s"],
        software=read.software(top["software"]),
        kernels=top["kernels"].texts(KERNELS),
        notes=top["notes"].texts() if "notes" in top else (),
        fingerprint=hashlib.sha256(canonical.encode()).hexdigest(),
        node=node,
        forbidden=top["forbidden"].texts() if "forbidden" in top else (),
        file=str(path),
    )


def _check_node(entries: Mapping[str, Entry], node: dict[str, Quantity]) -> dict[str, Quantity]:
    """Counts of devices must be whole, and fast domains must fill the node."""
    for name, count in node.items():
        if count.value != int(count.value):
            entries[name].fail("a whole number of devices", f"{count.value:g}")
    if node["devices_per_node"].value % node["fast_domain"].value:
        entries["fast_domain"].fail(
            f"a number that divides devices_per_node ({node['devices_per_node'].value:g})",
            f"{node['fast_domain'].value:g}",
        )
    return node


@dataclass(frozen=True)
class _Reader:
    """Turns entries into numbers with their tag and source; ``sources`` are the file's short names."""

    sources: Mapping[str, str]

    def origin(self, found: Mapping[str, Entry]) -> tuple[Tag, str]:
        """The ``tag`` and ``source`` that every number carries."""
        source = found["source"].text()
        return cast(Tag, found["tag"].text(get_args(Tag))), self.sources.get(source, source)

    def quantity(self, entry: Entry, unit: Unit) -> Quantity:
        """``{value, tag, source}``."""
        found = entry.fields(("value", "tag", "source"))
        return Quantity(found["value"].number(unit), *self.origin(found))

    def quantities(self, entry: Entry, units: Mapping[str, Unit]) -> dict[str, Quantity]:
        """One quantity for each of ``units``, all required."""
        found = entry.fields(tuple(units))
        return {name: self.quantity(found[name], unit) for name, unit in units.items()}

    def curve(self, entry: Entry, x: tuple[str, Unit], y: tuple[str, Unit]) -> Curve:
        """Two lists of equal length, x ascending, with one tag and source."""
        found = entry.fields((x[0], y[0], "tag", "source"))
        return self.points(found, x, y)

    def points(self, found: Mapping[str, Entry], x: tuple[str, Unit], y: tuple[str, Unit]) -> Curve:
        at, values = found[x[0]].numbers(x[1]), found[y[0]].numbers(y[1])
        if not at or list(at) != sorted(set(at)):
            found[x[0]].fail(f"{x[0]} in ascending order, each once")
        if len(at) != len(values):
            found[y[0]].fail(f"as many values as {x[0]} ({len(at)})", str(len(values)))
        return Curve(at, values, *self.origin(found))

    def gemm(self, entry: Entry, peaks: Mapping[str, Quantity]) -> dict[str, GemmRates]:
        """By dtype either ``by_m``, ``by_n`` and ``by_k``, or ``like: dtype`` scaled to ``best_tflops``."""
        rates: dict[str, GemmRates] = {}
        for dtype, body in _keyed(entry, DTYPES).items():
            if dtype not in peaks:
                body.fail(f"peak_tflops to have the dtype `{dtype}` too", "no peak")
            rates[dtype] = self.like(body, rates) if "like" in body.mapping() else self.rates(body)
            best = rates[dtype].best_flops_per_s
            if best > peaks[dtype].value:
                body.fail(f"no rate above the {dtype} peak", f"{best / 1e12:g} TFLOP/s")
        return rates

    def rates(self, body: Entry) -> GemmRates:
        found = body.fields(("by_m", "by_n", "by_k"))
        return GemmRates(
            self.curve(found["by_m"], ("m", _SIZE), ("tflops", _TFLOPS)),
            self.curve(found["by_n"], ("n", _SIZE), ("factor", _FACTOR)),
            self.curve(found["by_k"], ("k", _SIZE), ("factor", _FACTOR)),
        )

    def like(self, body: Entry, rates: Mapping[str, GemmRates]) -> GemmRates:
        """Another dtype's curves (given above it), scaled so that the best rate is ``best_tflops``.

        The result is measured only where both the best rate and the other curves are.
        """
        found = body.fields(("like", "best_tflops", "tag", "source"))
        base = rates[found["like"].text(tuple(rates))]
        scale = found["best_tflops"].number(_TFLOPS) / base.best_flops_per_s
        tag, source = self.origin(found)
        tag = tag if base.by_m.tag == "measured" else "estimated"
        by_m = Curve(base.by_m.x, tuple(y * scale for y in base.by_m.y), tag, source)
        return GemmRates(by_m, base.by_n, base.by_k)

    def attention(self, entry: Entry) -> AttentionRates:
        names = ("direction", "causal", "head_dim", "sequence", "tflops", "tag", "source")
        found = entry.fields(names, ("kernel",))
        direction = cast(Literal["forward", "backward"], found["direction"].text(("forward", "backward")))
        curve = self.points(found, ("sequence", _SIZE), ("tflops", _TFLOPS))
        kernel = found["kernel"].text(ATTENTION_KERNELS) if "kernel" in found else "flash"
        return AttentionRates(
            direction, found["causal"].flag(), found["head_dim"].whole(1, 4096), curve, kernel
        )

    def fits(self, entry: Entry) -> tuple[CollectiveFit, ...]:
        fits: list[CollectiveFit] = []
        for item in entry.items():
            found = item.fields(("ranks", *_FIT, "tag", "source"))
            ranks = found["ranks"].whole(2, 1 << 20)
            if fits and ranks <= fits[-1].ranks:
                found["ranks"].fail("fits by ascending ranks")
            alpha_s, bytes_per_s, ramp_s, ramp_bytes = (found[k].number(unit) for k, unit in _FIT.items())
            fits.append(CollectiveFit(ranks, alpha_s, bytes_per_s, ramp_s, ramp_bytes, *self.origin(found)))
        if not fits:
            entry.fail("at least one fit", "an empty list")
        return tuple(fits)

    def software(self, entry: Entry) -> Software:
        names = "device_type collective_backend visible_devices_variables environment torch_version source"
        found = entry.fields(names.split())
        source = found["source"].text()
        return Software(
            device_type=found["device_type"].text(DEVICE_TYPES),
            collective_backend=_word(found["collective_backend"]),
            visible_devices_variables=found["visible_devices_variables"].texts(),
            environment={k: v.text() for k, v in found["environment"].mapping().items()},
            torch_version=_version(found["torch_version"]),
            source=self.sources.get(source, source),
        )


def _word(entry: Entry) -> str:
    """The name of a torch.distributed backend; several as torch takes them (``cpu:gloo,npu:hccl``)."""
    text = entry.text()
    if not re.fullmatch(r"[a-z][a-z0-9_]*|([a-z]+:[a-z0-9_]+,?)+", text):
        entry.fail("the name of a collective backend, such as nccl", text)
    return text


def _version(entry: Entry) -> str:
    text = entry.text()
    if not re.match(r"\d+\.\d+", text):
        entry.fail("a version of torch, such as 2.5.1", text)
    return text


def _keyed(entry: Entry, keys: tuple[str, ...], all_of: bool = False) -> dict[str, Entry]:
    """The fields of a mapping whose keys are among ``keys`` (or are exactly those); at least one."""
    found = entry.fields(keys if all_of else (), () if all_of else keys)
    if not found:
        entry.fail(f"at least one of {', '.join(keys)}", "none")
    return found
