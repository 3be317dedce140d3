"""The head of the report and its end: a plan in; key numbers, certificate, assumptions and estimates out."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.hardware import CollectiveFit, Curve, HardwareProfile, Quantity
from autoplan.plan import Certificate, Part, Plan
from autoplan.plan_table import estimate_mark, heading
from autoplan.report.compare import fullest_bytes
from autoplan.report.markup import Child, Markup, tag
from autoplan.report.page.charts import paragraphs, seconds, section, table
from autoplan.report.summary import fullest_stage
from autoplan.units import bytes_text, count_text, seconds_text
from autoplan.validation.worth import worth_text


def header(plan: Plan) -> Markup:
    """The title, what is trained where, and the numbers a person looks for first."""
    work = plan.workload
    line = (
        f"{work.devices} x {plan.hardware}, global batch {work.global_batch}, "
        f"{work.tokens_per_sample} tokens a sample, {work.dtype}, {work.optimizer}"
    )
    cards = tag("dl", [_card(name, value, note) for name, value, note in _key_numbers(plan)], class_="cards")
    parts = [tag("p", part_sentence(part), class_="mesh") for part in plan.parts]
    return tag("header", tag("h1", heading(plan)), tag("p", line, class_="lead"), parts, cards)


def part_sentence(part: Part) -> str:
    """``model: pp 4 x dp 4 x tp 4, micro-batch 2 x 64, 1f1b, ZeRO 0``."""
    zero = f"ZeRO {part.zero}" + (f" over {part.zero_shard} replicas" if part.zero_shard else "")
    turns = f", {part.vpp} stages a rank" if part.vpp > 1 else ""
    batches = f"micro-batch {part.micro_batch} x {part.microbatches}"
    return f"{part.name}: {part.mesh}, {batches}, {part.schedule}{turns}, {zero}"


def _card(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, tag("small", note) if note else None))


def _key_numbers(plan: Plan) -> Iterator[tuple[str, str, str]]:
    mark, told, proof = estimate_mark(plan), plan.prediction, plan.certificate
    if told is not None:
        yield "step", seconds(told.step_time_s, mark), "predicted"
        yield "tokens a second", f"{mark}{count_text(told.tokens_per_s)}", ""
        yield "MFU", f"{mark}{told.mfu:.1%}", "of the chip's peak"
    stage = fullest_stage(plan)
    if stage is not None and stage.prediction is not None:
        limit = stage.prediction.memory_limit_bytes
        peak = max(fullest_bytes(part) for part in plan.parts)
        yield "peak memory", bytes_text(peak), f"of {bytes_text(limit)} a device"
    if proof is not None:
        yield "proved within", f"{proof.gap:.2%}", "of the best in the space"


def certificate_section(plan: Plan) -> Markup:
    """How far the plan can be from the best, over which space."""
    proof = plan.certificate
    if proof is None:
        return section("certificate", "Certificate", tag("p", "The plan carries no certificate."))
    sentence = (
        f"No plan in the space is faster than {seconds_text(proof.bound_s)}: this one, at "
        f"{seconds_text(proof.objective_s)}, is within {proof.gap:.2%} of the best."
    )
    return section("certificate", "Certificate", tag("p", sentence), _proof(proof))


def _proof(proof: Certificate) -> Markup:
    rows: list[list[Child]] = [
        ["objective (simulated step)", seconds_text(proof.objective_s)],
        ["proved lower bound", seconds_text(proof.bound_s)],
        ["gap", f"{proof.gap:.3%}"],
        ["meshes considered", str(proof.meshes_considered)],
        ["meshes solved", str(proof.meshes_solved)],
        ["time of the search", seconds_text(proof.wall_s)],
    ]
    if proof.space:
        rows.append(["space", proof.space])
    return table("What was proved", ["", "value"], rows, numbers_from=9)


def inputs_section(plan: Plan, profile: HardwareProfile | None) -> Markup:
    """What was assumed, and which numbers of the chip are estimates."""
    inside: list[Markup] = []
    if plan.assumptions:
        assumed = [tag("li", text) for text in plan.assumptions]
        inside += [tag("h3", "Assumed, and the option that changes it"), tag("ul", assumed)]
    estimated = plan.prediction.estimated_inputs if plan.prediction else ()
    if estimated:
        inside.append(tag("h3", "Estimated inputs"))
        said = f"Numbers marked ~ rest on entries of {plan.hardware}'s profile that were not measured:"
        inside += [paragraphs(said), tag("ul", [tag("li", name) for name in estimated], class_="columns")]
    if plan.prediction is not None:
        inside += [tag("h3", "What predictions are worth"), tag("p", worth_text(plan.hardware))]
    if profile is not None:
        inside.append(_estimates(profile))
    if not inside:
        inside = [tag("p", "Nothing was assumed and nothing estimated.")]
    return section("inputs", "Assumptions and estimates", *inside)


def _estimates(profile: HardwareProfile) -> Markup:
    """The profile's estimated numbers with their sources."""
    rows = [
        [path, _sized(number), number.source]
        for path, number in profile.sourced()
        if number.tag == "estimated"
    ]
    total = sum(1 for _ in profile.sourced())
    title = f"{len(rows)} of the {total} numbers of {profile.name}'s profile are estimates"
    shown = table(title, ["number", "what", "source"], rows, numbers_from=9)
    return tag("details", tag("summary", title), shown)


def _sized(number: Quantity | Curve | CollectiveFit) -> str:
    if isinstance(number, Quantity):
        return f"{number.value:.4g}"
    return (
        f"curve of {len(number.x)} points" if isinstance(number, Curve) else f"fit for {number.ranks} ranks"
    )


def footer(plan: Plan) -> Markup:
    """Where the plan is from: fingerprints, versions, time spent."""
    from autoplan.plan_file import plan_fingerprint

    facts: list[tuple[str, str]] = [
        ("plan", plan_fingerprint(plan)),
        ("model", f"{plan.model.name} from {plan.model.source}, {plan.model.fingerprint}"),
        ("hardware profile", f"{plan.hardware}, {plan.hardware_fingerprint}"),
    ]
    if plan.workload.pins:
        facts.append(("pins", ", ".join(plan.workload.pins)))
    if plan.wall_s:
        facts.append(
            ("planned in", ", ".join(f"{name} {seconds_text(v)}" for name, v in plan.wall_s.items()))
        )
    pairs = [(tag("dt", name), tag("dd", value)) for name, value in facts]
    return tag("footer", tag("h2", "Where this is from"), tag("dl", pairs))
