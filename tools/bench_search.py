"""Times planning end to end from model.py: one line per model with capture, costs, search, gap and memory.

Comes in: which cases to run (all by default). Goes out: a table. Speeds are of the machine it runs on.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CASES = {
    "llama3_8b": ("kunlun", 256, 1024),
    "llama3_70b": ("kunlun", 512, 1024),
    "llama3_405b": ("h100", 16384, 16384),
    "mixtral_8x7b": ("h100", 64, 256),
    "qwen3_30b_a3b": ("h800", 64, 256),
    "deepseek_v3": ("h800", 2048, 8192),
}


def run_case(name: str) -> list[object]:
    """Plan one model in a process of its own; its row of the table."""
    hw, devices, batch = CASES[name]
    command = [sys.executable, "-m", "autoplan", "search", str(EXAMPLES / f"{name}.py"), "--hw", hw, "--json"]
    command += ["--devices", str(devices), "--global-batch", str(batch), "-o", f"out/{name}.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    if done.returncode:
        return [name, hw, devices, done.stderr.strip().splitlines()[-1][:60]]
    found = json.loads(done.stdout)
    wall, mesh = found["wall_s"], found["mesh"]
    layout = f"pp{mesh['pp']} dp{mesh['dp']} tp{mesh['tp']} zero{found['zero']} mb{found['micro_batch']}"
    gap = f"{100 * found['certificate']['gap']:.2f}%"
    times = [round(wall[key], 1) for key in ("capture", "cost", "search", "total")]
    return [name, hw, devices, layout, f"{found['step_time_s']:.3g}", gap, *times, round(peak_gib, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (all)")
    Path("out").mkdir(exist_ok=True)
    headers = ["model", "chip", "devices", "plan", "step s", "gap"]
    headers += ["capture s", "cost s", "search s", "total s"]
    rows = [run_case(name) for name in parser.parse_args().cases or CASES]
    print(tabulate(rows, headers=[*headers, "largest so far GiB"]))


if __name__ == "__main__":
    main()
