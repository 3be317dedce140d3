"""A linear program as plain lists, solved by HiGHS: variables in [0, 1] and rows come in, values go out.

Building the solver's message at once from lists is ten times faster than its modelling layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

INTEGRAL_TOLERANCE = 1e-6
# Keeps the smallest price, a tie-break, above the solver's tolerance of 1e-7.
MICROSECONDS = 1e6


@dataclass
class LinearProgram:
    """Minimise ``costs`` over variables in [0, 1]; each row is (terms, lower bound, upper bound)."""

    costs: list[float] = field(default_factory=list[float])
    rows: list[tuple[list[tuple[int, float]], float, float]] = field(
        default_factory=list[tuple[list[tuple[int, float]], float, float]]
    )

    def add_variable(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def add_row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        self.rows.append((terms, lower, upper))


@dataclass(frozen=True)
class Solution:
    """``integral`` is False where the relaxation was not, and branching was needed."""

    values: list[float]
    objective: float
    integral: bool


def solve(program: LinearProgram) -> Solution:
    """The optimum in whole numbers: the relaxation if it is integral, else by branching."""
    values, objective = _run(program, integer=False)
    if all(min(v, 1.0 - v) < INTEGRAL_TOLERANCE for v in values):
        return Solution(values, objective, True)
    return Solution(*_run(program, integer=True), False)


def solve_relaxed(program: LinearProgram) -> Solution | None:
    """The optimum where variables may take any value from 0 to 1; None where no values satisfy the rows."""
    result = _result(program, integer=False)
    if result.termination.reason is mathopt.TerminationReason.INFEASIBLE:
        return None
    return Solution(*_values(program, result), False)


def _result(program: LinearProgram, integer: bool) -> mathopt.SolveResult:
    model = mathopt.Model.from_model_proto(_message(program, integer))
    return mathopt.solve(model, mathopt.SolverType.HIGHS)


def _run(program: LinearProgram, integer: bool) -> tuple[list[float], float]:
    return _values(program, _result(program, integer))


def _values(program: LinearProgram, result: mathopt.SolveResult) -> tuple[list[float], float]:
    if result.termination.reason is not mathopt.TerminationReason.OPTIMAL:
        raise RuntimeError(f"the linear program ended as {result.termination}")
    by_id = {variable.id: value for variable, value in result.variable_values().items()}
    values = [by_id[i] for i in range(len(program.costs))]
    return values, result.objective_value() / MICROSECONDS


def _message(program: LinearProgram, integer: bool) -> model_pb2.ModelProto:
    """The model as the solver's own message; costs, given in seconds, are in microseconds."""
    message = model_pb2.ModelProto()
    count = len(program.costs)
    message.variables.ids.extend(range(count))
    message.variables.lower_bounds.extend([0.0] * count)
    message.variables.upper_bounds.extend([1.0] * count)
    message.variables.integers.extend([integer] * count)
    priced = [(i, cost * MICROSECONDS) for i, cost in enumerate(program.costs) if cost]
    message.objective.linear_coefficients.ids.extend(i for i, _ in priced)
    message.objective.linear_coefficients.values.extend(cost for _, cost in priced)
    message.linear_constraints.ids.extend(range(len(program.rows)))
    message.linear_constraints.lower_bounds.extend(lower for _, lower, _ in program.rows)
    message.linear_constraints.upper_bounds.extend(upper for _, _, upper in program.rows)
    matrix = message.linear_constraint_matrix
    for row, (terms, _, _) in enumerate(program.rows):
        merged: dict[int, float] = {}
        for variable, value in terms:
            merged[variable] = merged.get(variable, 0.0) + value
        ordered = [(variable, value) for variable, value in sorted(merged.items()) if value]
        matrix.row_ids.extend([row] * len(ordered))
        matrix.column_ids.extend(variable for variable, _ in ordered)
        matrix.coefficients.extend(value for _, value in ordered)
    return message
