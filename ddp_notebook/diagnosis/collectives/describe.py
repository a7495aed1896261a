"""Texts for collectives and ranks in messages and evidence.

And what a collective is for: a unit of FSDP2, a tensor of DTensor, a micro-batch of a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ddp_notebook.model import (
    DEFAULT_GROUP,
    Activity,
    Case,
    Collective,
    Part,
    Phase,
    RankReport,
    Ranks,
    Side,
    agree,
    at_place,
    name_ranks,
    verb,
)


def called(record: Collective) -> str:
    """The function that the user's code calls, and torch's operation if it has another name."""
    name = record.operation
    if record.api and record.api.rpartition(".")[2] != record.operation:
        api = record.api.removesuffix(".__init__")
        name = f"{api} ({record.operation})"
    if record.purpose:
        return f"{name} of {record.purpose}"
    # The text of a variable beside the call: often, but not always, the name of what is reduced.
    return f"{name} ({record.label!r})" if record.label else name


def named(record: Collective) -> str:
    """A record with its line: ``barrier at train.py, line 31``, ``all_reduce over dp at ...``."""
    peer = ""
    if record.is_point_to_point:
        peer = f" {'to' if record.operation == 'send' else 'from'} "
        peer += f"rank {record.peer}" if record.peer is not None else "any rank"
    over = f" over {record.called}" if record.called else ""
    return f"{called(record)}{peer}{over}" + at_place(record.place)


def lacking(record: Collective) -> str:
    """Name what the rank of `record` waits for: the others' call of it, or its counterpart."""
    if not record.is_point_to_point:
        return named(record)
    counterpart = "recv" if record.operation == "send" else "send"
    return f"the {counterpart} that rank {record.rank} waits for in {named(record)}"


def numbered(record: Collective) -> str:
    """For evidence: its number in its group, what it is, and where it was called."""
    what = f" {record.dtype} {list(record.shape)}" if record.dtype else ""
    group = "" if record.group == DEFAULT_GROUP else f" of group {record.called or record.group}"
    return f"collective {record.slot}{group}: {called(record)}{what}" + (at_place(record.place))


def fact(ranks: Ranks, record: Collective) -> str:
    """A line of evidence: what these ranks called."""
    return f"{name_ranks(ranks)}, {numbered(record)}"


def side(ranks: Ranks, record: Collective | None) -> Side:
    """Show what these ranks called beside the other branch; None if they called nothing more."""
    if record is None:
        return Side(ranks, "nothing more")
    tensor = f"{record.dtype} {list(record.shape)}" if record.dtype else ""
    state = agree(ranks, *_STATES[record.phase])
    return Side(ranks, called(record), tensor, record.place, record.path, state, call_words(record))


_STATES = {
    Phase.HELD: ("is paused", "are paused"),
    Phase.ISSUED: ("waits", "wait"),
    Phase.DONE: ("has called", "have called"),
    Phase.FAILED: ("has failed", "have failed"),
    Phase.REFUSED: ("was rejected", "were rejected"),
}
"""What one rank, or several, did with a collective."""


def call_words(record: Collective) -> str:
    """``, gradient all_reduce``, ``, collective 9``: what its line does not show by itself."""
    text = record.place.text if record.place is not None else ""
    words = []
    if record.part in (Part.BACKWARD, Part.FORWARD):
        words.append(f"{_REDUCED[record.part]} {record.operation}")
    elif not any(name and name in text for name in (record.api, record.operation)):
        words.append(called(record))
    if record.issued_ns and not record.is_point_to_point:  # a stack alone has no number
        words.append(f"collective {record.slot}")
    return "".join(f", {word}" for word in words)


_REDUCED = {Part.BACKWARD: "gradient", Part.FORWARD: "buffer"}


def nothing_after(ranks: Ranks, slot: int) -> str:
    """A line of evidence: `slot` has the last collective that these ranks called."""
    last = f"nothing after collective {slot}" if slot >= 0 else "no collective"
    return f"{name_ranks(ranks)}: {last}"


def again(text: str, ranks: Ranks) -> str:
    """A sentence about ranks that were just named: it begins with a pronoun."""
    return re.sub(f"^{name_ranks(ranks)}(?= )", agree(ranks, "it", "they"), text)


def standing(
    ranks: Ranks, at: Mapping[int, Collective], reports: Mapping[int, RankReport], run: int
) -> str:
    """Where ranks are, grouped by location: ``rank 0 is in barrier at a.py, line 3``.

    `at` has the collectives in which ranks wait, `run` the number of the run that is judged.
    """
    places: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        record, report = at.get(rank), reports[rank]
        line = f" at {report.path[-1]}" if report.path else ""
        match report.activity:
            case _ if record is not None:
                place = "is", "are", f"in {named(record)}"
            case Activity.WAITING if report.awaits.key:
                place = "waits", "wait", f"for the store's key {report.awaits.key!r}{line}"
            case Activity.WAITING:
                place = "waits", "wait", f"in {report.inside}"
            case Activity.BUSY if report.awaits.workers:
                place = "waits", "wait", f"for a batch{line}"
            case Activity.BUSY:
                place = "is", "are", f"busy{line}"
            case Activity.IDLE if report.run == run:
                place = "has", "have", "finished"
            case Activity.IDLE:
                place = "runs", "run", "nothing"
            case Activity.DEAD:
                place = "has", "have", "ended"
            case Activity.FAILED:
                place = "has", "have", "failed"
            case Activity.HELD:
                place = "is", "are", "paused"
            case Activity.SILENT:
                place = "does", "do", "not answer"
        places.setdefault(place, []).append(rank)
    return "; ".join(
        f"{verb(tuple(those), one, many)} {where}" for (one, many, where), those in places.items()
    )


def with_purposes(case: Case) -> Case:
    """`case`, in which what each rank waits in says what for, where that is known."""
    reports = {
        e.rank: e
        for e in case.ranks
        if e.waits_for is not None and (e.parts.purpose or e.parts.pipelines)
    }
    of = dict(case.collectives.of)
    for rank, report in reports.items():
        records = list(of.get(rank, ()))
        for index, record in enumerate(records):
            if record.number == report.waits_for:
                purpose = report.parts.purpose or _message(record, report, reports)
                records[index] = replace(record, purpose=purpose or record.purpose)
        of[rank] = tuple(records)
    return replace(case, collectives=replace(case.collectives, of=of)) if reports else case


def _message(record: Collective, report: RankReport, others: Mapping[int, RankReport]) -> str:
    """``micro-batch 3's activations of stage 0 (1F1B)``; empty outside of a pipeline."""
    working = [p for p in report.parts.pipelines if (p.forward, p.backward) != (None, None)]
    peer = others.get(record.peer) if working and record.peer is not None else None
    parts = peer.parts.pipelines if peer is not None else ()
    theirs = next((part for part in parts if part.members == working[0].members), None)
    if theirs is None or len(working[0].stages) != 1 or len(theirs.stages) != 1:
        return ""
    mine = working[0]
    own, other = mine.stages[0], theirs.stages[0]
    received = record.operation == "recv"
    sender, receiver = (other, own) if received else (own, other)
    what, index = ("activations", mine.forward)
    if sender > receiver:
        what, index = "gradients", mine.backward
    # Which one a send is of is not known: schedules wait for it later.
    which = f"micro-batch {index}'s " if received and index is not None else ""
    return f"{which}{what} of stage {sender} ({mine.schedule})"
