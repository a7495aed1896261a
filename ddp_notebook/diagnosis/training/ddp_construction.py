"""The steps of DDP's constructor for showing: rows, broadcast, buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_notebook.diagnosis.majority import vote
from ddp_notebook.diagnosis.training.models import some
from ddp_notebook.model import Finding, Ranks, StepRow, by_value, counted, format_bytes, name_ranks
from ddp_notebook.model.ddp import (
    Bucket,
    BucketPlan,
    Fingerprint,
    RankFailure,
    Reduction,
    Synced,
    WrapStage,
)

_CONNECTION_LOST = ("connection closed", "connection reset", "broken pipe")

# -- rows ------------------------------------------------------------------------------


def place(stage: WrapStage) -> str:
    """A stage in a sentence: ``stage 2/4, broadcast``."""
    return f"stage {stage.number}/{len(WrapStage)}, {stage.value}"


def before(stage: WrapStage | None) -> str:
    """The stage that is behind ranks which come to `stage` next (None: all are behind them)."""
    number = stage.number if stage is not None else len(WrapStage) + 1
    return tuple(WrapStage)[number - 2].value if number > 1 else ""


def rows(states: Mapping[int, tuple[str, str, str]], waits_for: Ranks = ()) -> tuple[StepRow, ...]:
    """A row for each set of ranks with the same (passed, state, text)."""
    return tuple(
        StepRow(ranks, passed, state, text, waits_for if state == "waiting" else ())
        for ranks, (passed, state, text) in by_value(states)
    )


def stopped_rows(
    stage: WrapStage,
    ranks: Ranks,
    failed: Mapping[int, RankFailure],
    dead: Ranks,
    waiting: Ranks,
) -> tuple[StepRow, ...]:
    """How ranks stand when `stage` was not passed."""

    def state(rank: int) -> tuple[str, str, str]:
        if rank in dead:
            return before(stage), "dead", "its process is gone"
        if rank in failed:
            return before(stage), "failed", _why(failed[rank].text, dead)
        if rank in waiting:
            return before(stage), "waiting", f"in stage {stage}"
        return before(stage), "paused", "has done its part"

    needed = tuple(sorted({*dead, *failed}))
    return rows({rank: state(rank) for rank in ranks}, waits_for=needed)


def _why(text: str, dead: Ranks) -> str:
    if dead and any(words in text.lower() for words in _CONNECTION_LOST):
        return f"lost its connection: {name_ranks(dead)} died"
    return text


def blamed_rows(
    findings: Sequence[Finding], stage: WrapStage, ranks: Ranks, others: str
) -> tuple[StepRow, ...]:
    """How ranks stand when what they gave in `stage` does not agree; `others`: of the rest."""
    culprits = {rank for finding in findings for rank in finding.ranks}
    state = {
        True: (before(stage), "failed", findings[0].cause),
        False: (before(stage), "paused", others),
    }
    return rows({rank: state[rank in culprits] for rank in ranks})


def why_not(kind: str, type_name: str, problem: str, name: str) -> str:
    """Why what a rank has by that name cannot be wrapped; empty when it can.

    `kind` is absent, other, module or ddp; `problem` is that of a module.
    """
    return {
        "absent": "there is no such variable",
        "other": f"it is of type {type_name}, not a torch.nn.Module",
        "ddp": f"it is a DistributedDataParallel already, of {name}.module",
    }.get(kind, problem)


def size(model: Fingerprint) -> str:
    """How many tensors a model has: ``6 parameters, 3 buffers``."""
    parameters = counted(len(model.parameters), "parameter")
    return f"{parameters}, {counted(len(model.buffers), 'buffer')}"


# -- the broadcast ---------------------------------------------------------------------


def what_changed(synced: Mapping[int, Synced], model: Fingerprint) -> dict[int, str]:
    """For each rank, what the broadcast from rank 0 did to its values."""
    return {
        rank: "sent its values" if rank == 0 else f"had {_other_values(mine, model)}"
        for rank, mine in synced.items()
    }


def _other_values(mine: Synced, model: Fingerprint) -> str:
    first_buffer = len(model.parameters)
    parameters = sum(place < first_buffer for place in mine.changed)
    buffers = len(mine.changed) - parameters
    parts = [f"{parameters} of {first_buffer} parameters"] if parameters else []
    parts += [f"{buffers} of {len(model.buffers)} buffers"] if buffers else []
    return f"other values in {' and '.join(parts)}" if parts else "the values of rank 0 already"


# -- buckets ---------------------------------------------------------------------------


def plan_lines(plan: BucketPlan) -> tuple[str, ...]:
    """The buckets before any gradient was seen."""
    if plan.first is None:
        return ("This torch does not tell which buckets it will make.",)
    first, others = plan.limits_bytes
    limits = f"a bucket is closed when it has {format_bytes(others)}"
    limits += f", the first one when it has {format_bytes(first)}" if first != others else ""
    if plan.later is None:
        return (f"Buckets ({limits}; DDP keeps them):", *bucket_lines(plan.first))
    return (
        "In the first step, as the order of gradients is not known yet:",
        *bucket_lines(plan.first),
        f"From the second step on, if gradients come in reverse order ({limits}):",
        *bucket_lines(plan.later),
    )


def bucket_lines(buckets: Sequence[Bucket]) -> tuple[str, ...]:
    """A table: a line for each bucket, the one that is sent first on top."""
    sizes = [format_bytes(bucket.size_bytes) for bucket in buckets]
    width = max(4, *map(len, sizes)) if sizes else 4
    return (
        f"  bucket  {'size':<{width}}  parameters",
        *(
            f"  {number:<6}  {size:<{width}}  {some(bucket.parameters)}"
            for number, (bucket, size) in enumerate(zip(buckets, sizes, strict=True), 1)
        ),
    )


def reduction_lines(known: Mapping[int, Reduction], name: str = "model") -> tuple[str, ...]:
    """What DDP made of the steps so far: the order of gradients, and the buckets it gave."""
    first = known[min(known)]
    if not first.order:
        before = "No step was made" if not first.steps else "No backward was run"
        return (
            f"{before} with {name} yet. DDP makes its buckets anew when the second step begins, "
            "in the order in which the gradients of the first became ready.",
            f"Run a cell with forward, backward and step, then again: %ddp_wrap {name} --buckets",
        )
    lines = [f"Gradients became ready in this order ({_orders(known)}):"]
    lines += [f"  {place:<4}  {each}" for place, each in enumerate(_cut(first.order), 1)]
    lines += [
        f"No gradient came for {some(idle)} on {name_ranks(ranks)}."
        for ranks, idle in by_value({rank: reduction.idle for rank, reduction in known.items()})
        if idle
    ]
    return (*lines, *_made_of_it(first))


def _made_of_it(known: Reduction) -> tuple[str, ...]:
    if known.buckets is None:
        return ("This torch does not tell which buckets DDP makes of it.",)
    title = "DDP will make these buckets of it when the next step begins:"
    if known.rebuilt:
        title = "The buckets that DDP made of rank 0's first order when the second step began:"
    elif known.keeps:
        title = "With find_unused_parameters DDP keeps the buckets that it began with:"
    return (title, *bucket_lines(known.buckets))


def _orders(known: Mapping[int, Reduction]) -> str:
    votes = vote({rank: reduction.order for rank, reduction in known.items()})
    right = votes.majority
    if not votes.others:
        return f"{name_ranks(right)} alike" if len(right) > 1 else name_ranks(right)
    others = tuple(sorted(rank for rank in known if known[rank].order != known[min(known)].order))
    return f"on rank {min(known)}, whose order all ranks take; another on {name_ranks(others)}"


def _cut(names: Sequence[str], most: int = 40) -> list[str]:
    if len(names) <= most:
        return list(names)
    return [*names[: most - 2], f"… {len(names) - most + 1} more …", names[-1]]
