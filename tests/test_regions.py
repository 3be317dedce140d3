"""Regions: cutting loses nothing, equal blocks are found equal, and the pieces run like the whole."""

from __future__ import annotations

import pytest
import torch
from captured_models import SMALL, run_regions, small_capture, small_regions, small_source

from autoplan.capture import capture_module
from autoplan.capture.batch import node_forms
from autoplan.errors import BadInputError
from autoplan.regions import find_regions, region_graph, side_input_graph

# example -> its regions as runs of (name pattern, count, distinct classes)
SHAPES = {
    "gpt": "embed blocks*4/1 head",
    "tiny_llama": "embed layers*4/1 head",
    "vlm": "embed vision*3/1 glue decoder*4/1 head",
    "dit": "embed blocks*4/1 head",
    "llama3_8b": "embed model.layers*3/1 head",
    "mixtral_8x7b": "embed model.layers*3/1 head",
    "qwen3_30b_a3b": "embed model.layers*3/1 head",
    "deepseek_v3": "embed model.layers*3/2 head",
    "bert": "embed bert.encoder.layer*3/1 head",
    "vit": "embed vit.layers*3/1 head",
    "mamba2": "embed backbone.layers*3/1 head",
    "t5": "embed encoder.block*3/2 glue decoder.block*3/2 head",
}


def shape_of(name: str) -> str:
    """The regions of an example in the notation of SHAPES."""
    words: list[tuple[str, list[str]]] = []
    for region in small_regions(name):
        stem = region.name.rpartition(".")[0] or region.name
        if not words or words[-1][0] != stem:
            words.append((stem, []))
        words[-1][1].append(region.class_id)
    return " ".join(w if w in ("embed", "head", "glue") else f"{w}*{len(c)}/{len(set(c))}" for w, c in words)


@pytest.mark.parametrize("name", SMALL)
def test_regions_have_the_shape_of_the_model(name: str) -> None:
    """A vision tower once swallowed its projector, and T5's first blocks were taken for the others."""
    assert shape_of(name) == SHAPES[name]


@pytest.mark.parametrize("name", SMALL)
def test_concatenated_regions_are_the_graph(name: str) -> None:
    """Nodes between two blocks were once in no region."""
    calls = [n.name for n in small_capture(name).graph.nodes if n.op == "call_function"]
    assert [n for region in small_regions(name) for n in region.nodes] == calls


@pytest.mark.parametrize("name", SMALL)
def test_regions_of_one_class_have_one_graph(name: str) -> None:
    """A layout made for one block is used on every block of its class, so names must be equal."""
    capture = small_capture(name)
    graphs: dict[str, str] = {}
    for region in small_regions(name):
        code = region_graph(capture, region, 1).code
        assert graphs.setdefault(region.class_id, code) == code, region.name


@pytest.mark.parametrize("name", SMALL)
def test_region_chain_equals_eager(name: str) -> None:
    """Loss and every gradient of the cut graph, at a batch that was not captured, against the plain model."""
    source = small_source(name)
    capture = small_capture(name)
    torch.manual_seed(0)
    model = source.build()
    inputs = source.example_inputs(3, **capture.sizes)
    expected = source.run(model, inputs)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = run_regions(capture, small_regions(name), model, inputs)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    scale = max(float(g.abs().max()) for g in gradients.values())
    for parameter, gradient in gradients.items():
        found = model.get_parameter(parameter).grad
        assert found is not None, parameter
        assert float((found - gradient).abs().max()) <= 2e-5 * scale, parameter


@pytest.mark.parametrize("name", SMALL)
def test_batch_form_gives_the_graph_of_a_real_capture(name: str) -> None:
    """Patched integers and shapes at batch 3 against a trace made there."""
    capture = small_capture(name)
    assert capture.batch_form.known, capture.warnings
    source = small_source(name)
    real = capture_module(source.construct_checked(), source.example_inputs(3, **capture.sizes), name=name)
    for region, other in zip(small_regions(name), find_regions(real), strict=True):
        patched, traced = (region_graph(c, r, 3).graph for c, r in ((capture, region), (real, other)))
        assert [(f.skeleton, f.integers, f.dims) for f in node_forms(patched)] == [
            (f.skeleton, f.integers, f.dims) for f in node_forms(traced)
        ]
        strides = [
            [v.meta["val"].stride() for v in g.nodes if hasattr(v.meta.get("val"), "stride")]
            for g in (patched, traced)
        ]
        assert strides[0] == strides[1], region.name


def test_side_inputs_can_be_recomputed_from_inputs_alone() -> None:
    """Rope tables cross every stage boundary unless a stage makes them itself."""
    capture, regions = small_capture("tiny_llama"), small_regions("tiny_llama")
    assert regions[1].side_inputs == ("cos", "sin")
    assert not any(region.side_inputs for region in small_regions("gpt"))
    graph = side_input_graph(capture, regions[1].side_inputs, 2)
    held = [n.meta["kind"] for n in graph.graph.find_nodes(op="placeholder")]
    assert held == ["buffer"]
    cos, sin = graph(1e4 ** -(torch.arange(0, 16, 2) / 16))
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_frozen_parts_need_no_gradient() -> None:
    """A frozen vision tower was once priced with a backward pass."""
    source = small_source("vlm")
    module = source.construct_checked()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(("patch", "vision")))
    capture = capture_module(module, source.example_inputs(1), name="frozen")
    regions = {region.name: region for region in find_regions(capture)}
    wants = {
        name: [
            n.meta["requires_grad"]
            for n in region_graph(capture, regions[name], 1).graph.find_nodes(op="placeholder")
        ]
        for name in ("vision.1", "decoder.0", "decoder.1")
    }
    assert not any(wants["vision.1"])
    assert all(wants["decoder.0"]) and all(wants["decoder.1"])
    assert not any(capture.parameters[p].trainable for p in regions["vision.0"].parameters)


def test_another_batch_of_a_fixed_capture_is_refused() -> None:
    """A capture of a given module knows its own batch size alone."""
    source = small_source("gpt")
    capture = capture_module(source.construct_checked(), source.example_inputs(2), name="gpt")
    region = find_regions(capture)[1]
    assert region_graph(capture, region, 2).graph is not None
    with pytest.raises(BadInputError, match="fixed at 2"):
        region_graph(capture, region, 4)
