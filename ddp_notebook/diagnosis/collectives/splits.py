"""The rule for ranks that send each other other amounts in an all_to_all than expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import CallSite, call_site
from ddp_notebook.diagnosis.collectives.describe import side
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, minority
from ddp_notebook.model import Category, Collective, Finding, Ranks, Splits

_REMEDY = (
    "Exchange the counts with all_to_all_single after everything that changes them (capacity, "
    "dropped tokens), and use these very counts as splits on both sides."
)


@dataclass(frozen=True)
class _Disagreement:
    """What `sender` sends to `receiver`, and what that expects; both ranks of the session."""

    sender: int
    receiver: int
    sends: int
    expects: int


def split_mismatch(context: Context) -> Iterator[Finding]:
    """Two ranks of one all_to_all that do not agree how much goes from one to the other.

    Only at one line: what ranks send each other at two lines was not meant to meet, and one of them
    may be in its next forward already.
    """
    of_calls: dict[tuple[str, int, CallSite | None], dict[int, Splits]] = {}
    records: dict[int, Collective | None] = {}
    for report in context.case.ranks:
        splits = report.splits
        if splits is not None:
            record = records[report.rank] = _record(context, report.rank, splits)
            site = call_site(record) if record is not None else None
            of_calls.setdefault((splits.group, splits.slot, site), {})[report.rank] = splits
    for (group, _, _), of_ranks in of_calls.items():
        members = wait_graph.members(context.case, group)
        there = _in_one_unit(of_ranks)
        wrong = _disagreements(there, members)
        if wrong:
            record = next((records[rank] for rank in there if records[rank]), None)
            yield _finding(context, wrong, there, members, record)
            return


def _in_one_unit(there: Mapping[int, Splits]) -> Mapping[int, Splits]:
    """In rows where those are as long on all ranks; in elements where they are not."""
    if len({width for splits in there.values() for width in splits.widths}) == 1:
        return there
    return {
        rank: replace(
            splits,
            sends=tuple(rows * splits.widths[0] for rows in splits.sends),
            receives=tuple(rows * splits.widths[1] for rows in splits.receives),
            announced=(),
            widths=(1, 1),
        )
        for rank, splits in there.items()
    }


def _disagreements(there: Mapping[int, Splits], members: Ranks) -> list[_Disagreement]:
    index = {rank: at for at, rank in enumerate(members)}
    whole = {
        rank: splits
        for rank, splits in there.items()
        if rank in index and len(splits.sends) == len(splits.receives) == len(members)
    }
    return [
        _Disagreement(sender, receiver, sends, expects)
        for sender, mine in whole.items()
        for receiver, theirs in whole.items()
        if (sends := mine.sends[index[receiver]]) != (expects := theirs.receives[index[sender]])
    ]


def _record(context: Context, rank: int, splits: Splits) -> Collective | None:
    records = reversed(context.collectives.of.get(rank, ()))
    at_slot = (r for r in records if (r.group, r.slot) == (splits.group, splits.slot))
    return next((record for record in at_slot if "all_to_all" in record.operation), None)


def _finding(
    context: Context,
    wrong: list[_Disagreement],
    there: Mapping[int, Splits],
    members: Ranks,
    record: Collective | None,
) -> Finding:
    culprits, why = _whose(wrong, there, members)
    first = next(
        (disagreement for disagreement in wrong if disagreement.sender in culprits), wrong[0]
    )
    place = f" at {record.place}" if record is not None and record.place else ""
    brought = {
        rank: f"sends {list(splits.sends)}, expects {list(splits.receives)}"
        + (f"; announced {list(splits.announced)} before" if splits.announced else "")
        for rank, splits in there.items()
    }
    return Finding(
        Category.SPLIT_MISMATCH,
        culprits,
        f"rank {first.sender} sends {first.sends} to rank {first.receiver}, which expects "
        f"{first.expects}, in all_to_all{place}{why}",
        _REMEDY,
        context.victims,
        by_ranks(brought),
        sides=(side(tuple(there), record),) if record is not None else (),
    )


def _whose(
    wrong: list[_Disagreement], there: Mapping[int, Splits], members: Ranks
) -> tuple[Ranks, str]:
    """The ranks whose numbers are wrong, and the reason; all ranks if unknown."""
    culprits = {
        rank
        for disagreement in wrong
        if (rank := _against_announced(disagreement, there, members)) is not None
    }
    if culprits:
        return tuple(sorted(culprits)), ", and announced another number before"
    if _never_exchanged(there, members):
        return tuple(sorted(there)), ": every rank expects what it sends, counts of its own"
    pairs = [{disagreement.sender, disagreement.receiver} for disagreement in wrong]
    common = set.intersection(*pairs)
    if len(common) == 1:
        return tuple(common), ""
    if len(there) > 2 and len(there) == len(members):
        sends = minority({rank: splits.sends for rank, splits in there.items()})
        receives = minority({rank: splits.receives for rank, splits in there.items()})
        few = {rank for ranks in (sends, receives) if 2 * len(ranks) < len(there) for rank in ranks}
        unlike = few & {rank for pair in pairs for rank in pair}
        if len(unlike) == 1:
            return tuple(unlike), ", and its splits are unlike the other ranks'"
    return tuple(sorted(there)), ""


def _never_exchanged(there: Mapping[int, Splits], members: Ranks) -> bool:
    """Every rank takes its own counts for what it gets, and all have other counts.

    That two of them agree is then chance. No counts were exchanged before.
    """
    own = all(e.sends == e.receives and not e.announced for e in there.values())
    lists = {splits.sends for splits in there.values()}
    uneven = all(len(set(sends)) > 1 for sends in lists)
    return own and uneven and len(there) == len(members) == len(lists)


def _against_announced(
    each: _Disagreement, there: Mapping[int, Splits], members: Ranks
) -> int | None:
    """The rank that does not keep to what was announced, in an exchange of counts, before."""
    sender, receiver = there[each.sender].announced, there[each.receiver].announced
    at, by = members.index(each.receiver), members.index(each.sender)
    # What goes out was announced by the sender; what comes back, by whom it comes back to.
    for counts, index in ((sender, at), (receiver, by)):
        if len(counts) == len(members):
            if counts[index] == each.expects != each.sends:
                return each.sender
            if counts[index] == each.sends != each.expects:
                return each.receiver
    return None
