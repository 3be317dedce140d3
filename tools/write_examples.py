"""Writes docs/examples.md: every example model planned on a cluster, with what the command printed.

Comes in: names of examples (none: all). Goes out: docs/examples/NAME.txt, one plan each, and the page that
shows them.

    python tools/write_examples.py bert vit
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "docs" / "examples"
PLANS = ROOT / "out" / "examples"
# example: the cluster it is planned for
CLUSTERS = {
    "gpt": "--hw cpu --devices 4 --global-batch 16",
    "tiny_llama": "--hw cpu --devices 4 --global-batch 16",
    "vlm": "--hw cpu --devices 2 --global-batch 8",
    "dit": "--hw cpu --devices 2 --global-batch 8",
    "bert": "--hw a100 --devices 8 --global-batch 256",
    "vit": "--hw a100 --devices 8 --global-batch 1024",
    "t5": "--hw a100 --devices 16 --global-batch 256",
    "mamba2": "--hw h100 --devices 8 --global-batch 128",
    "llama3_8b": "--hw kunlun --devices 64 --global-batch 512",
    "llama3_70b": "--hw h100 --devices 512 --global-batch 1024",
    "llama3_405b": "--hw h100 --devices 4096 --global-batch 2048",
    "mixtral_8x7b": "--hw h100 --devices 128 --global-batch 1024",
    "qwen3_30b_a3b": "--hw h200 --devices 64 --global-batch 512",
    "deepseek_v3": "--hw h800 --devices 2048 --global-batch 4096",
}
OPENING = """\
# Examples

The models of `examples/`, each with the command that plans it and what that printed. The page is written by
`python tools/write_examples.py`: run it again after a change of the cost model. None of the files mentions
autoplan. Two more are scripts: `examples/train.py` trains `gpt.py`, and `examples/walkthrough.py` a lecture
that needs no cluster: one model, four layouts, what each costs.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLUSTERS)}; default: all")
    names = parser.parse_args().names or list(CLUSTERS)
    TEXTS.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"planning {name}", flush=True)
        (TEXTS / f"{name}.txt").write_text(planned(name), encoding="utf-8")
    (ROOT / "docs" / "examples.md").write_text(page(), encoding="utf-8")
    return 0


def planned(name: str) -> str:
    """What the search prints; the plan itself lies in out/examples."""
    PLANS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "autoplan", *words(name), "-o", str(PLANS / f"{name}.yaml")]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("plan written")]
    return "\n".join(lines).strip() + "\n"


def words(name: str) -> list[str]:
    return ["search", f"examples/{name}.py", *CLUSTERS[name].split()]


def page() -> str:
    """The page, of the examples that have been planned."""
    return OPENING + "".join(_section(name) for name in CLUSTERS if (TEXTS / f"{name}.txt").exists())


def _section(name: str) -> str:
    about = (ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or "").splitlines()[
        0
    ]
    command = f"```sh\nautoplan {' '.join(words(name))}\n```"
    return f'\n## {name}\n\n{about}\n\n{command}\n\n```text\n--8<-- "examples/{name}.txt"\n```\n'


if __name__ == "__main__":
    raise SystemExit(main())
