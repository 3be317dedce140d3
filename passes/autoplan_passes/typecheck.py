"""The type check of a rewritten graph: the unsplit graph and one rank's graph in, the first wrong op out.

Every tensor's placement is inferred anew from the rank's graph (``typecheck_forward``), then gradients are
followed from the outputs to the parameters, by the invariant of ``states``:

    the gradient of R is R, of S(d) is S(d), of P is R;
    where an op's output is cut or partial and an input is R, that input's gradient is partial.

What chose the layout and what inserted the collectives is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autoplan_passes.calls import output_nodes
from autoplan_passes.faults import fault_at, quiet
from autoplan_passes.local_ops import find_fake_mode
from autoplan_passes.shard import dry_group
from autoplan_passes.states import REPLICATE, State
from autoplan_passes.transitions import Move
from autoplan_passes.typecheck_forward import Borders, Forward, Step, fitted

__all__ = ["Borders", "check_placements"]


def check_placements(whole: fx.GraphModule, local: fx.GraphModule, borders: Borders) -> dict[str, State]:
    """The placement of every tensor of ``local`` by node name; R* is R with a partial gradient.

    ``whole`` is the graph that ``local`` was made from on ``borders.axis``; collectives of other axes in it
    must be bound to dry groups by the caller. Raises :class:`TypeFault`.
    """
    values = Forward(whole, local, borders)
    with dry_group(borders.axis, borders.size), find_fake_mode(whole.graph), quiet():
        values.infer()
    return _Backward(values).infer()


@dataclass(frozen=True)
class _Gradient:
    """A gradient that reaches a tensor: how it lies, from which user, and which ops made it partial."""

    state: State
    user: fx.Node
    path: tuple[str, ...] = ()


class _Backward:
    """The gradients that reach each tensor, users before what they use."""

    def __init__(self, values: Forward) -> None:
        self.values = values
        self.arriving: dict[fx.Node, list[_Gradient]] = {}

    def infer(self) -> dict[str, State]:
        output = self.values.local.graph.output_node()
        for position, node in enumerate(output_nodes(self.values.local.graph)):
            border = self.values.borders.output(position, self.values.of[node])
            self._give(node, _Gradient(dual(border), output))
        for node in reversed(self.values.local.graph.nodes):
            if node.op == "placeholder":
                self._reach_placeholder(node)
            elif node in self.values.moves:
                self._pass_move(self.values.moves[node])
            elif node in self.values.steps:
                self._pass_step(node, self.values.steps[node])
        return {node.name: self._state(node) for node in self.values.state}

    def _state(self, node: fx.Node) -> State:
        state, gradients = self.values.state[node], self.arriving.get(node, [])
        partial = state == REPLICATE and gradients and gradients[0].state.kind == "P"
        return State("R*") if partial else state

    def _give(self, node: fx.Node, gradient: _Gradient) -> None:
        if self.values.of[node] in self.values.differentiable:
            self.arriving.setdefault(node, []).append(gradient)

    def _arrived(self, node: fx.Node) -> _Gradient | None:
        """The gradients of all users of a tensor, which must lie alike to be added."""
        gradients = self.arriving.get(node, [])
        states = {gradient.state for gradient in gradients}
        if len(states) > 1:
            partial = next((g for g in gradients if g.state.kind == "P"), gradients[0])
            other = next(g for g in gradients if g.state != partial.state)
            raise fault_at(
                partial.user,
                f"the gradient of {node.name} as {other.state}, as it comes from {other.user.name}",
                str(partial.state),
                (*partial.path, node.name, other.user.name),
            )
        if not gradients:
            return None
        path = tuple(dict.fromkeys(name for g in gradients for name in g.path))
        return _Gradient(gradients[0].state, gradients[0].user, path)

    def _reach_placeholder(self, node: fx.Node) -> None:
        gradient = self._arrived(node)
        if gradient is None:
            return
        wanted = dual(self.values.borders.placeholder(self.values.of[node]))
        if gradient.state != wanted:
            found = f"{gradient.state} by {gradient.user.name}"
            raise fault_at(node, f"its gradient as {wanted}", found, gradient.path)

    def _pass_move(self, move: Move) -> None:
        gradient = self._arrived(move.node)
        if gradient is None:
            return
        source = self.values.of[move.node]
        wanted = fitted(move.arrives, source)
        if gradient.state != wanted:
            found = f"{gradient.state} from {gradient.user.name}"
            raise fault_at(move.node, f"its gradient as {wanted}", found, gradient.path)
        passed = fitted(move.passes, source)
        path = (move.node.name,) if passed.kind == "P" else ()
        self._give(move.tensor, _Gradient(passed, move.node, path))

    def _pass_step(self, node: fx.Node, step: Step) -> None:
        gradient = self._arrived(node)
        if gradient is None:
            return
        state = self.values.state[node]
        output = State("R*") if state == REPLICATE and gradient.state.kind == "P" else state
        legal = [r for r in step.rules if r.output == output and gradient.state == dual(output)]
        if not legal:
            expected = " or ".join(sorted({str(dual(r.output)) for r in step.rules}))
            found = f"{gradient.state} from {gradient.user.name}"
            raise fault_at(node, f"its gradient as {expected}", found, gradient.path)
        for tensor, wanted in zip(step.inputs, legal[0].inputs):
            passed = dual(wanted)
            path = (*gradient.path, node.name) if passed.kind == "P" else ()
            self._give(tensor, _Gradient(passed, node, path))


def dual(state: State) -> State:
    """How the gradient of a tensor in a state lies."""
    return {"R*": State("P"), "P": REPLICATE}.get(state.kind, state)
