"""Which release of torch each emitted call needs: a file's text and a chip's release in, what is too new out.

A chip's torch may be years old (``software.torch_version`` of its profile), so that what is written for it
may use only what that release has. The releases are those of PyTorch's release notes and public tags.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Release = tuple[int, int]
LEAST_PYTHON = (3, 10)  # the oldest that a profile's torch runs on here (Kunlun's)
# The first release that has a name, by the dotted name's end.
SINCE: Mapping[str, Release] = {
    "torch.rms_norm": (2, 4),
    "F.rms_norm": (2, 4),
    "nn.RMSNorm": (2, 4),
    "aten.rms_norm": (2, 4),
    "torch.library.custom_op": (2, 4),
    "torch.library.register_autograd": (2, 4),
    "create_selective_checkpoint_contexts": (2, 4),
    "CheckpointPolicy": (2, 4),
    "torch.distributed.pipelining": (2, 4),
    "torch.distributed.tensor": (2, 5),
    "aten._scaled_dot_product_fused_attention_overrideable": (2, 5),
    "torch.distributed.fsdp.fully_shard": (2, 6),
    "torch.accelerator": (2, 6),
    "torch.library.register_kernel": (2, 4),
    "torch._grouped_mm": (2, 8),
    "aten._grouped_mm": (2, 8),
    "F.grouped_mm": (2, 10),
}
# Keywords that a later release gave to an older function.
KEYWORD_SINCE: Mapping[tuple[str, str], Release] = {
    ("F.scaled_dot_product_attention", "enable_gqa"): (2, 5),
    ("aten.scaled_dot_product_attention.default", "enable_gqa"): (2, 5),
}


@dataclass(frozen=True)
class TooNew:
    """A name in a file that a release lacks."""

    line: int
    name: str
    since: Release

    def __str__(self) -> str:
        return f"line {self.line}: {self.name} needs torch {self.since[0]}.{self.since[1]}"


def too_new(text: str, release: Release) -> list[TooNew]:
    """What of a Python file's names a torch of ``release`` lacks; SyntaxError for a newer Python's syntax."""
    tree = ast.parse(text, feature_version=LEAST_PYTHON)
    found = {(one.line, one.name): one for node in ast.walk(tree) for one in _needs(node)}
    return [one for one in found.values() if one.since > release]


def _needs(node: ast.AST) -> Iterator[TooNew]:
    if isinstance(node, ast.Attribute):
        name = _dotted(node)
        for known, since in SINCE.items():
            if name == known or name.endswith("." + known):
                yield TooNew(node.lineno, known, since)
    elif isinstance(node, (ast.ImportFrom, ast.Import)):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            full = f"{module}.{alias.name}".strip(".")
            for known, since in SINCE.items():
                if full == known or full.startswith(known + ".") or (module and alias.name == known):
                    yield TooNew(node.lineno, known, since)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        called = _dotted(node.func)
        for keyword in node.keywords:
            since = KEYWORD_SINCE.get((called, keyword.arg or ""))
            if since is not None:
                yield TooNew(node.lineno, f"{called}({keyword.arg}=)", since)


def _dotted(node: ast.expr) -> str:
    """``torch.library.custom_op`` of an attribute chain; nothing for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""
