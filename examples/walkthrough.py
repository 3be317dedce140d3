"""Four ways to train one model on eight devices, and what each costs: a lecture that needs no cluster.

    python examples/walkthrough.py            # Llama-3-8B on 8 H100, sequence 8,192
    python examples/walkthrough.py --hw kunlun

Every number is computed by autoplan's cost model from the traced model and the chip's profile.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from autoplan.planner.pricer import Pricer, Quote
from autoplan.units import bytes_text, seconds_text

MODEL = Path(__file__).parent / "llama3_8b.py"
DEVICES, BATCH = 8, 32

LECTURE = {
    "data parallel": (
        ("dp=8", "tp=1", "pp=1", "zero=0"),
        "Every device holds the whole model and a share of the batch. Nothing is sent inside a layer; "
        "once a step the gradients are summed over the devices. Memory does not shrink with more "
        "devices: weights, gradients, master weights and two Adam moments are 18 bytes a parameter on "
        "each of them.",
    ),
    "fully sharded (ZeRO-3)": (
        ("dp=8", "tp=1", "pp=1", "zero=3"),
        "Still data parallel, but each device keeps an eighth of every parameter and its state. Before a "
        "layer runs its weights are gathered, afterwards they are dropped, in forward and again in "
        "backward, for every micro-batch: memory is bought with traffic that hides behind compute only "
        "where there is enough of it.",
    ),
    "tensor parallel": (
        ("dp=1", "tp=8", "pp=1", "zero=0"),
        "Every matrix product is cut over the devices, so all of them work on the same tokens. Weights "
        "and most activations shrink by eight, but each layer must bring its partial results together "
        "twice forward and twice backward, and nothing hides that: it needs the fastest links there are.",
    ),
    "pipeline": (
        ("dp=1", "tp=1", "pp=8", "zero=0"),
        "Each device holds an eighth of the layers and passes activations on: the least traffic of all. "
        "But the first device waits at the end of a step and the last at its start. With p stages and m "
        "micro-batches the idle share is about (p - 1) / (m + p - 1), and the first stage keeps p micro- "
        "batches' activations.",
    ),
}
PARTS = {
    "compute": "arithmetic",
    "recompute": "forward run again",
    "tp_communication": "collectives inside layers",
    "zero_gather": "gathering weights",
    "pipeline_bubble": "waiting for other stages",
    "p2p": "passing activations on",
    "gradient_sync": "summing gradients",
    "optimizer": "updating weights",
}


def lecture(hw: str) -> dict[str, Quote]:
    """The price of each layout, the recompute that costs least among those that fit chosen for it."""
    pricer = Pricer(MODEL, hw=hw, devices=DEVICES, global_batch=BATCH)
    return {name: pricer.price(pins) for name, (pins, _) in LECTURE.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hw", default="h100")
    hw = parser.parse_args().hw
    quotes = lecture(hw)
    print(f"Llama-3-8B, {DEVICES} x {hw}, {BATCH} samples of 8,192 tokens a step\n")
    for number, (name, quote) in enumerate(quotes.items(), 1):
        say(number, name, quote)
    fitting = {name: quote for name, quote in quotes.items() if quote.fits}
    best = min(fitting, key=lambda name: fitting[name].step_time_s, default=None)
    print(f"Fastest that fits: {best}. `autoplan search` tries products of them and proves its choice.")


def say(number: int, name: str, quote: Quote) -> None:
    """One layout: what it is, what it costs, where the time goes."""
    print(f"{number}. {name}\n{textwrap.fill(LECTURE[name][1], 100)}\n")
    verdict = "fits" if quote.fits else "DOES NOT FIT"
    memory = f"{bytes_text(quote.memory_peak_bytes)} of {bytes_text(quote.memory_limit_bytes)}"
    print(f"   memory   {memory} on the fullest device: {verdict}")
    for item, size in sorted(quote.memory_items.items(), key=lambda pair: -pair[1])[:3]:
        print(f"            {bytes_text(size):>9}  {item}")
    print(f"   step     {seconds_text(quote.step_time_s)}, {quote.mfu:.0%} of the chips' peak")
    for part, spent_s in sorted(quote.breakdown_s.items(), key=lambda pair: -pair[1]):
        if spent_s > 0.001 * quote.step_time_s:
            share = f"{spent_s / quote.step_time_s:6.1%}"
            print(f"            {share}  {PARTS.get(part, part)} ({seconds_text(spent_s)})")
    print()


if __name__ == "__main__":
    main()
