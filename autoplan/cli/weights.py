"""``autoplan weights``: a checkpoint of a run in, weights that Hugging Face's transformers loads out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autoplan.cli.subparsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "weights", help="a checkpoint as safetensors that transformers loads", description=__doc__
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a folder that a run has saved")
    parser.add_argument("model", type=Path, metavar="model.py", help="the model that was trained")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--like", type=Path, metavar="DIR", help="the original weights, whose names, dtypes and files to keep"
    )
    parser.add_argument("--dtype", default="", choices=["", "bf16", "fp16", "fp32"], help="without --like")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder; 2 where the checkpoint is not of this model."""
    from autoplan.runtime.convert import convert_checkpoint

    tensors = convert_checkpoint(args.checkpoint, args.model, args.output, like=args.like, dtype=args.dtype)
    if args.json:
        print(json.dumps({"output": str(args.output), "tensors": tensors}))
        return 0
    print(f"wrote {tensors} tensors to {args.output}: from_pretrained loads them")
    return 0
