"""Numbers with their units as short text: seconds, bytes and rates in, what a person reads out."""

from __future__ import annotations

GIB = float(2**30)
_BYTE_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SECOND_STEPS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_COUNT_STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def _three_digits(value: float) -> str:
    """``1.234 -> 1.23``, ``12.34 -> 12.3``, ``123.4 -> 123``."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def bytes_text(amount_bytes: float) -> str:
    """``33554432 -> "32.0 MiB"``; below one KiB in bytes."""
    for step, unit in _BYTE_STEPS:
        if abs(amount_bytes) >= step:
            return f"{_three_digits(amount_bytes / step)} {unit}"
    return f"{amount_bytes:.0f} B"


def share_text(amount_bytes: float, limit_bytes: float) -> str:
    """``"31.0 of 86.2 GiB"``, or ``"96.2 MiB of 14.8 GiB"`` where the units differ."""
    amount, limit = bytes_text(amount_bytes), bytes_text(limit_bytes)
    number, _, unit = amount.partition(" ")
    return f"{number if limit.endswith(f' {unit}') else amount} of {limit}"


def seconds_text(duration_s: float) -> str:
    """``0.0123 -> "12.3 ms"``; zero is ``"0"``."""
    for step, unit in _SECOND_STEPS:
        if abs(duration_s) >= step:
            return f"{_three_digits(duration_s / step)} {unit}"
    return "0" if duration_s == 0 else f"{duration_s * 1e6:.2f} us"


def count_text(count: float) -> str:
    """``8.03e9 -> "8.03 B"``, ``512 -> "512"``."""
    for step, unit in _COUNT_STEPS:
        if abs(count) >= step:
            return f"{_three_digits(count / step)} {unit}"
    return f"{count:.0f}"


def value_text(value: float, unit: str) -> str:
    """A number with its unit: seconds and bytes as people read them, others with a prefix."""
    if unit == "s":
        return seconds_text(value)
    if unit == "bytes":
        return bytes_text(value)
    return f"{count_text(value) if abs(value) >= 1000 else f'{value:.4g}'} {unit}".rstrip()
