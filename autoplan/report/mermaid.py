"""The plan as a Mermaid flowchart, which READMEs and wikis draw by themselves: a plan in, text out."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.plan import Part, Plan, Stage
from autoplan.plan_table import estimate_mark, forecast, heading, part_line
from autoplan.region_runs import fold_regions
from autoplan.report.palette import stage_colours
from autoplan.report.words import boundary, layout_lines, ranks_text
from autoplan.units import bytes_text, seconds_text, share_text


def plan_mermaid(plan: Plan) -> str:
    """Stages as subgraphs, runs of regions as nodes, edges with what crosses them."""
    title = heading(plan).replace('"', "'")
    lines = ["---", f'title: "{title}"', "---", "flowchart TB"]
    lines += [f"  %% {line}" for line in (*forecast(plan), *(part_line(part) for part in plan.parts))]
    for p, part in enumerate(plan.parts):
        for s, stage in enumerate(part.stages):
            lines += _stage(f"p{p}_s{s}", s, stage, part, plan)
    return "\n".join([*lines, ""])


def _stage(name: str, s: int, stage: Stage, part: Part, plan: Plan) -> Iterator[str]:
    colours, runs = stage_colours(s), fold_regions(stage.regions)
    yield f'  subgraph {name}["{_text([f"stage {s}, {ranks_text(part, s)}", *_forecast(stage, plan)])}"]'
    for r, run in enumerate(runs):
        count = f" x{len(run.names)}" if len(run.names) > 1 else ""
        words = [f"{run.label}{count}", *layout_lines(run.layout, plan.layouts.get(run.layout))]
        if run.recompute != "none":
            words.append(f"recompute {run.recompute}")
        yield f'    {name}_r{r}["{_text(words)}"]'
        if r:
            before = plan.layouts.get(runs[r - 1].layout)
            crossing = _crossing(before.output_bytes if before else 0.0, boundary(part, before))
            yield f"    {name}_r{r - 1} -->{crossing} {name}_r{r}"
    yield "  end"
    yield f"  style {name} fill:{colours.box},stroke:{colours.line},color:#1A1A1A"
    if s + 1 < len(part.stages):
        sends = stage.prediction.sends_bytes if stage.prediction else 0.0
        crossing = _crossing(sends, boundary(part, plan.layouts.get(runs[-1].layout)))
        yield f"  {name}_r{len(runs) - 1} ==>{crossing} {name.rpartition('_')[0]}_s{s + 1}_r0"


def _forecast(stage: Stage, plan: Plan) -> list[str]:
    told, mark = stage.prediction, estimate_mark(plan)
    if told is None:
        return []
    times = f"forward {mark}{seconds_text(told.forward_s)}, backward {mark}{seconds_text(told.backward_s)}"
    return [times, f"memory {share_text(told.memory_peak_bytes, told.memory_limit_bytes)}"]


def _crossing(amount_bytes: float, placements: list[str]) -> str:
    words = [bytes_text(amount_bytes)] * (amount_bytes > 0) + placements
    return f'|"{_text([", ".join(words)])}"|' if words else ""


def _text(lines: list[str]) -> str:
    """Lines of a label: what Mermaid or HTML would read as markup becomes its entity code."""
    return "<br/>".join("".join(_entity(c) for c in line) for line in lines)


def _entity(character: str) -> str:
    return f"#{ord(character)};" if character in '"<>&#;`\\' else character
