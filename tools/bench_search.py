"""Times planning end to end, and compares its plans with a greedy search's and with published recipes.

Comes in: which cases to run (all by default). Goes out: a table, a row a case, and a row for each other plan
of the case, priced the same way. Speeds are of the machine it runs on.

The greedy search changes one of tp, pp, micro-batch and ZeRO at a time while that is faster, from tp 8, pp 8,
micro-batch 1, ZeRO-1; what it and the recipes leave open takes its fastest choice.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

from autoplan.capture.source import ModelSource
from autoplan.errors import AutoplanError
from autoplan.plan import Part
from autoplan.planner.driver import Request, search_capture
from autoplan.planner.pricer import Pricer, Quote
from autoplan.planner.space import Pins
from autoplan.validation.transformer import Shape, decoder_source

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def _gpt(hidden: int, heads: int, sequence: int = 2048) -> Shape:
    size = hidden // heads
    return Shape(hidden, heads, heads, size, 4 * hidden, False, 51200, True, sequence)


LLAMA2_7B = Shape(4096, 32, 32, 128, 11008, True, 32000, False, 4096, rotary=True)
# Sizes of models that are not examples: GPT-3 and 1T of arXiv 2104.04473 (table 1), Llama-2 of 2307.09288.
DECODERS = {
    "gpt3_175b": (_gpt(12288, 96), 96),
    "megatron_1t": (_gpt(25600, 160), 128),
    "llama2_7b": (LLAMA2_7B, 32),
    "llama2_7b_64": (LLAMA2_7B, 32),
    "gpt_48_layers": (_gpt(4096, 32), 48),
}
CASES = {
    "llama3_8b": ("kunlun", 256, 1024),
    "llama3_70b": ("kunlun", 1024, 2048),
    "llama3_405b": ("h100", 16384, 16384),
    "mixtral_8x7b": ("h100", 64, 256),
    "qwen3_30b_a3b": ("h800", 64, 256),
    "deepseek_v3": ("h800", 2048, 8192),
    "gpt3_175b": ("a100-80", 512, 1536),
    "megatron_1t": ("a100-80", 4096, 3072),
    "llama2_7b": ("a100-80", 8, 64),
    "llama2_7b_64": ("a100-80", 64, 512),
    "gpt_48_layers": ("h100", 8, 64),
}
# What the people who trained these models ran, by case: (source, pins).
RECIPES = {
    "llama3_405b": ("arXiv 2407.21783, table 4", ("tp=8", "pp=16", "dp=128", "sp=1", "micro_batch=1")),
    "gpt3_175b": ("arXiv 2205.05198, table 3", ("tp=8", "pp=8", "sp=1", "micro_batch=1")),
    "megatron_1t": ("arXiv 2205.05198, table 3", ("tp=8", "pp=64", "sp=1", "micro_batch=1")),
    "deepseek_v3": ("arXiv 2412.19437, section 3.2", ("tp=1", "pp=16", "ep=64", "zero=1", "micro_batch=1")),
}
GREEDY = {"tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8, 16, 32), "micro_batch": (1, 2, 4, 8), "zero": (0, 1, 2, 3)}
START = {"tp": 8, "pp": 8, "micro_batch": 1, "zero": 1}
HEADERS = (
    *("model", "chip", "devices", "plan", "step s", "slower", "gap"),
    *("capture s", "cost s", "search s", "total s", "peak GiB"),
)


def greedy(pricer: Pricer) -> Quote | None:
    """The plan where no single change is faster; None where nothing tried fits."""
    known: dict[tuple[int, ...], Quote | None] = {}

    def quote(state: dict[str, int]) -> Quote | None:
        key = tuple(state.values())
        if key not in known:
            known[key] = price(pricer, ["schedule=1f1b", *(f"{name}={n}" for name, n in state.items())])
        return known[key]

    def seconds(state: dict[str, int]) -> float:
        found = quote(state)
        return found.step_time_s if found else float("inf")

    state, before_s = START, None
    while before_s is None or seconds(state) < before_s:
        before_s = seconds(state)
        for name, values in GREEDY.items():
            state = min([state, *({**state, name: value} for value in values)], key=seconds)
    return quote(state)


def price(pricer: Pricer, pins: list[str]) -> Quote | None:
    """The fastest plan under the pins, None where none is legal and fits."""
    try:
        quote = pricer.price(pins)
    except AutoplanError:
        return None
    return quote if quote.fits else None


def run_case(name: str) -> list[list[object]]:
    """Plan one model in this process; its rows of the table."""
    hw, devices, batch = CASES[name]
    start_s = time.perf_counter()
    source: Path | ModelSource = EXAMPLES / f"{name}.py"
    if name in DECODERS:
        source = decoder_source(*DECODERS[name])
    pricer = Pricer(source, hw=hw, devices=devices, global_batch=batch)
    request = Request(str(source), hw, devices, batch)
    searched_s = time.perf_counter()
    captured = pricer.capture
    plan = search_capture(
        captured, pricer.profile, request, Pins(), [], searched_s, lambda _: None, pricer.costs
    )
    total_s = time.perf_counter() - start_s
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert plan.prediction is not None and plan.certificate is not None
    (part,), step_s = plan.parts, plan.prediction.step_time_s
    times = [captured.capture_s, plan.wall_s["cost"], plan.wall_s["search"], total_s]
    gap = f"{100 * plan.certificate.gap:.2f}%"
    rows: list[list[object]] = [[name, hw, devices, _words(part), _seconds(step_s), "", gap]]
    rows[0] += [*(round(t, 1) for t in times), round(peak_gib, 2)]
    others = [("greedy", greedy(pricer))]
    if name in RECIPES:
        label, pins = RECIPES[name]
        others.append((label, price(pricer, list(pins))))
    for label, quote in others:
        told = ["does not fit"]
        if quote is not None:
            slower = f"{100 * (quote.step_time_s / step_s - 1):.1f}%"
            told = [_words(quote.part), _seconds(quote.step_time_s), slower]
        rows.append([f"  {label}", "", "", *told])
    return rows


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}"


def _words(part: Part) -> str:
    """``pp2 dp4 tp8 zero1 mb1``, and the other axes that are used."""
    mesh = part.mesh
    axes = {axis: getattr(mesh, axis) for axis in ("pp", "dp", "cp", "ep", "tp")}
    shown = [f"{axis}{n}" for axis, n in axes.items() if n > 1 or axis in ("pp", "dp", "tp")]
    schedule = f" {part.schedule}" if axes["pp"] > 1 else ""
    stages = f" vpp{part.vpp}" if part.vpp > 1 else ""
    return f"{' '.join(shown)} zero{part.zero} mb{part.micro_batch}{schedule}{stages}"


def run_apart(name: str) -> list[list[object]]:
    """The rows of a case that runs in a process of its own, so that its memory is its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--rows", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return [[name, *CASES[name][:2], (done.stderr.strip().splitlines() or ["failed"])[-1][:60]]]
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--rows", metavar="CASE", help="run this case here and print its rows as JSON")
    given = parser.parse_args()
    if given.rows:
        print(json.dumps(run_case(given.rows)))
        return
    rows = [row for name in given.cases or CASES for row in run_apart(name)]
    print(tabulate(rows, headers=HEADERS))


if __name__ == "__main__":
    main()
