"""A chip for autoplan: ``PROFILES`` is the folder of its hardware profiles."""

from pathlib import Path

PROFILES = Path(__file__).parent / "profiles"
