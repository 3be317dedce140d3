"""The waterfall from ideal to predicted time: steps in, a chart and its table out."""

from __future__ import annotations

from autoplan.plan import Plan
from autoplan.report.markup import Markup, tag
from autoplan.report.page.charts import picture, seconds, section, table, time_axis
from autoplan.report.waterfall import Fall, waterfall

_LEFT, _WIDTH, _ROW, _TOP = 236.0, 740.0, 27.0, 6.0


def breakdown_section(plan: Plan, mark: str) -> Markup:
    """Nothing but a sentence where the plan has no forecast."""
    falls, told = waterfall(plan), plan.prediction
    if told is None or not falls:
        return section("time", "Where the time goes", tag("p", "The plan carries no forecast."))
    step_s = told.step_time_s
    intro = (
        "At the chip's peak rate the model's arithmetic would take "
        f"{seconds(falls[0].seconds, mark)} a step on {plan.workload.devices} devices: an MFU of 100%. "
        "Each bar adds what keeps the step from it; compute and communication are the busiest stage's."
    )
    return section(
        "time",
        "Where the time goes",
        tag("p", intro),
        _chart(falls, step_s, mark),
        _table(falls, step_s, mark),
    )


def _chart(falls: tuple[Fall, ...], step_s: float, mark: str) -> Markup:
    bottom = _TOP + _ROW * (len(falls) + 1)
    rows = [_bar(fall, _TOP + i * _ROW, step_s, mark) for i, fall in enumerate(falls)]
    whole = Fall("step", "predicted step", "", 0.0, step_s)
    links = [
        tag("line", x1=x, x2=x, y1=_TOP + (i + 1) * _ROW - 5, y2=_TOP + (i + 1) * _ROW + 5, class_="link")
        for i, fall in enumerate(falls)
        for x in [_LEFT + _WIDTH * (fall.from_s + fall.seconds) / step_s]
    ]
    return picture(
        "waterfall",
        "From the ideal time to the predicted step",
        "; ".join(f"{fall.name} {seconds(fall.seconds, mark)}" for fall in falls),
        _LEFT + _WIDTH + 150,
        bottom + 26,
        rows,
        links,
        _bar(whole, _TOP + len(falls) * _ROW, step_s, mark),
        time_axis(step_s, _LEFT, _WIDTH, bottom),
    )


def _bar(fall: Fall, y: float, step_s: float, mark: str) -> Markup:
    start, width = _LEFT + _WIDTH * fall.from_s / step_s, _WIDTH * fall.seconds / step_s
    if width < 0:  # less compute than the ideal: a profile whose products beat its own peak
        start, width = start + width, -width
    label = f"{seconds(fall.seconds, mark)}  {fall.seconds / step_s:.1%}"
    return tag(
        "g",
        tag("text", fall.name, x=_LEFT - 10, y=y + 17, text_anchor="end"),
        tag("rect", x=start, y=y + 4, width=max(width, 0.5), height=_ROW - 8, class_=f"fall fall-{fall.key}"),
        tag("text", label, x=start + max(width, 0.5) + 6, y=y + 17, class_="value"),
    )


def _table(falls: tuple[Fall, ...], step_s: float, mark: str) -> Markup:
    rows = [
        [fall.name, fall.why, seconds(fall.seconds, mark), f"{fall.seconds / step_s:.1%}"] for fall in falls
    ]
    total = ["predicted step", "", seconds(step_s, mark), "100.0%"]
    heads = ["cause", "what it is", "seconds", "share"]
    return table("From the ideal time to the predicted step", heads, rows, numbers_from=2, total=total)
