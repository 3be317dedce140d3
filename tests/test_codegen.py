"""Generated stage files: what they say, and that they compute what the graph computes."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_fixture import HandPlans
from torch import fx

from autoplan.capture import Capture, capture_model
from autoplan.errors import BadPlanError, UnsupportedOpError
from autoplan.plan import Plan, Stage
from autoplan.runtime.prepare import prepare, single_part
from autoplan_codegen.expressions import FUNCTIONS, METHODS, OPERATORS, render
from autoplan_codegen.names import free_name
from autoplan_codegen.prelude import PRELUDE_MODULES, prelude_source
from autoplan_passes.stages import split_stages

MODELS = Path(__file__).parent / "models"


@pytest.fixture(scope="module")
def plans() -> HandPlans:
    capture = capture_model(MODELS / "tiny_gpt.py", dtype="fp32", batch=2)
    return HandPlans(capture, "tiny_gpt")


def test_golden_stage(plans: HandPlans, golden) -> None:
    """The last stage of tp 2 x pp 2: collectives, both kinds of recompute, a parameter tied to stage 0."""
    plan = plans.plan(pp=2, tp=2, recompute=("none", "none", "full", "selective"))
    program = prepare(plans.capture, plans.regions, plan)
    golden("tiny_gpt_stage_1.py", program.sources[1].text)


def test_stage_imports_torch_alone(plans: HandPlans) -> None:
    """A stage file once imported the package it was written by, and could not be handed on."""
    program = prepare(plans.capture, plans.regions, plans.plan(pp=2, tp=2, recompute=("full",)))
    for source in program.sources:
        names = [
            name
            for node in ast.walk(ast.parse(source.text))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        ]
        assert {name.split(".")[0] for name in names} <= {"torch", "collections", "typing", "dataclasses"}


# (row of a table, arguments): x is [2, 3, 4], y likewise, m [4, 4], i int [2, 3], b a mask [2, 3, 4]
X, Y, M = torch.randn(2, 3, 4), torch.rand(2, 3, 4) + 0.5, torch.randn(4, 4)
I, B = torch.randint(4, (2, 3)), torch.rand(2, 3, 4) > 0.5
SAMPLES = {
    "aten.matmul.default": (X, M),
    "aten.pow.Tensor_Scalar": (X, 2),
    "aten.bitwise_and.Tensor": (B, B),
    "aten.bitwise_or.Tensor": (B, ~B),
    "aten.view.default": (X, [6, 4]),
    "aten.reshape.default": (X, [2, 12]),
    "aten.expand.default": (X[:, :1], [2, 3, 4]),
    "aten.permute.default": (X, [2, 0, 1]),
    "aten.transpose.int": (X, 1, 2),
    "aten.unsqueeze.default": (X, 1),
    "aten.squeeze.dim": (X[:1], 0),
    "aten.flatten.using_ints": (X, 1, 2),
    "aten.t.default": (M,),
    "aten.linear.default": (X, M, M[0]),
    "aten.scaled_dot_product_attention.default": (X[None], X[None], X[None], None, 0.0, True),
    "aten.dropout.default": (X, 0.0, True),
    "aten.embedding.default": (M, I, 1),
    "aten.layer_norm.default": (X, [4], M[0], M[1], 1e-5, False),
    "aten.softmax.int": (X, -1),
    "aten.cat.default": ([X, Y], -1),
    "aten.split.Tensor": (X, 2, -1),
    "aten.chunk.default": (X, 2, -1),
    "aten.mean.dim": (X, [-1], True),
    "aten.where.self": (B, X, Y),
    "aten.cross_entropy_loss.default": (M, I.flatten()[:4], None, 1, 2, 0.1),
    "aten.slice.Tensor": (X, -1, 1, 9223372036854775807, 2),
    "aten.rsqrt.default": (Y,),
}


def _sample(name: str) -> tuple:
    if name in SAMPLES:
        return SAMPLES[name]
    if name in OPERATORS:
        return (X, 0.5) if name.endswith("Scalar") else (X, Y)
    return (X,)


@pytest.mark.parametrize(
    "name", [*OPERATORS, *METHODS, *FUNCTIONS, *(n for n in SAMPLES if n not in FUNCTIONS)]
)
def test_every_expression_means_its_op(name: str) -> None:
    """Each row of the tables, printed, run and compared with the op itself, to the last bit."""
    target = torch.ops
    for part in name.split("."):
        target = getattr(target, part)
    values = _sample(name)
    graph = fx.Graph()
    tensors: dict[str, torch.Tensor] = {}

    def argument(value):
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"v{len(tensors)}")
            node.meta["val"] = tensors[node.name] = value
            return node
        return [argument(item) for item in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(argument(value) for value in values))
    text = render(node, {n: n.name for n in graph.nodes})
    scope = {"torch": torch, "aten": torch.ops.aten, "F": torch.nn.functional, **tensors}
    found, expected = eval(text, scope), target(*values)
    pairs = zip(found, expected) if isinstance(expected, (list, tuple)) else [(found, expected)]
    assert all(torch.equal(one, other) for one, other in pairs), text


def test_unknown_callable_is_refused() -> None:
    """A Python function in the graph was once printed by its repr, which is no code."""
    graph = fx.Graph()
    node = graph.call_function(inspect.signature, (graph.placeholder("x"),))
    with pytest.raises(UnsupportedOpError, match="--opaque"):
        render(node, {n: n.name for n in graph.nodes})


@pytest.mark.parametrize(
    ("wanted", "taken", "expected"),
    [("a", (), "a"), ("a", ("a",), "a_1"), ("lambda", (), "lambda_1"), ("h.0", (), "h_0"), ("0", (), "v_0")],
)
def test_free_name(wanted: str, taken: tuple[str, ...], expected: str) -> None:
    """Names that are keywords, taken or no identifiers get another."""
    assert free_name(wanted, taken) == expected


def test_prelude_stands_by_itself() -> None:
    """Every public collective, cut out with what it uses, runs without the module it came from."""
    modules = [vars(module).items() for module in PRELUDE_MODULES]
    names = [n for items in modules for n, f in items if inspect.isfunction(f) and not n.startswith("_")]
    for name in names:
        imports, source = prelude_source([name])
        scope: dict[str, object] = {}
        exec("\n".join(("from __future__ import annotations", *imports)) + "\n" + source, scope)
        assert callable(scope[name])


def test_labels_reach_the_last_stage_alone(plans: HandPlans) -> None:
    """Labels once had to pass through every stage, and side inputs were sent instead of recomputed."""
    programs = split_stages(plans.capture, plans.regions, single_part(plans.plan(pp=4)))
    assert [program.user_inputs for program in programs] == [("tokens",), (), (), ("labels",)]
    assert [len(program.receives) for program in programs] == [0, 1, 1, 1]
    assert [program.loss != "" for program in programs] == [False, False, False, True]


def _without_region(plan: Plan, index: int) -> Plan:
    part = single_part(plan)
    regions = part.stages[0].regions
    return replace(plan, parts=(replace(part, stages=(Stage(regions[:index] + regions[index + 1 :]),)),))


def test_every_region_is_in_the_plan_once(plans: HandPlans) -> None:
    """A plan that leaves out a block must not train a smaller model."""
    with pytest.raises(BadPlanError, match="belongs to another model"):
        prepare(plans.capture, plans.regions, _without_region(plans.plan(), 1))


def test_capture_is_left_alone(plans: HandPlans) -> None:
    """Writing code must not change the captured graph: it is used again for other plans."""
    before = _text(plans.capture)
    prepare(plans.capture, plans.regions, plans.plan(pp=2, tp=2))
    assert _text(plans.capture) == before


def _text(capture: Capture) -> str:
    return str(capture.graph)
