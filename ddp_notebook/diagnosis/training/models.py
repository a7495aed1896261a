"""Models compared across ranks, and what failed while DDP was constructed.

The ranks to blame are those that differ from most; where no set of equal ranks is the largest,
those that differ from rank 0, whose values DDP would send.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddp_notebook.diagnosis.majority import vote
from ddp_notebook.model import (
    Category,
    Finding,
    Ranks,
    by_value,
    counted,
    format_bytes,
    format_ranks,
    name_ranks,
    them,
    verb,
)
from ddp_notebook.model.ddp import (
    BucketPlan,
    Fingerprint,
    RankFailure,
    TensorInfo,
    WrapStage,
)
from ddp_notebook.state.descriptions import exit_text

_MOST_NAMES = 6
_ASKED = re.compile(r"allocate (\d+ bytes|[\d.]+ [KMGT]iB)")
"""How much was asked for: torch's CPU allocator tells bytes, that of CUDA tells MiB or GiB."""
_WRONG_DEVICE = "no backend type associated with device type"


# -- parameters and buffers ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first place where two fingerprints part: which, and what is there in each."""

    place: tuple[int, int, int]
    """Parameters before buffers, their number before their kind, then the index."""
    where: str
    theirs: str
    ours: str
    note: str = ""


def compare(fingerprints: Mapping[int, Fingerprint], name: str = "model") -> tuple[Finding, ...]:
    """Nothing when all ranks have the same; else one finding that names the ranks in the minority.

    Its cause is the first difference in words; the evidence says for each set of such ranks
    how much differs. `name` is the variable, for what to type.
    """
    votes = vote(fingerprints) if fingerprints else None
    if votes is None or not votes.others:
        return ()
    ours, right, culprits = votes.value, votes.majority, votes.minority
    differences = {ranks: _first_difference(fingerprints[ranks[0]], ours) for ranks in votes.others}
    first = min(differences.values(), key=lambda each: each.place)
    same_place = {ranks: d for ranks, d in differences.items() if d.place == first.place}
    theirs = ", ".join(
        f"{verb(ranks, 'has', 'have')} {d.theirs}" for ranks, d in same_place.items()
    )
    where = f"{first.where}: " if first.where else ""
    return (
        Finding(
            category=Category.PARAM_MISMATCH,
            ranks=culprits,
            cause=f"{where}{theirs}, {verb(right, 'has', 'have')} {first.ours}{first.note}",
            remedy=(
                f"Make {name} on {name_ranks(culprits)} as on {name_ranks(right)} "
                f"(%%ddp --ranks {format_ranks(culprits)}), then again: %ddp_wrap {name}"
            ),
            evidence=tuple(
                f"{name_ranks(ranks)}: {_how_much(fingerprints[ranks[0]], ours)}"
                for ranks in votes.others
            ),
        ),
    )


def _first_difference(theirs: Fingerprint, ours: Fingerprint) -> _Difference:
    sections = (
        ("parameter", theirs.parameters, ours.parameters),
        ("buffer", theirs.buffers, ours.buffers),
    )
    for number, (kind, their_tensors, our_tensors) in enumerate(sections):
        found = _first_in(number, kind, their_tensors, our_tensors)
        if found is not None:
            return found
    raise ValueError("these fingerprints do not differ")


def _first_in(
    section: int, kind: str, theirs: Sequence[TensorInfo], ours: Sequence[TensorInfo]
) -> _Difference | None:
    their_names, our_names = [t.name for t in theirs], [t.name for t in ours]
    if len(theirs) != len(ours):
        note = _missing_and_extra(their_names, our_names)
        parts = [counted(len(each), kind) for each in (theirs, ours)]
        return _Difference((section, 0, 0), "", parts[0], parts[1], note and f" ({note})")
    reordered = sorted(their_names) == sorted(our_names)
    for index, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        place = (section, 1, index)
        if their.name != our.name:
            note = " (the same names in another order)" if reordered else ""
            return _Difference(place, f"{kind} {index}", their.name, our.name, note)
        for a, b in zip(_in_words(their), _in_words(our), strict=True):
            if a != b:
                return _Difference(place, f"{kind} {index}, {our.name}", a, b)
    return None


def _in_words(tensor: TensorInfo) -> tuple[str, ...]:
    return (
        str(tensor.shape),
        tensor.dtype,
        f"requires_grad={tensor.requires_grad}",
        f"device {tensor.device}",
        f"stride {tensor.stride}",
    )


def _how_much(theirs: Fingerprint, ours: Fingerprint) -> str:
    parts = []
    for kind, their, our in (
        ("parameters", theirs.parameters, ours.parameters),
        ("buffers", theirs.buffers, ours.buffers),
    ):
        if len(their) != len(our):
            names = _missing_and_extra([t.name for t in their], [t.name for t in our])
            parts.append(f"{len(their)} {kind} instead of {len(our)}{names and f' ({names})'}")
            continue
        other = [b.name for a, b in zip(their, our, strict=True) if a != b]
        if other:
            parts.append(f"{len(other)} of {len(our)} {kind} differ: {some(other)}")
    return "; ".join(parts)


def _missing_and_extra(theirs: Sequence[str], ours: Sequence[str]) -> str:
    missing = [name for name in ours if name not in theirs]
    extra = [name for name in theirs if name not in ours]
    parts = [f"{some(missing)} missing"] if missing else []
    return ", ".join([*parts, *([f"{some(extra)} too much"] if extra else [])])


# -- what must agree later on -----------------------------------------------------------


def diverged(hashes: Mapping[int, tuple[str, ...]], name: str = "model") -> tuple[Finding, ...]:
    """Nothing when all ranks hold the same values after the broadcast, as they must.

    `hashes` are those of each rank's parameters and buffers.
    """
    votes = vote(hashes)
    others, right = votes.minority, votes.majority
    if not others:
        return ()
    cause = (
        f"{verb(others, 'has', 'have')} other values than {name_ranks(right)} after the broadcast"
    )
    remedy = f"Does other code change {name} at the same time? Then again: %ddp_wrap {name}"
    return (Finding(Category.UNDECIDED, others, cause, remedy),)


def other_buckets(plans: Mapping[int, BucketPlan], name: str = "model") -> tuple[Finding, ...]:
    """Nothing when all ranks make the same buckets, as they must where fingerprints agree."""
    votes = vote(plans)
    others, right = votes.minority, votes.majority
    if not others:
        return ()
    cause = (
        f"{verb(others, 'has', 'have')} other buckets than {name_ranks(right)}: "
        "embeddings with sparse gradients on some ranks alone make such"
    )
    remedy = f"Make {name} with the same `sparse=` on all ranks, then again: %ddp_wrap {name}"
    return (Finding(Category.PARAM_MISMATCH, others, cause, remedy),)


# -- failures --------------------------------------------------------------------------


def failures(
    stage: WrapStage,
    failed: Mapping[int, RankFailure],
    dead: Mapping[int, int],
    waiting: Ranks,
    name: str = "model",
) -> tuple[Finding, ...]:
    """What stopped a stage: a rank that died before one out of memory before other errors.

    `dead` maps ranks to exit codes. `waiting` are ranks that have not left the stage.
    """
    memory = {rank: failure for rank, failure in failed.items() if failure.kind == "memory"}
    victims = tuple(sorted({*waiting, *failed} - memory.keys()))
    if dead:
        everyone_else = tuple(sorted({*waiting, *failed} - dead.keys()))
        return tuple(_died(stage, dead, everyone_else, name))
    if memory:
        return tuple(_out_of_memory(stage, memory, victims, name))
    if failed:
        return tuple(_raised(stage, failed, waiting, name))
    cause = f"{name_ranks(waiting)} did not come out of stage {stage} of %ddp_wrap"
    restart = _restart(waiting)
    remedy = f"{restart}, then again: %ddp_wrap {name}"
    return (Finding(Category.UNDECIDED, (), cause, remedy, waiting=waiting, commands=(restart,)),)


def _restart(ranks: Ranks) -> str:
    return f"%ddp_restart --ranks {format_ranks(ranks)}"


def _died(
    stage: WrapStage, dead: Mapping[int, int], waiting: Ranks, name: str
) -> Iterable[Finding]:
    for ranks, code in by_value(dead):
        yield Finding(
            Category.RANK_DIED,
            ranks,
            f"died in stage {stage} of %ddp_wrap, {exit_text(code)}",
            f"{_restart(ranks)}, make {name} there, then again: %ddp_wrap {name}",
            waiting=waiting,
            commands=(_restart(ranks),),
        )


def _out_of_memory(
    stage: WrapStage, memory: Mapping[int, RankFailure], waiting: Ranks, name: str
) -> Iterable[Finding]:
    for ranks, failure in by_value(memory):
        restart = f"{_restart(ranks)}, make {name} there"
        remedy = f"Free memory there, or {restart}; then again: %ddp_wrap {name}"
        if waiting or stage.collective:
            # The others are in a collective that this rank has not joined: the group is out of
            # step, and only a new one helps.
            remedy = f"Give {them(ranks)} more memory, {restart}, then "
            remedy += f"again: %ddp_wrap {name}. %ddp_restart says which rank it cannot free"
        asked = _ASKED.search(failure.text)
        more = f": {_as_size(asked[1])} more were not to be had" if asked else ""
        yield Finding(
            Category.OOM_ON_ONE_RANK,
            ranks,
            f"out of memory in stage {stage} of %ddp_wrap{more}",
            remedy,
            waiting=waiting,
            evidence=(f"{name_ranks(ranks)}: {failure.text}",),
            commands=(_restart(ranks),),
        )


def _as_size(asked: str) -> str:
    return format_bytes(int(asked.split()[0])) if asked.endswith("bytes") else asked


def _raised(
    stage: WrapStage, failed: Mapping[int, RankFailure], waiting: Ranks, name: str
) -> Iterable[Finding]:
    for ranks, failure in by_value(failed):
        category = Category.EXCEPTION_ON_ONE_RANK
        remedy = f"Correct it in a cell, then again: %ddp_wrap {name}"
        if _WRONG_DEVICE in failure.text.lower():
            category = Category.BACKEND_DEVICE_MISMATCH
            remedy = f"Move it to the ranks' device: {name}.to(device), then %ddp_wrap {name}"
        commands = (_restart(ranks),) if waiting else ()
        if waiting:
            remedy = f"{_restart(ranks)}, which frees the others. {remedy}"
        cause = f"failed in stage {stage} of %ddp_wrap: {failure.text}"
        yield Finding(category, ranks, cause, remedy, waiting=waiting, commands=commands)


def some(names: Sequence[str]) -> str:
    """Names in a sentence; of many, the first and the last and how many there are."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 2])}, …, {names[-1]} ({len(names)} in all)"
