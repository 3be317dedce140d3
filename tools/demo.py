"""The whole product in one go: plan a Llama-3-8B for a Kunlun cluster, draw it, train under a plan.

Comes in: a folder for the results. Goes out: plans, pictures, the rewritten training script and its run;
each command is printed as you would type it. Run by ``make demo``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def steps(out: str) -> list[tuple[str, str]]:
    """(what is shown, the command) in order."""
    return [
        (
            "Plan Llama-3-8B for 64 Kunlun P800",
            f"autoplan search examples/llama3_8b.py --hw kunlun --devices 64 --global-batch 512 "
            f"-o {out}/llama3_8b.yaml",
        ),
        (
            "Draw the plan",
            f"autoplan show {out}/llama3_8b.yaml --svg {out}/llama3_8b.svg --png {out}/llama3_8b.png",
        ),
        (
            "Plan a small GPT for two CPU devices, cut by tensor parallelism",
            "autoplan search examples/gpt.py --hw cpu --devices 2 --global-batch 8 --pin tp=2 "
            f"-o {out}/gpt.yaml",
        ),
        (
            "Check it: loss, every gradient and the gradient norm against one process",
            f"autoplan check {out}/gpt.yaml examples/gpt.py",
        ),
        (
            "Apply it to an ordinary training script",
            f"autoplan apply {out}/gpt.yaml examples/train.py -o {out}/train_autoplan.py",
        ),
        ("Train on two CPU ranks under the plan", f"autoplan run {out}/gpt.yaml examples/train.py"),
        (
            "The same script, unchanged, on one process: the same losses, fp32 rounding apart",
            "python examples/train.py",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="out", help="folder for plans and pictures")
    out = parser.parse_args().out
    Path(out).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for title, command in steps(out):
        print(f"\n== {title}\n$ {command}", flush=True)
        start = time.perf_counter()
        program, *rest = shlex.split(command)
        arguments = [sys.executable, *(["-m", "autoplan"] if program == "autoplan" else []), *rest]
        code = subprocess.run(arguments, cwd=ROOT, env=environment, check=False).returncode
        print(f"({time.perf_counter() - start:.1f} s)", flush=True)
        if code:
            return code
    print(f"\nDone. Look at {out}/llama3_8b.svg, {out}/llama3_8b.yaml and {out}/train_autoplan.py.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
