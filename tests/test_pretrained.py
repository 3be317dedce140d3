"""Weights that transformers wrote are read slice by slice, and written back as they were, under any plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixture import HandPlans
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from weights_fixture import assert_same_files, stored_bytes

from autoplan.capture import capture_model, load_model_source
from autoplan.capture.source import ModelSource
from autoplan.cli import main
from autoplan.errors import BadInputError
from autoplan.runtime.check import Checker
from autoplan.runtime.forked import RankError, run_ranks
from autoplan.runtime.parallel import ParallelModel
from autoplan.runtime.ranks import join_ranks
from autoplan.runtime.safetensors_files import SINGLE, files_by_size
from autoplan.runtime.sources import Held, Source

MODELS = Path(__file__).parent / "models"
# model, how it is saved, plans: experts merged by transformers, a tied head, one file and several
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "tiny_mixtral": (
        {"max_shard_size": "20KB"},
        [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "dp": 2, "ep": 2}],
    ),
    "tied_llama": ({}, [{"pp": 2, "tp": 2}, {"dp": 2, "zero": 1}]),
}


@cache
def setting(name: str) -> tuple[ModelSource, HandPlans, Checker]:
    path = MODELS / f"{name}.py"
    source, made = load_model_source(path), HandPlans(capture_model(path, dtype="fp64"), name)
    return source, made, Checker(source, made.plan())


@pytest.mark.parametrize("name", CASES)
def test_weights_go_in_and_out_as_they_were(name: str, tmp_path: Path) -> None:
    """Experts read for all ranks by each, a head written twice, files of another size: easily done."""
    options, plans = CASES[name]
    source, made, checker = setting(name)
    torch.manual_seed(1)
    original: Any = source.build()
    original.save_pretrained(tmp_path / "in", **options)
    expected = original.state_dict()
    for number, degrees in enumerate(plans):
        program, out = checker.prepare(made.plan(**degrees)), tmp_path / str(number)

        def body(rank: int, program: Any = program, out: Path = out) -> tuple[int, list[str]]:
            parallel = ParallelModel(program, checker.model, join_ranks(program.part.mesh))
            read = parallel.load_pretrained(tmp_path / "in")
            state = parallel.state_dict()
            wrong = [n for n, v in expected.items() if not torch.equal(state[n].to(v.dtype), v)]
            parallel.save_pretrained(out)
            return read, wrong

        answers = run_ranks(program.part.mesh.devices, body)
        assert not answers[0][1], degrees
        read, total = sum(read for read, _ in answers), stored_bytes(tmp_path / "in")
        if "zero" in degrees and degrees["zero"] > 1:
            assert read == total, "every byte is read by one rank"
        else:
            assert total <= read < 0.9 * total * len(answers)
        assert_same_files(tmp_path / "in", out)
        again = AutoModelForCausalLM.from_pretrained(out)
        ids = source.example_inputs(2)
        with torch.no_grad():
            assert torch.equal(again(**ids).logits, original(**ids).logits)


def test_without_an_original_it_is_what_transformers_loads(tmp_path: Path) -> None:
    """A model that was never loaded has no folder to be like: experts come out one by one too."""
    _, made, checker = setting("tiny_mixtral")
    program = checker.prepare(made.plan(tp=2))

    def body(rank: int) -> None:
        parallel = ParallelModel(program, checker.model, join_ranks(program.part.mesh))
        parallel.save_pretrained(tmp_path / "out")
        parallel.save(tmp_path / "checkpoint")
        with pytest.raises(BadInputError, match=r"Expected model.safetensors"):
            parallel.load_pretrained(tmp_path)

    run_ranks(2, body)
    told = [str(tmp_path / "checkpoint"), str(MODELS / "tiny_mixtral.py"), "-o", str(tmp_path / "later")]
    assert main(["weights", *told, "--dtype", "fp32"]) == 0
    for folder in (tmp_path / "out", tmp_path / "later"):
        assert any("experts.0.w1" in name for name in load_file(folder / SINGLE))
        again = AutoModelForCausalLM.from_pretrained(folder)
        for name, value in checker.model.state_dict().items():
            assert torch.equal(again.state_dict()[name].double(), value.double()), name
    assert main(["weights", told[0], str(MODELS / "tied_llama.py"), *told[2:]]) == 2


class Counted(Source):
    """A tensor that says how much of it was read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.read_elements = tensor, tensor.shape, 0

    def read(self, box: tuple[slice, ...]) -> torch.Tensor:
        found = self.tensor[box]
        self.read_elements += found.numel()
        return found


def test_sources_are_the_tensors_they_stand_for() -> None:
    """Every operation on sources against the one on tensors, read box by box; only what it needs is read."""
    tensors = [torch.randn(4, 6) for _ in range(3)]
    operations: Mapping[str, Any] = {
        "cat": lambda a, b, c: torch.cat([a, b, c], dim=1),
        "stack": lambda a, b, c: torch.stack([a, b, c], dim=-1),
        "chunk": lambda a, b, c: torch.chunk(torch.cat([a, b]), 3)[1],
        "split": lambda a, b, c: torch.split(a, [1, 5], dim=-1)[1],
        "transpose": lambda a, b, c: torch.transpose(torch.stack([a, b]), 0, 2),
        "squeeze": lambda a, b, c: torch.chunk(torch.stack([a, b, c]), 3)[2].squeeze(0),
        "another": lambda a, b, c: a.reshape(6, 4).flip(0).contiguous(),
    }
    for name, operation in operations.items():
        plain = operation(*tensors)
        counted = [Counted(tensor) for tensor in tensors]
        source = operation(*counted)
        assert source.shape == plain.shape, name
        box = tuple(slice(size // 3, size // 3 + max(1, size // 2)) for size in plain.shape)
        assert torch.equal(source.read(box), plain[box]), name
        if name != "another":
            assert sum(one.read_elements for one in counted) == plain[box].numel(), name
        assert torch.equal(source.whole(), plain)
    assert torch.equal(Held(tensors[0]).whole(), tensors[0])


def test_files_hold_what_fits() -> None:
    files = files_by_size({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    assert [name.split("-")[1] for name in files.values()] == ["00001", "00001", "00002", "00003"]
    assert set(files_by_size({"a": 4}, 8).values()) == {SINGLE}


def test_another_models_weights_are_refused(tmp_path: Path) -> None:
    _, made, checker = setting("tied_llama")
    other: Any = load_model_source(MODELS / "tiny_mixtral.py").build()
    other.save_pretrained(tmp_path / "other")
    program = checker.prepare(made.plan())

    def body(rank: int) -> None:
        parallel = ParallelModel(program, checker.model, join_ranks(program.part.mesh))
        parallel.load_pretrained(tmp_path / "other")

    with pytest.raises(RankError, match="another model"):
        run_ranks(1, body)
