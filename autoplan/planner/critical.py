"""The least step under given boundaries if regions may be recomputed in part: a chain in, bound and cut out.

A linear program over the share of every stage's equal regions that uses each recompute option. Its rows are
the memory of every rank at the moments of the schedule that may lack some, and lower bounds on the step that
are linear in the stages' seconds. These are found on the way: the program's optimum is simulated, and the
tasks that decide its end (:func:`autoplan_cost_models.schedule.critical_path`) make one more row, which holds
for any seconds; until the simulation takes no longer than the program says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoplan.plan import RECOMPUTE
from autoplan.planner.chain import NEVER, Chain, ChainItem, Cut, Floats, Solved, even_ends, stage_seconds
from autoplan.planner.interleave import fit_ranks, least_options, move_ends, shown_sync_s
from autoplan.planner.linear import LinearProgram, solve_relaxed
from autoplan.planner.rank_room import RankRoom, stages_of
from autoplan.schedules import splits_backward
from autoplan_cost_models.schedule import CriticalPath, critical_path

ROUNDS = 30
CLOSE = 1e-4  # of the step, between the program's optimum and its simulation
TOLERANCE = 1e-6  # of the solver, and some more


@dataclass(frozen=True)
class _Group:
    """``count`` equal regions of a stage; ``first`` is the variable of its first allowed option's share."""

    stage: int
    item: ChainItem
    count: int
    first: int

    def terms(self, amounts: Sequence[float], factor: float) -> list[tuple[int, float]]:
        """``factor`` times the sum of all regions' amounts (one for each option), as terms of a row."""
        allowed = enumerate(self.item.allowed)
        return [(self.first + i, factor * self.count * amounts[o]) for i, o in allowed]


def solve_boundaries(chain: Chain, *, incumbent_s: float = NEVER) -> Solved:
    """The bound on a chain under its boundaries and a cut near the optimum, if one fits (pricing tells for
    certain). Stops where the bound passes the incumbent."""
    least = least_options(chain)
    ends = move_ends(chain, even_ends(chain), least)
    program = _Program(chain, ends, least)
    bound_s, values = 0.0, None
    for _ in range(ROUNDS):
        values = program.solve()
        if values is None:
            return Solved((), NEVER)
        bound_s = program.bound_s(values)
        if bound_s >= incumbent_s or not program.add_path(values):
            break
    assert values is not None
    free = chain.first is None  # else first_blocks knows which cuts are legal
    options = fit_ranks(chain, ends, program.rounded(values)) if free and bound_s < incumbent_s else None
    cuts = () if options is None else (Cut(tuple(ends), tuple(RECOMPUTE[o] for o in options)),)
    return Solved(cuts, bound_s)


class _Program:
    """The program of one chain and its boundaries. Variable 0 is the step as a share of ``scale_s``."""

    def __init__(self, chain: Chain, ends: Sequence[int], least: Sequence[int]) -> None:
        self.chain, self.ends = chain, ends
        self.program = LinearProgram()
        self.least_s = stage_seconds(chain, ends, least)
        most = [max(item.allowed, key=lambda o, item=item: item.extra_s[o]) for item in chain.items]
        ranks = [stages_of(chain, ends, rank) for rank in range(chain.ranks)]
        self.syncs_s = [shown_sync_s(own) for own in ranks]
        self.once_s = chain.items[0].once.gather_alone_s
        self.once_s += sum(item.once.update_s for item in chain.items) / chain.ranks
        slowest = stage_seconds(chain, ends, most)
        self.scale_s = self._path(slowest).ends_s * 1.001
        self.program.add_variable(self.scale_s)
        self.groups = list(self._add_groups())
        for rank, own in enumerate(ranks):
            self._add_memory(RankRoom(chain, rank, own), rank)
        self._add_row(self._path(self.least_s))

    def _add_groups(self) -> Iterator[_Group]:
        for stage, (first, end) in enumerate(pairwise((0, *self.ends))):
            counts: dict[str, int] = {}
            items = {item.key: item for item in self.chain.items[first:end]}
            for item in self.chain.items[first:end]:
                counts[item.key] = counts.get(item.key, 0) + 1
            for key, count in counts.items():
                variables = [self.program.add_variable(0.0) for _ in items[key].allowed]
                self.program.add_row([(v, 1.0) for v in variables], 1.0, 1.0)
                yield _Group(stage, items[key], count, variables[0])

    def _add_memory(self, room: RankRoom, rank: int) -> None:
        """What the rank's stages may save at each moment. While a stage runs, its last region needs its
        transients too, at least (those of regions before it meet less saved tensors)."""
        unit, running = room.limit_bytes, np.zeros((len(room.stages), 3))
        running[:, 1:] = np.array([[_least_transient(stage.items[-1])] for stage in room.stages])
        side = room.alive @ np.array([stage.side_bytes for stage in room.stages])
        room_bytes = unit - room.fixed - side - running[room.table.chunk, room.table.running]
        left: dict[tuple[float, ...], float] = {}
        for alive, bytes_left in zip(room.alive.tolist(), room_bytes.tolist()):
            left[tuple(alive)] = min(bytes_left, left.get(tuple(alive), NEVER))
        own = [group for group in self.groups if group.stage % self.chain.ranks == rank]
        for alive, bytes_left in left.items():
            by_stage = dict(zip(range(rank, self.chain.stages, self.chain.ranks), alive))
            most = sum(by_stage[g.stage] * g.count * max(g.item.saved_bytes) for g in own)
            if most > bytes_left:
                terms = [t for g in own for t in g.terms(g.item.saved_bytes, by_stage[g.stage] / unit)]
                self.program.add_row(terms, -NEVER, bytes_left / unit)

    def _path(self, seconds: Floats) -> CriticalPath:
        chain = self.chain
        return critical_path(
            chain.schedule,
            seconds,
            chain.microbatches,
            chain.hop_s,
            vpp=chain.vpp,
            after_s=[sync_s + self.once_s for sync_s in self.syncs_s],
        )

    def _add_row(self, path: CriticalPath) -> None:
        """The step takes as long as the path's tasks, with what their backwards recompute."""
        fixed_s = float(np.sum(path.counts * self._without_extra())) + path.hops * self.chain.hop_s
        fixed_s += self.syncs_s[path.rank] + self.once_s
        terms = [(0, 1.0)]
        for group in self.groups:
            often = float(path.counts[1, group.stage])
            terms += group.terms(group.item.extra_s, -often / self.scale_s) if often else []
        self.program.add_row(terms, fixed_s / self.scale_s, NEVER)

    def _without_extra(self) -> Floats:
        late = splits_backward(self.chain.schedule)
        seconds = np.zeros((3, self.chain.stages))
        for group in self.groups:
            item, w = group.item, group.item.weight_s if late else 0.0
            seconds[:, group.stage] += group.count * np.array([item.forward_s, item.backward_s - w, w])
        return seconds

    def solve(self) -> list[float] | None:
        """The variables at the optimum; None where no recompute fits."""
        solution = solve_relaxed(self.program)
        return None if solution is None else solution.values

    def bound_s(self, values: Sequence[float]) -> float:
        """The step at the optimum, less what the solver may be wrong by."""
        return values[0] * self.scale_s * (1 - TOLERANCE)

    def add_path(self, values: Sequence[float]) -> bool:
        """Simulate the optimum and add what decides its end; False where the program knew."""
        seconds = self._without_extra()
        for group in self.groups:
            seconds[1, group.stage] += sum(values[v] * s for v, s in group.terms(group.item.extra_s, 1.0))
        path = self._path(seconds)
        if path.ends_s <= values[0] * self.scale_s * (1 + CLOSE):
            return False
        self._add_row(path)
        return True

    def rounded(self, values: Sequence[float]) -> list[int]:
        """An option for every region: whole numbers near the optimum, more recompute before less."""
        options: list[int] = []
        left: dict[tuple[int, str], list[int]] = {}
        for group in self.groups:
            shares = [values[group.first + i] for i in range(len(group.item.allowed))]
            order = sorted(zip(group.item.allowed, shares), key=lambda one: group.item.saved_bytes[one[0]])
            given, total, own = 0, 0.0, list[int]()
            for option, share in order:
                total += share * group.count
                wanted = round(total) - given
                own += [option] * wanted
                given += wanted
            own += [order[-1][0]] * (group.count - given)
            left[group.stage, group.item.key] = own
        for stage, (first, end) in enumerate(pairwise((0, *self.ends))):
            options += [left[stage, item.key].pop(0) for item in self.chain.items[first:end]]
        return options


def _least_transient(item: ChainItem) -> float:
    return min(item.transient_bytes[o] for o in item.allowed)
