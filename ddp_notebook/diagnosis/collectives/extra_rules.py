"""Rules about a collective that one side of a fault issues and the other does not."""

from __future__ import annotations

from itertools import takewhile

from ddp_notebook.diagnosis.collectives import loop_rules
from ddp_notebook.diagnosis.collectives.alignment import site
from ddp_notebook.diagnosis.collectives.buckets import Lack, lack
from ddp_notebook.diagnosis.collectives.divergence import Parting, Side
from ddp_notebook.diagnosis.context import Picture, called, fact, named, nothing_after
from ddp_notebook.model import Category, Collective, Finding, Ranks


def one_sided(parting: Parting) -> Finding:
    """One side has collectives that the other lacks, and both go on, or are at their end."""
    fault = parting.fault
    full, short = parting.mine, parting.theirs
    if not fault.own:
        full, short = short, full
    records = fault.own or fault.other
    found = buckets(parting, full, short, records)
    if found is not None:
        return found
    new = next((record for record in records if not short.knows(record)), None)
    if new is not None:
        culprits = parting.culprits(full)
        return only_here(parting.picture, culprits, full, short, new, short.here)
    return loop_rules.once_more(parting, full, short, records)


def only_here(
    picture: Picture,
    culprits: Ranks,
    extra: Side,
    lacking: Side,
    record: Collective,
    there: Collective | None,
) -> Finding:
    """A collective that one side issues and the other never does, whoever is right."""
    condition = picture.sources.condition(record)
    others = picture.standing(lacking.ranks)
    if there is not None:
        others = f"{lacking.named} in {named(there)}"
    category = Category.CONDITIONAL_COLLECTIVE
    remedy = f"Call {called(record)} on every rank of its group: move it out of the condition."
    subgroup = _is_a_group(picture, extra.ranks, record)
    if record.operation == "barrier" and subgroup:
        category = Category.BARRIER_MISUSE
        remedy = f"Only members of group {subgroup} come here: dist.barrier(group=...) for them."
        culprits = extra.ranks
    elif record.operation == "barrier" and culprits == lacking.ranks and not condition:
        category = Category.BARRIER_MISUSE
        remedy = f"Let {lacking.named} reach the barrier too."
    end = nothing_after(lacking.named, lacking.track.end - 1)
    facts = [fact(extra.ranks, record), fact(lacking.ranks, there) if there else end]
    if condition:
        facts.append(f"{condition.place}: {condition.place.text}")
    return Finding(
        category,
        culprits,
        f"only {extra.named} {extra.verb('calls', 'call')} {named(record)}"
        f"{f' ({condition.place.text})' if condition else ''}; {others}",
        remedy,
        picture.victims,
        tuple(facts),
    )


def _is_a_group(picture: Picture, ranks: Ranks, record: Collective) -> str:
    """The name of the smaller group whose members are just these ranks, or ""."""
    groups = picture.case.collectives.groups
    return next((g for g, those in groups.items() if g != record.group and those == ranks), "")


# -- DDP's buckets -----------------------------------------------------------------------


def buckets(
    parting: Parting,
    full: Side,
    short: Side,
    records: tuple[Collective, ...],
    passed: bool = True,
) -> Finding | None:
    """A backward pass of DDP in which one side reduced less; None where it is another matter.

    `records` are what the other side has there. `passed` is false of a side that may still be
    before the pass: then only one that has begun is of interest.
    """
    record = records[0]
    what = begun(full, short, records)
    if what is None or (what is not Lack.SOME_BUCKETS and not passed):
        return None
    if parting.deviation.sure and short.ranks != parting.deviation.ranks:
        return None  # where most ranks reduce less, it is the others who do too much
    if what is Lack.SOME_BUCKETS:
        return some_buckets(parting.picture, full, short, record)
    if what is Lack.ALL and short.knows(record):
        return None  # a step left out, or one less: loops are told apart elsewhere
    category, why = Category.DIVERGENT_CONTROL_FLOW, "backward was not called"
    sources = parting.picture.sources
    if not sources.knows(record):
        why += ", no_sync() was on, or a parameter got no gradient"
    if what is Lack.ALL_AFTER_FORWARD and (
        not sources.knows(record) or sources.mentions(record, "no_sync")
    ):
        category, why = Category.NO_SYNC_MISUSE, "no_sync() is on there, or backward was not called"
    return parting.finding(
        category,
        short.ranks,
        f"{short.named} reduced no gradients where {full.named} {full.verb('is', 'are')} in "
        f"{named(record)} ({why})",
        "Let no_sync() and backward() be the same on all ranks in every iteration.",
    )


def begun(full: Side, short: Side, records: tuple[Collective, ...] = ()) -> Lack | None:
    """What the short side lacks of a backward pass, from its end or the fault on.

    `records` are those that the full side has more, all to its end by default.
    """
    ahead = records or full.track.records[full.at - full.track.first :]
    # DDP issues the buckets of a pass without waiting for each: all of them may be there.
    count = sum(1 for _ in takewhile(lambda each: site(each) == site(ahead[0]), ahead))
    return lack(full.track, full.at, short.track, short.at, count)


def some_buckets(picture: Picture, full: Side, short: Side, record: Collective) -> Finding:
    """A backward pass that reduced some buckets, and not the rest."""
    here = short.here
    end = nothing_after(short.named, short.track.end - 1)
    return Finding(
        Category.UNUSED_PARAMS,
        short.ranks,
        f"{short.named} did not reduce all buckets of gradients in {named(record)}: "
        "a parameter got no gradient there",
        "Use every parameter on every rank, or "
        "DistributedDataParallel(find_unused_parameters=True).",
        picture.victims,
        (fact(full.ranks, record), fact(short.ranks, here) if here else end),
    )
