"""Stage boundaries and recompute for one mesh: columns of consecutive regions, chosen by a MIP.

Comes in: a :class:`Chain` of priced regions. Goes out: a :class:`Cut` (boundaries and the recompute of
every region) and a proved lower bound on the time of the pipeline.

Equal neighbours form a *run*. A *column* is (stage s, how many regions of which runs): they run on stage s
under the cheapest mix of recompute that fits the stage's memory. Exactly one column per stage is chosen, they
join end to end, and the counts of each run add up to its length (positions inside a run are not told
apart: with (first, end) columns instead, the same MIP takes 100 times as long). Two objectives propose
cuts; the lower bound is that of :func:`autoplan_cost_models.schedule.bound_rows`, linear in the stages'
seconds: for 1F1B with m >= p micro-batches, t = forward + backward of a stage and f its forward,

    T >= sum_j t_j + (m-1) t_s - min(sum_{j>s} t_j, (p-1-s) f_s)      for every stage s.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from ortools.math_opt.python import mathopt

from autoplan.planner.balance import could_beat, cut_of
from autoplan.planner.chain import NEVER, Chain, Cut, Run, Solved, quick_bound_s
from autoplan.planner.first_blocks import certain_pricer, is_in_time, relaxed_pricer, variants
from autoplan.planner.mixes import Column, ColumnPricer
from autoplan.planner.rank_room import RankRoom, stages_of
from autoplan.schedules import splits_backward
from autoplan_cost_models.schedule import bound_rows


def solve_chain(chain: Chain, *, incumbent_s: float = NEVER, time_limit_s: float = 20.0) -> Solved:
    """Cut the chain: proposals to price and a proved bound on every cut that beats the incumbent."""
    options = variants(chain)
    if len(options) == 1:
        return _solve_one(options[0], incumbent_s, time_limit_s)
    solved: list[Solved] = []
    for option in options:
        if not is_in_time(option, incumbent_s):
            break
        solved.append(_solve_one(option, incumbent_s, time_limit_s))
    cuts = dict.fromkeys(cut for one in solved for cut in one.cuts)
    return Solved(tuple(cuts), min((one.bound_s for one in solved), default=NEVER))


def _solve_one(chain: Chain, incumbent_s: float, time_limit_s: float) -> Solved:
    """Cut the chain: proposals to price and a proved bound. ``incumbent_s`` prunes hopeless columns.

    The bound holds for every cut that beats the incumbent. Its own cut comes first among the proposals: it
    may need a little too much memory, which pricing finds; the others fit for certain.
    """
    pricer, relaxed = certain_pricer(chain), relaxed_pricer(chain)
    if chain.stages == 1:
        whole = [column for column in (_whole(relaxed), _whole(pricer)) if column is not None]
        return Solved(_distinct(pricer, [[column] for column in whole]), _whole_bound_s(chain, whole))
    if incumbent_s < NEVER and not could_beat(chain, incumbent_s):
        return Solved((), incumbent_s)
    chosen, bound_s = _choose(
        chain, pricer.runs, _columns(chain, relaxed, incumbent_s), "bound", time_limit_s
    )
    if chosen is None:
        return Solved((), NEVER)
    columns = _columns(chain, pricer, incumbent_s)
    certain = [_choose(chain, pricer.runs, columns, rows, time_limit_s)[0] for rows in ("formula", "bound")]
    return Solved(_distinct(pricer, [chosen, *certain]), max(bound_s, quick_bound_s(chain)))


def _distinct(pricer: ColumnPricer, proposals: Sequence[list[Column] | None]) -> tuple[Cut, ...]:
    return tuple(dict.fromkeys(cut_of(pricer, proposal) for proposal in proposals if proposal is not None))


def _whole(pricer: ColumnPricer) -> Column | None:
    """The only column of a single stage, if it fits."""
    takes = tuple((run, pricer.runs[run].length) for run in range(len(pricer.runs)))
    return pricer.column(0, 0, 2 * len(takes), takes)


def whole_floor_s(chain: Chain) -> float:
    """A bound on a single stage without looking at mixes: the least recompute if regions could be recomputed
    in part. What more backward hides of the replicas' traffic is that much at most."""
    least = sum(item.forward_s + item.backward_s + min(item.extra_s) for item in chain.items)
    more_s = RankRoom(chain, 0, stages_of(chain, [len(chain.items)], 0)).least_extra_s()
    if more_s == NEVER:
        return NEVER
    shown_s, least_shown_s = chain.once_whole_s
    update_s = sum(item.once.update_s for item in chain.items)
    return chain.microbatches * (least + more_s) + max(least_shown_s, shown_s - more_s) + update_s


def _whole_bound_s(chain: Chain, whole: Sequence[Column]) -> float:
    """A single stage: its micro-batches one after another, then sync and update."""
    if not whole:
        return NEVER
    return chain.microbatches * whole[0].total_s + whole[0].sync_s + whole[0].update_s


def _columns(chain: Chain, pricer: ColumnPricer, incumbent_s: float) -> list[Column]:
    """Every column that fits and could be part of a plan faster than the incumbent."""
    last, longest_s = 2 * len(pricer.runs), incumbent_s / chain.microbatches
    kinds = [pricer.kinds[run.key] for run in pricer.runs]
    least = [kind.forward_s + kind.backward_s + min(kind.extra_s) for kind in kinds]
    columns: list[Column] = []
    for stage in range(chain.stages):
        starts = range(last) if stage else (0,)
        for start in starts:
            for end, takes in _takes(pricer.runs, start):
                if (end == last) != (stage == chain.stages - 1):
                    continue
                if sum(n for _, n in takes) > len(chain.items) - chain.stages + 1:
                    continue
                if sum(least[run] * n for run, n in takes) > longest_s * (1 + 1e-9):
                    continue
                column = pricer.column(stage, start, end, takes)
                if column is not None and column.total_s <= longest_s:
                    columns.append(column)
    return _reachable(columns, last, chain.stages)


def _takes(runs: tuple[Run, ...], start: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """All (end joint, takes) of a column that starts at a joint: part of a run, or the rest of it and on."""
    first, inside = divmod(start, 2)
    for taken in range(1, runs[first].length + (0 if inside else 1)):
        take = ((first, taken),)
        if inside or taken < runs[first].length:
            yield 2 * first + 1, take
        if inside or taken == runs[first].length:
            yield 2 * first + 2, take
            for end, more in _takes(runs, 2 * first + 2) if first + 1 < len(runs) else ():
                yield end, take + more


def _reachable(columns: list[Column], last: int, stages: int) -> list[Column]:
    """Drop columns that no chain of columns from the first region to the end passes through."""
    alive, kept = {(stages, last)}, list[Column]()
    for column in sorted(columns, key=lambda c: -c.stage):
        if (column.stage + 1, column.end) in alive:
            alive.add((column.stage, column.start))
            kept.append(column)
    reached, result = {(0, 0)}, list[Column]()
    for column in sorted(kept, key=lambda c: c.stage):
        if (column.stage, column.start) in reached:
            reached.add((column.stage + 1, column.end))
            result.append(column)
    return result if any(c.stage == stages - 1 for c in result) else []


def _choose(
    chain: Chain, runs: tuple[Run, ...], columns: list[Column], rows: str, time_limit_s: float
) -> tuple[list[Column] | None, float]:
    """The MIP: one column per stage, joined end to end; returns them and the proved bound on T."""
    p, m = chain.stages, chain.microbatches
    if not columns:
        return None, NEVER
    scale = 1.0 / max(column.total_s for column in columns)
    model = mathopt.Model()
    x = [model.add_binary_variable() for _ in columns]
    at: dict[tuple[int, int], list[mathopt.LinearTerm]] = {}
    by_stage: list[list[int]] = [[] for _ in range(p)]
    for i, column in enumerate(columns):
        by_stage[column.stage].append(i)
        at.setdefault((column.stage, column.start), []).append(x[i] * 1.0)
        at.setdefault((column.stage + 1, column.end), []).append(x[i] * -1.0)
    for stage in range(p):
        model.add_linear_constraint(mathopt.LinearSum(x[i] for i in by_stage[stage]) == 1)
    for (stage, _), terms in at.items():
        if 0 < stage < p:
            model.add_linear_constraint(mathopt.LinearSum(terms) == 0)
    for index, run in enumerate(runs):
        taken = [x[i] * n for i, column in enumerate(columns) for r, n in column.takes if r == index]
        model.add_linear_constraint(mathopt.LinearSum(taken) == run.length)
    time = [model.add_variable(lb=0) for _ in range(p)]
    for stage in range(p):
        spent = mathopt.LinearSum(x[i] * (columns[i].total_s * scale) for i in by_stage[stage])
        model.add_linear_constraint(time[stage] == spent)
    total = model.add_variable(lb=0)
    update = model.add_variable(lb=0)
    for stage in range(p):
        updates = mathopt.LinearSum(x[i] * (columns[i].update_s * scale) for i in by_stage[stage])
        model.add_linear_constraint(update >= updates)
    sync = [
        mathopt.LinearSum(x[i] * (columns[i].sync_s * scale) for i in own if columns[i].sync_s)
        for own in by_stage
    ]
    if rows == "formula":
        slowest = model.add_variable(lb=0)
        for stage in range(p):
            model.add_linear_constraint(slowest >= time[stage])
        every = mathopt.LinearSum(time)
        model.add_linear_constraint(total >= every + (m - 1) * slowest + sync[0] + update)
    else:
        for rank, least in _bound_rows(model, chain, columns, by_stage, x, time, scale):
            model.add_linear_constraint(total >= least + sync[rank] + update)
    model.minimize(total)
    limit = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=time_limit_s), relative_gap_tolerance=1e-4
    )
    with _silent():
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=limit)
    if not result.has_primal_feasible_solution():
        return None, NEVER
    values = result.variable_values(x)
    chosen = [column for column, value in zip(columns, values) if value > 0.5]
    return chosen, result.best_objective_bound() / scale


@contextlib.contextmanager
def _silent() -> Generator[None]:
    """HiGHS prints a debugging line to standard output now and then; keep it out of ours."""
    sys.stdout.flush()
    kept = os.dup(1)
    with Path(os.devnull).open("wb") as sink:
        os.dup2(sink.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _bound_rows(
    model: mathopt.Model,
    chain: Chain,
    columns: list[Column],
    by_stage: list[list[int]],
    x: list[mathopt.Variable],
    time: list[mathopt.Variable],
    scale: float,
) -> Iterator[tuple[int, mathopt.LinearBase]]:
    """(rank, a lower bound on when it ends) of every row of the schedule, one stage a rank."""
    forward = [model.add_variable(lb=0) for _ in time]
    weight = [model.add_variable(lb=0) for _ in time]
    for stage, own in enumerate(by_stage):
        for variable, seconds in (
            (forward, [columns[i].forward_s for i in own]),
            (weight, [columns[i].weight_s for i in own]),
        ):
            taken = mathopt.LinearSum(x[i] * (s * scale) for i, s in zip(own, seconds) if s)
            model.add_linear_constraint(variable[stage] == taken)
    rows = bound_rows(chain.schedule, chain.ranks, chain.vpp, chain.microbatches)
    split = splits_backward(chain.schedule)
    for f, b, w, hops, rank in zip(rows.forward, rows.backward, rows.weight, rows.hops, rows.rank):
        parts = [(time, b), (forward, f - b), *([(weight, w - b)] if split else [])]
        terms = (float(c) * v for variables, factors in parts for c, v in zip(factors, variables) if c)
        yield rank, mathopt.LinearSum(terms) + float(hops) * chain.hop_s * scale
