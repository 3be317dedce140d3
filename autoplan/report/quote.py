"""The price of a plan made by hand in, lines for people or an object for programs out."""

from __future__ import annotations

from typing import Any

from autoplan.planner.pricer import Quote
from autoplan.units import GIB, bytes_text, seconds_text

SHOWN = 5


def step_line(quote: Quote) -> str:
    """``step 4.11 s   64,000 tokens/s   MFU 41.0%``."""
    step = seconds_text(quote.step_time_s)
    return f"step {step}   {quote.tokens_per_s:,.0f} tokens/s   MFU {quote.mfu:.1%}"


def memory_lines(quote: Quote) -> list[str]:
    """Whether it fits, and the largest tensors at the peak of the fullest device."""
    verdict = "fits" if quote.fits else "DOES NOT FIT"
    peak, limit = bytes_text(quote.memory_peak_bytes), bytes_text(quote.memory_limit_bytes)
    largest = sorted(quote.memory_items.items(), key=lambda item: -item[1])[:SHOWN]
    return [
        f"memory {peak} of {limit}: {verdict}",
        *(f"  {bytes_text(n):>10}  {name}" for name, n in largest),
    ]


def quote_json(quote: Quote) -> dict[str, Any]:
    """Times, whether it fits, and memory with every item."""
    items = [{"name": name, "gib": size / GIB} for name, size in quote.memory_items.items()]
    peak_gib, limit_gib = quote.memory_peak_bytes / GIB, quote.memory_limit_bytes / GIB
    return {
        "step_time_s": quote.step_time_s,
        "tokens_per_s": quote.tokens_per_s,
        "mfu": quote.mfu,
        "fits": quote.fits,
        "memory_gib": {"peak": peak_gib, "limit": limit_gib, "peak_items": items},
        "breakdown_s": dict(quote.breakdown_s),
    }
