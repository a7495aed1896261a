"""Rules for pipelines: stages, micro-batches or schedules of ranks that do not fit together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, outvoted
from ddp_notebook.model import (
    Category,
    Finding,
    PipelinePart,
    Ranks,
    by_value,
    name_ranks,
    verb,
)

_Pipeline = Mapping[int, PipelinePart]


def other_schedules(context: Context) -> Iterator[Finding]:
    """Ranks of one pipeline that run other stages, micro-batches or schedules than it needs.

    torch does not compare them. Only where ranks are stuck, or one has failed.
    """
    for pipeline in _pipelines(context):
        finding = _wrong_stages(context, pipeline) or _other_numbers(context, pipeline)
        if finding is not None:
            yield finding
            return


def _pipelines(context: Context) -> Iterator[_Pipeline]:
    """The ranks of each pipeline, with what each of them is in it."""
    found: dict[tuple[Ranks, int], dict[int, PipelinePart]] = {}
    ranks = tuple(e.rank for e in context.case.ranks)
    for report in context.case.ranks:
        seen: dict[Ranks, int] = {}
        for part in report.parts.pipelines:
            number = seen[part.members] = seen.get(part.members, -1) + 1
            if part.members and max(part.members) < len(ranks):
                found.setdefault((part.members, number), {})[report.rank] = part
    yield from (pipeline for pipeline in found.values() if len(pipeline) > 1)


def _wrong_stages(context: Context, pipeline: _Pipeline) -> Finding | None:
    """A rank with a stage that torch has another rank for: that one is there twice, its own not."""
    wrong = {
        rank: part for rank, part in pipeline.items() if not set(part.stages) <= set(part.meant)
    }
    sizes = {part.num_stages for part in pipeline.values()}
    if not wrong or len(sizes) > 1:
        return None
    part = next(iter(wrong.values()))
    twin = next(
        (r for r, p in pipeline.items() if r not in wrong and set(p.stages) & set(part.stages)),
        None,
    )
    also = f", which rank {twin} has too" if twin is not None else ""
    lacks = sorted(set(range(part.num_stages)) - {s for p in pipeline.values() for s in p.stages})
    missing = ""
    if lacks and len(pipeline) == len(part.members):
        missing = f"; no rank has {_stages(tuple(lacks))}"
    return Finding(
        Category.SCHEDULE_MISMATCH,
        tuple(wrong),
        f"{verb(tuple(wrong), 'runs', 'run')} {_stages(part.stages)} of the pipeline{also}, where "
        f"the schedule expects {_stages(part.meant)}{missing}",
        "Give each rank the stage_index of its own place in the pipeline's group: "
        "PipelineStage(module, dist.get_rank(group), ...).",
        context.victims,
        _evidence(pipeline),
    )


def _stages(stages: tuple[int, ...]) -> str:
    numbers = ", ".join(map(str, stages))
    return f"stage {numbers}" if len(stages) == 1 else f"stages {numbers}"


def _other_numbers(context: Context, pipeline: _Pipeline) -> Finding | None:
    numbers: list[tuple[Mapping[int, Hashable], str, str]] = [
        (
            {rank: part.num_stages for rank, part in pipeline.items()},
            "{} stages in all",
            "Give PipelineStage the same num_stages on every rank.",
        ),
        (
            {rank: part.micro_batches for rank, part in pipeline.items()},
            "{} micro-batches",
            "Give the schedule the same n_microbatches on every rank.",
        ),
    ]
    if _in_messages(context, pipeline):  # in another order the same messages may well meet
        numbers.append(
            (
                {rank: part.schedule for rank, part in pipeline.items()},
                "schedule {}",
                "Use one schedule on every rank of the pipeline.",
            )
        )
    for values, what, remedy in numbers:
        finding = _other_value(context, pipeline, values, what, remedy)
        if finding is not None:
            return finding
    return None


def _in_messages(context: Context, pipeline: _Pipeline) -> bool:
    """True when ranks of it wait for each other's sends and receives, for ever."""
    at = context.graph.at
    return any(
        rank in at and at[rank].is_point_to_point
        for rank in context.graph.stuck
        if rank in pipeline
    )


def _other_value(
    context: Context, pipeline: _Pipeline, values: Mapping[int, Hashable], what: str, remedy: str
) -> Finding | None:
    if len(set(values.values())) < 2:
        return None
    culprits = outvoted(values)
    sides = sorted(by_value(values), key=lambda side: len(side[0]))
    said = "; ".join(f"{name_ranks(ranks)}: {what.format(value)}" for ranks, value in sides)
    return Finding(
        Category.SCHEDULE_MISMATCH,
        culprits,
        f"the ranks of one pipeline do not agree ({said})",
        remedy,
        context.victims,
        _evidence(pipeline),
    )


def _evidence(pipeline: _Pipeline) -> tuple[str, ...]:
    return by_ranks(
        {
            rank: f"{part.schedule}, {_stages(part.stages)} of {part.num_stages}, "
            f"{part.micro_batches} micro-batches"
            for rank, part in pipeline.items()
        }
    )
