"""A captured model in; its identity, whether it trains, and what must be said of it, out."""

from __future__ import annotations

import math

from autoplan.capture.program import Capture
from autoplan.errors import BadInputError
from autoplan.plan import ModelIdentity
from autoplan.regions import differentiable_nodes


def require_trainable(capture: Capture) -> None:
    """Raises BadInputError where backward would reach no parameter."""
    trainable = any(info.trainable and not info.is_buffer for info in capture.parameters.values())
    (loss,) = capture.graph.output_node().all_input_nodes
    if not trainable or loss not in differentiable_nodes(capture):
        why = "its loss depends on none that is" if trainable else "none is"
        raise BadInputError(
            f"{capture.source}: training {capture.name} needs parameters with requires_grad, and {why}. "
            "Look for requires_grad=False, detach() and no_grad() in it."
        )


def batch_statistics(capture: Capture) -> list[str]:
    """Said where batch norm trains: its loss is not a mean over samples, whatever the layout."""
    norms = (node for node in capture.graph.nodes if str(node.target) == "aten.batch_norm.default")
    if not any(node.args[5] for node in norms):
        return []
    return [
        "batch norm takes its statistics over one micro-batch of one device, as it does under gradient "
        "accumulation and DDP (--pin dp=1 --pin micro_batch=GLOBAL_BATCH for the whole batch)"
    ]


def identity(capture: Capture) -> ModelIdentity:
    weights = [info for info in capture.parameters.values() if not info.is_buffer]

    return ModelIdentity(
        name=capture.name,
        source=capture.source,
        fingerprint=capture.fingerprint,
        parameters=sum(math.prod(info.shape) for info in weights),
        trainable_parameters=sum(math.prod(info.shape) for info in weights if info.trainable),
        tied_parameters=tuple(info.tied_names for info in weights if len(info.tied_names) > 1),
    )
