"""Texts for collectives and ranks in messages and evidence.

And what a collective is for: a unit of FSDP2, a tensor of DTensor, a micro-batch of a pipeline.
"""

from __future__ import annotations

import contextlib
import re
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from ddp_notebook.diagnosis.source_code.sources import Condition
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Activity,
    Case,
    Collective,
    Part,
    Phase,
    Place,
    RankReport,
    Ranks,
    Side,
    agree,
    at_place,
    name_ranks,
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


def quoted(record: Collective) -> str:
    """The same with the function between backticks."""
    function, space, rest = called(record).partition(" ")
    return f"`{function}`{space}{rest}"


def function_of(record: Collective) -> str:
    """The function that the user's code calls, between backticks."""
    return code(called(record).partition(" ")[0])


def code(text: str) -> str:
    """Mark text of the user's as code, without its comment.

    Backticks in it would end that, and make up commands.
    """
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # a line may be a part of more
        for token in tokenize.generate_tokens(iter([text]).__next__):
            if token.type == tokenize.COMMENT:
                text = text[: token.start[1]].rstrip()
    return f"`{text.rstrip(':').replace('`', chr(39))}`"


def moved(record: Collective, condition: Condition) -> str:
    """The call that a condition decides: the user's function that leads to `record`, or that."""
    for place, below in pairwise(record.path):
        if (place.file, place.function) == (condition.place.file, condition.place.function):
            is_called = re.search(rf"\b{re.escape(below.function)}\(", place.text)
            return code(below.function) if below.function and is_called else function_of(record)
    return function_of(record)


def short_name(record: Collective) -> str:
    """A call in a title, without its line: ``all_reduce ('loss') over dp``, ``send to rank 1``."""
    return function_of(record) + (f" ({record.label!r})" if record.label else "") + _with(record)


def _with(record: Collective) -> str:
    """The peer of a message, and the group if it has a name."""
    peer = ""
    if record.is_point_to_point:
        peer = f" {'to' if record.operation == 'send' else 'from'} "
        peer += f"rank {record.peer}" if record.peer is not None else "any rank"
    return peer + (f" over {code(record.called)}" if record.called else "")


def told_apart(one: Collective | None, other: Collective | None) -> tuple[str, str]:
    """Two calls in a title; of equal names each with its line, or with its tensor."""
    names = [short_name(record) if record is not None else "" for record in (one, other)]
    if one is None or other is None or names[0] != names[1]:
        return names[0], names[1]
    if one.place != other.place:
        return names[0] + _line(one.place, other.place), names[1] + _line(other.place, one.place)
    if one.dtype != other.dtype:
        return f"{names[0]} of {one.dtype}", f"{names[1]} of {other.dtype}"
    if one.shape != other.shape:
        return f"{names[0]} of {list(one.shape)}", f"{names[1]} of {list(other.shape)}"
    return names[0], names[1]


def _line(place: Place | None, other: Place | None) -> str:
    if place is None:
        return ""
    file = f"{place.file}, " if other is not None and place.file != other.file else ""
    return f" ({file}line {place.line})"


def tensor(record: Collective) -> str:
    """``float32 [4]``; empty for a call without a tensor."""
    return f"{record.dtype} {list(record.shape)}" if record.dtype else ""


def named(record: Collective) -> str:
    """A record with its line: ``barrier at train.py, line 31``, ``recv from rank 1 at ...``."""
    return quoted(record) + _with(record) + at_place(record.place)


def lacking(record: Collective) -> str:
    """Name what the rank of `record` waits for: the others' call of it, or its counterpart."""
    if not record.is_point_to_point:
        return short_name(record)
    counterpart = "recv" if record.operation == "send" else "send"
    return f"the {code(counterpart)} that rank {record.rank} is waiting for"


def numbered(record: Collective) -> str:
    """For evidence: its number in its group, what it is, and where it was called."""
    group = "" if record.group == DEFAULT_GROUP else f" of group {record.called or record.group}"
    what = f"{quoted(record)} {tensor(record)}".rstrip()
    return f"collective {record.slot}{group}: {what}{at_place(record.place)}"


def fact(ranks: Ranks, record: Collective) -> str:
    """A line of evidence: what these ranks called."""
    return f"{name_ranks(ranks)}, {numbered(record)}"


def side(ranks: Ranks, record: Collective | None) -> Side:
    """Show what these ranks called beside the other branch; None if they called nothing more."""
    if record is None:
        return Side(ranks, "nothing more")
    state = agree(ranks, *_STATES[record.phase])
    return Side(
        ranks,
        called(record),
        tensor(record),
        record.place,
        record.path,
        state,
        call_words(record),
    )


_STATES = {
    Phase.HELD: ("is paused", "are paused"),
    Phase.ISSUED: ("waits", "wait"),
    Phase.DONE: ("has called", "have called"),
    Phase.FAILED: ("has failed", "have failed"),
    Phase.REFUSED: ("arrived", "arrived"),
}
"""The state of a collective in words, of one rank and of several."""


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
    return f"{name_ranks(ranks)}: no collective" + (
        f" after collective {slot}" if slot >= 0 else ""
    )


def in_call(ranks: Ranks, call: str, reports: Mapping[int, RankReport]) -> str:
    """Say that ranks wait in a call; of ranks that do not wait, such as refused ones, call it."""
    waits = any(r in reports and reports[r].activity is Activity.WAITING for r in ranks)
    does = agree(ranks, *(("is waiting in", "are waiting in") if waits else ("calls", "call")))
    return f"{name_ranks(ranks)} {does} {call}"


def standing(
    ranks: Ranks,
    at: Mapping[int, Collective],
    reports: Mapping[int, RankReport],
    run: int,
    name: Callable[[Collective], str] = named,
) -> tuple[tuple[Ranks, str], ...]:
    """Say what ranks do, grouped by location: rank 0 "is waiting in `barrier` at a.py, line 3".

    `at` has the collectives in which ranks wait, `run` the number of the run that is judged.
    """
    places: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        # Of a rank that no report is of nothing is known, as of one that does not answer.
        record, report = at.get(rank), reports.get(rank, RankReport(rank, Activity.SILENT))
        line = f" at {report.path[-1]}" if report.path and name is named else ""
        match report.activity:
            case Activity.FAILED if record is not None:
                place = "gave up", "gave up", f"in {name(record)}"
            case _ if record is not None:
                place = "is waiting", "are waiting", f"in {name(record)}"
            case Activity.WAITING if report.awaits.key:
                key = f"for the store's key {report.awaits.key!r}{line}"
                place = "is waiting", "are waiting", key
            case Activity.WAITING:
                place = "is waiting", "are waiting", f"in {report.inside}"
            case Activity.BUSY if report.awaits.workers:
                place = "is waiting", "are waiting", f"for a batch{line}"
            case Activity.BUSY:
                place = "is", "are", f"busy{line}"
            case Activity.IDLE if report.run == run:
                place = "has", "have", "finished"
            case Activity.IDLE:
                place = "is", "are", "idle"
            case Activity.DEAD:
                place = "has", "have", "ended"
            case Activity.FAILED:
                place = "has", "have", "failed"
            case Activity.HELD:
                place = "is", "are", "paused"
            case Activity.SILENT:
                place = "does", "do", "not answer"
        places.setdefault(place, []).append(rank)
    return tuple(
        (tuple(those), f"{agree(those, one, many)} {where}")
        for (one, many, where), those in places.items()
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
