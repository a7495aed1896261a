"""DDP's construction on all ranks: models compared, what failed, and its steps for showing.

The culprits are the ranks that differ from most; where no set of equal ranks is the largest, the
ranks that differ from rank 0, whose values DDP would send.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.majority import vote
from ddp_notebook.diagnosis.training.replicas import named
from ddp_notebook.model import (
    Finding,
    Ranks,
    StepRow,
    by_value,
    counted,
    cut,
    exit_text,
    format_bytes,
    format_ranks,
    name_ranks,
)
from ddp_notebook.model.ddp import (
    Bucket,
    BucketPlan,
    Fingerprint,
    RankFailure,
    Reduction,
    Synced,
    TensorInfo,
    WrapStage,
)

_NAME = attrgetter("name")
_MOST_NAMES, _MOST_LINES = 6, 40
_LONGEST_ERROR = 44
"""So many characters of an error have room in a title."""
_ASKED = re.compile(r"allocate (\d+ bytes|[\d.]+ [KMGT]iB)")
"""How much was asked for: torch's CPU allocator tells bytes, that of CUDA tells MiB or GiB."""


# -- parameters and buffers ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first place where two fingerprints differ: of what, and what each of them has."""

    place: tuple[int, int, int]
    """Parameters before buffers, their number before their kind, then the index."""
    what: str
    """The tensor; empty for the model."""
    theirs: str
    ours: str
    note: str = ""


def compare(fingerprints: Mapping[int, Fingerprint], name: str = "model") -> tuple[Finding, ...]:
    """Nothing when all ranks have the same; else one finding that names the ranks in the minority.

    Its title is the first difference; the evidence says for each set of such ranks how much
    differs. `name` is the variable, for what to type.
    """
    # The first place where any rank differs from most: what comes behind it often follows from it,
    # as one layer more moves all names that are after it.
    votes = vote(fingerprints) if fingerprints else None
    if votes is None or not votes.others:
        return ()
    ours, right, culprits = votes.value, votes.majority, votes.minority
    differences = {ranks: _first_difference(fingerprints[ranks[0]], ours) for ranks in votes.others}
    first = min(differences.values(), key=lambda each: each.place)
    same_place = {ranks: d for ranks, d in differences.items() if d.place == first.place}
    return (
        catalogue.finding(
            "param-mismatch.model",
            culprits,
            evidence=tuple(
                f"{name_ranks(ranks)}: {_how_much(fingerprints[ranks[0]], ours)}"
                for ranks in votes.others
            ),
            what=f"{first.what} of `{name}`" if first.what else f"`{name}`",
            theirs=tuple(f"{d.theirs} on {name_ranks(ranks)}" for ranks, d in same_place.items()),
            ours=first.ours,
            right=right,
            note=first.note,
            name=name,
            set_of_ranks=format_ranks(culprits),
        ),
    )


def _first_difference(theirs: Fingerprint, ours: Fingerprint) -> _Difference:
    for number, (kind, their, our) in enumerate(_sections(theirs, ours)):
        if len(their) != len(our):
            parts = counted(len(their), kind), counted(len(our), kind)
            note = _missing_and_extra(their, our, named)
            return _Difference((number, 0, 0), "", *parts, note)
        reordered = Counter(map(_NAME, their)) == Counter(map(_NAME, our))
        for index, (one, other) in enumerate(zip(their, our, strict=True)):
            place = number, 1, index
            if one.name != other.name:
                note = "the same names in another order" if reordered else ""
                names = f"the name `{one.name}`", f"the name `{other.name}`"
                return _Difference(place, f"{kind} {index}", *names, note)
            for a, b in zip(_in_words(one), _in_words(other), strict=True):
                if a != b:
                    return _Difference(place, f"`{other.name}`", a, b)
    raise ValueError("these fingerprints do not differ")


def _sections(
    theirs: Fingerprint, ours: Fingerprint
) -> Iterator[tuple[str, Sequence[TensorInfo], Sequence[TensorInfo]]]:
    yield "parameter", theirs.parameters, ours.parameters
    yield "buffer", theirs.buffers, ours.buffers


def _in_words(tensor: TensorInfo) -> tuple[str, ...]:
    return (
        f"shape {tensor.shape}",
        f"dtype {tensor.dtype}",
        f"requires_grad={tensor.requires_grad}",
        f"device {tensor.device}",
        f"stride {tensor.stride}",
    )


def _how_much(theirs: Fingerprint, ours: Fingerprint) -> str:
    parts = []
    for kind, their, our in _sections(theirs, ours):
        if len(their) != len(our):
            names = _missing_and_extra(their, our, lambda names: (some(names),))
            parts.append(f"{counted(len(their), kind)}, not {len(our)} ({names})")
        elif other := [b.name for a, b in zip(their, our, strict=True) if a != b]:
            parts.append(f"{len(other)} of {len(our)} {kind}s differ: {some(other)}")
    return "; ".join(parts)


def _missing_and_extra(
    theirs: Sequence[TensorInfo],
    ours: Sequence[TensorInfo],
    shown: Callable[[list[str]], tuple[str, ...]],
) -> str:
    their, our = list(map(_NAME, theirs)), list(map(_NAME, ours))
    parts = {
        "missing": [name for name in our if name not in their],
        "extra": [name for name in their if name not in our],
    }
    return "; ".join(f"{part}: {', '.join(shown(names))}" for part, names in parts.items() if names)


# -- what must agree later on -----------------------------------------------------------


def diverged(hashes: Mapping[int, tuple[str, ...]], name: str = "model") -> tuple[Finding, ...]:
    """Nothing when all ranks hold the same values after the broadcast, as they must.

    `hashes` are those of each rank's parameters and buffers.
    """
    votes = vote(hashes)
    others, right = votes.minority, votes.majority
    if not others:
        return ()
    return (catalogue.finding("undecided.after-broadcast", others, right=right, name=name),)


def other_buckets(plans: Mapping[int, BucketPlan], name: str = "model") -> tuple[Finding, ...]:
    """Nothing when all ranks make the same buckets, as they must where fingerprints agree."""
    votes = vote(plans)
    others, right = votes.minority, votes.majority
    if not others:
        return ()
    return (catalogue.finding("param-mismatch.buckets", others, right=right, name=name),)


# -- failures --------------------------------------------------------------------------


def failures(
    stage: WrapStage,
    failed: Mapping[int, RankFailure],
    dead: Mapping[int, int],
    waiting: Ranks,
    name: str = "model",
) -> tuple[Finding, ...]:
    """Return what stopped a stage: a rank that died before one out of memory before other errors.

    `dead` maps ranks to exit codes. `waiting` are ranks that have not left the stage.
    """
    # One that is gone, or has no memory, makes the others fail too, with errors that name only a
    # lost connection: so these come first, and the other ranks count as waiting.
    memory = {rank: failure for rank, failure in failed.items() if failure.kind == "memory"}
    victims = tuple(sorted({*waiting, *failed} - memory.keys()))
    if dead:
        everyone_else = tuple(sorted({*waiting, *failed} - dead.keys()))
        return tuple(
            catalogue.finding(
                "rank-died.wrapping",
                ranks,
                waiting=everyone_else,
                stage=stage,
                exit=exit_text(code),
                set_of_ranks=format_ranks(ranks),
                name=name,
            )
            for ranks, code in by_value(dead)
        )
    if memory:
        return tuple(_out_of_memory(stage, memory, victims, name))
    findings = []
    for ranks, failure in by_value(failed):
        no_backend = "no backend type associated with device type" in failure.text.lower()
        error = cut(failure.text, _LONGEST_ERROR)
        findings.append(
            catalogue.finding(
                "backend-device-mismatch.wrapping"
                if no_backend
                else "exception-on-one-rank.wrapping",
                ranks,
                waiting=waiting,
                evidence=(failure.text,) if error != failure.text else (),
                stage=stage,
                error=error,
                restarted=format_ranks(ranks) if waiting else "",
                name=name,
            )
        )
    return tuple(findings) or (
        catalogue.finding(
            "undecided.wrapping",
            (),
            waiting=waiting,
            stage=stage,
            set_of_ranks=format_ranks(waiting),
            name=name,
        ),
    )


def _out_of_memory(
    stage: WrapStage, memory: Mapping[int, RankFailure], waiting: Ranks, name: str
) -> Iterable[Finding]:
    # The others are in a collective that this rank has not joined: the group is out of step, and
    # only a new one helps.
    stuck = bool(waiting or stage.collective)
    for ranks, failure in by_value(memory):
        asked = _ASKED.search(failure.text)
        size = asked[1] if asked else ""
        yield catalogue.finding(
            "oom-on-one-rank.wrapping-stuck" if stuck else "oom-on-one-rank.wrapping",
            ranks,
            waiting=waiting,
            evidence=(f"{name_ranks(ranks)}: {failure.text}",),
            stage=stage,
            size=format_bytes(int(size.split()[0])) if size.endswith("bytes") else size,
            set_of_ranks=format_ranks(ranks),
            name=name,
        )


def some(names: Sequence[str]) -> str:
    """Names in a sentence; of many, the first and the last and how many there are."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 2])}, …, {names[-1]} ({len(names)} in all)"


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
            text = failed[rank].text
            lost = "connection closed", "connection reset", "broken pipe"
            if dead and any(words in text.lower() for words in lost):  # its error follows from that
                text = f"lost its connection: {name_ranks(dead)} died"
            return before(stage), "failed", text
        if rank in waiting:
            return before(stage), "waiting", f"in stage {stage}"
        return before(stage), "paused", "has passed it"

    needed = tuple(sorted({*dead, *failed}))
    return rows({rank: state(rank) for rank in ranks}, waits_for=needed)


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
    changes = {}
    first_buffer = len(model.parameters)
    for rank, mine in synced.items():
        parameters = sum(place < first_buffer for place in mine.changed)
        buffers = len(mine.changed) - parameters
        parts = [f"{parameters} of {first_buffer} parameters"] if parameters else []
        parts += [f"{buffers} of {len(model.buffers)} buffers"] if buffers else []
        had = f"other values in {' and '.join(parts)}" if parts else "the values of rank 0 already"
        changes[rank] = "sent its values" if rank == 0 else f"had {had}"
    return changes


# -- buckets ---------------------------------------------------------------------------


def plan_lines(plan: BucketPlan) -> tuple[str, ...]:
    """The buckets before any gradient was seen."""
    first, others = plan.limits_bytes
    limits = f"a bucket is full at {format_bytes(others)}"
    limits += f", the first one at {format_bytes(first)}" if first != others else ""
    if plan.later is None:
        return (f"Buckets ({limits}; DDP keeps them):", *bucket_lines(plan.first))
    return (
        "In the first step (the order of gradients is not known yet):",
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
    """Return what DDP learnt from the steps so far: the order of gradients, and the buckets."""
    first = known[min(known)]
    if not first.order:
        lacks = "step" if not first.steps else "backward"
        return (
            f"{name} has not run a {lacks} yet. DDP rebuilds its buckets when the second step "
            "begins, in the order in which gradients became ready in the first.",
            f"Run a cell with forward, backward and step, then again: %ddp_wrap {name} --buckets",
        )
    order = [*first.order]
    if len(order) > _MOST_LINES:
        left_out = len(order) - _MOST_LINES + 1
        order[_MOST_LINES - 2 : -1] = [f"… {left_out} more …"]
    lines = [f"Gradients became ready in this order ({_orders(known)}):"]
    lines += [f"  {place:<4}  {each}" for place, each in enumerate(order, 1)]
    lines += [
        f"No gradient for {some(idle)} on {name_ranks(ranks)}."
        for ranks, idle in by_value({rank: reduction.idle for rank, reduction in known.items()})
        if idle
    ]
    if first.buckets is None:
        return (
            *lines,
            "This version of torch does not show which buckets DDP makes of this order.",
        )
    title = "DDP will build these buckets from it when the next step begins:"
    if first.rebuilt:
        title = "The buckets that DDP built from rank 0's first order when the second step began:"
    elif first.keeps:
        title = "With find_unused_parameters DDP keeps the buckets that it began with:"
    return (*lines, title, *bucket_lines(first.buckets))


def _orders(known: Mapping[int, Reduction]) -> str:
    votes = vote({rank: reduction.order for rank, reduction in known.items()})
    right = votes.majority
    if not votes.others:
        return f"{name_ranks(right)} alike" if len(right) > 1 else name_ranks(right)
    others = tuple(sorted(rank for rank in known if known[rank].order != known[min(known)].order))
    return (
        f"on rank {min(known)}, whose order all ranks use; a different one on {name_ranks(others)}"
    )
