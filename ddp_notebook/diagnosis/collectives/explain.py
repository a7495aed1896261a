"""The finding of each kind of divergence: what happened, why, what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddp_notebook.diagnosis.collectives.alignment import (
    Difference,
    MissingBuckets,
    call_site,
    difference,
)
from ddp_notebook.diagnosis.collectives.describe import (
    again,
    called,
    fact,
    named,
    nothing_after,
    side,
)
from ddp_notebook.diagnosis.collectives.divergence import Branch, Classified, Kind
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import thread_words
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.source_code.names import Varies
from ddp_notebook.diagnosis.source_code.sources import Condition
from ddp_notebook.model import (
    PLACING,
    Category,
    Collective,
    Decision,
    Finding,
    Part,
    Phase,
    Place,
    Ranks,
    agree,
    at_place,
    name_ranks,
    sentence,
    verb,
)

UNEVEN_REMEDY = (
    "Give every rank the same number of batches (DistributedSampler, drop_last=True), or use Join."
)
SAME_NAMES = (
    "Loop over the same names on all ranks: sort the union of their keys (all_gather_object), "
    "with a zero for what a rank does not have."
)
SAME_CLOSURE = (
    "The optimizer calls its closure until its result is good enough: all_reduce the loss, too, "
    "and give the optimizers the same options on all ranks."
)
IN_ORDER = "in the same order on every rank: sort them by name."
TRY_AGAIN_TOGETHER = (
    "Leave the collective out of what is tried again, or let all ranks decide together whether to "
    "try again: all_reduce a flag."
)
USE_ALL = (
    "Use every parameter on every rank in every step, with a factor of zero where it has no part."
)
USE_OR_FIND = (
    "Use every parameter on every rank, or DistributedDataParallel(find_unused_parameters=True)."
)
TOGETHER = (
    "Let all ranks decide together whether to skip a step: all_reduce a flag, then branch on it."
)


def explain(context: Context, classified: Classified) -> Finding:
    """Make the finding of a divergence: the most exact story whose premise holds.

    The kind says how the two branches differ. Three facts tell more than that, and are asked first:
    that ranks left by an exit of their own, that both are in one call which places tensors, and
    that a rank called in one group what another group waits for.
    """
    full, short, kind = classified.full, classified.short, classified.kind
    finding = None
    if kind is Kind.ONE_BRANCH_ONLY and short.here is None:
        finding = left_by_exit(context, short.ranks, full.ranks, classified.record)
    finding = finding or _placed_otherwise(context, classified)
    if finding is not None:
        return finding
    match kind:
        case Kind.MISMATCH:
            return _mismatch(context, classified)
        case Kind.ONE_BRANCH_ONLY:
            return _in_another_group(context, classified) or _one_branch_only(context, classified)
        case Kind.PAST_THE_LOOP:
            return _past_the_loop(context, classified)
        case _:
            return _finding(context, classified, *_story(context, classified))


def _finding(
    context: Context,
    classified: Classified,
    category: Category,
    cause: str,
    remedy: str,
    facts: tuple[str, ...] = (),
    *,
    culprits: Ranks | None = None,
    waiting: Ranks | None = None,
) -> Finding:
    """Make a finding that shows what both branches have at the divergence.

    Threads have a say in it. Where several threads of a rank call collectives of the group, their
    order is chance. So the order is the mistake, that of most ranks too, and all of them are
    culprits, where the branches have the same calls in another order, where the main thread of one
    and another thread of the other come first, or where two of their calls were seen under way at
    the same time and the branches are at other lines. At one line such calls are mentioned. And of
    two equal branches neither is blamed if just one of them has lost a thread to an error
    (`_lost_a_thread`).
    """
    ranks = classified.culprits if culprits is None else culprits
    waiting = context.victims if waiting is None else waiting
    evidence = tuple(
        fact(branch.ranks, record)
        if record is not None
        else nothing_after(branch.ranks, branch.sequence.end - 1)
        for branch, record in classified.shown
    )
    lost = _lost_a_thread(context, classified, ranks)
    if lost is not None:
        who, error = lost
        cause = (
            f"{sentence(ranks, cause)}; {who}: {error}; which of the two is the cause is not known"
        )
        remedy = f"If the thread's error is the cause, correct it. If not: {remedy}"
        category, ranks, waiting = Category.UNDECIDED, (), context.victims
    several, at_once = threads_of(context, classified.record.group)
    shown = [record for _, record in classified.shown if record is not None]
    in_main = {record.call.thread == 0 for record in shown}
    order = (
        classified.kind is Kind.ANOTHER_ORDER
        or (bool(several) and len(in_main) > 1)
        or (bool(at_once) and len({call_site(record) for record in shown}) > 1)
    )
    if at_once or (several and order):
        cause = (
            f"{cause}; {verb(several, 'calls', 'call')} collectives of this group in more than one "
            "thread, and threads run in any order"
        )
        remedy, waiting = GROUP_OF_EACH_THREAD, context.victims
        category = Category.MISMATCHED_ORDER if order else category
        ranks = several if order else ranks
    return Finding(
        category,
        ranks,
        cause,
        remedy,
        waiting,
        (*evidence, *facts, *at_once),
        sides=tuple(side(branch.ranks, record) for branch, record in classified.shown),
        decides=_deciding(context, classified),
    )


def _deciding(context: Context, classified: Classified) -> Decision | None:
    """Return the line that sends the two branches apart, where the code shows it."""
    sources, record, there = context.sources, classified.record, classified.there
    full, short = classified.full.ranks, classified.short.ranks
    match classified.kind:
        case Kind.ONE_BRANCH_ONLY:
            return decision(sources.condition(record, there, full, short), full)
        case Kind.PAST_THE_LOOP if loop := sources.loop_around(record.path):
            return Decision(loop[-1], f"{verb(short, 'has', 'have')} left this loop")
        case Kind.MISMATCH if record.place is not None:
            made = sources.made_by_rank(record.place)
            return made and Decision(made[1], f"`{made[0]}` depends on the rank")
        case Kind.TRIED_AGAIN:
            return decision(sources.tries_again(record))
        case Kind.ANOTHER_WAY | Kind.EITHER_OR:
            ways = _parting(context, *(branch.here for branch in classified.sides))
            return decision(ways[0] if len({way.place for way in ways}) == 1 else None)
    return None


def decision(way: Condition | None, reached: Ranks = ()) -> Decision | None:
    """Show a test as the line that decides; `reached` are the ranks that came through it."""
    if way is None:
        return None
    if way.handles or not reached:
        by_rank = "depends on the rank" if way.on_rank else "here ranks may go different ways"
        return Decision(way.place, by_rank)
    enters = agree(reached, "enters", "enter")
    goes_on = agree(reached, "goes on past this", "go on past this")
    return Decision(way.place, f"only {name_ranks(reached)} {enters if way.wanted else goes_on}")


def _lost_a_thread(
    context: Context, classified: Classified, culprits: Ranks
) -> tuple[str, str] | None:
    """The one of two equal branches that lost a thread to an error, if it is not blamed; the error.

    A majority, or a test of the rank, is a better reason than a thread that may have nothing to do
    with it. Without those the branch whose threads alone raised may lack what they were to bring.
    """
    one, other = classified.sides
    if len(one.ranks) != len(other.ranks):
        return None
    errors = {
        report.rank: thread_words(error)
        for report in context.case.ranks
        for error in report.in_threads
        if error.path and not torch_errors.is_of_others(error.text)
    }
    losers = [branch for branch in (one, other) if errors.keys() >= set(branch.ranks)]
    if len(losers) != 1 or losers[0].ranks == culprits:
        return None
    test = context.sources.condition(
        classified.record, classified.there, classified.full.ranks, classified.short.ranks
    )
    if test is not None and test.on_rank:
        return None
    return losers[0].named, errors[losers[0].ranks[0]]


GROUP_OF_EACH_THREAD = (
    "Give each thread a group of its own (dist.new_group, called on every rank in one order), or "
    "call all collectives in one thread."
)


def threads_of(context: Context, group: str) -> tuple[Ranks, tuple[str, ...]]:
    """Return the ranks several threads of which call collectives of a group, and facts.

    There is a fact for each rank on which two collectives were under way at the same time: one
    thread cannot do that, for it waits for the end of the first.
    """
    several, facts = [], []
    for rank, records in sorted(context.collectives.of.items()):
        own = [r for r in records if r.group == group and not r.is_point_to_point]
        if len({record.call.thread for record in own}) > 1:
            several.append(rank)
            if (pair := _at_once(own)) is not None:
                sooner, later = pair
                facts.append(
                    f"rank {rank}: {called(later)} of collective {later.slot} began while "
                    f"{called(sooner)} of collective {sooner.slot} was under way"
                )
    return tuple(several), tuple(facts)


def _at_once(records: Iterable[Collective]) -> tuple[Collective, Collective] | None:
    """Return the first two collectives of a rank that two of its threads ran at the same time."""
    last: Collective | None = None
    # Only calls that their thread waited for: with async_op=True one thread has several under way,
    # and makes no mistake. A refused call was waited for as well: the guard asked the others about
    # it.
    waited = (r for r in records if r.call.waited or r.phase is Phase.REFUSED)
    for record in sorted(waited, key=lambda r: r.issued_ns):
        threads_differ = last is not None and last.call.thread != record.call.thread
        if last and threads_differ and (not last.over or record.issued_ns < last.done_ns):
            return last, record
        if record.phase is not Phase.REFUSED:  # what is refused is over at once
            last = record
    return None


def _placed_otherwise(context: Context, classified: Classified) -> Finding | None:
    """Ranks in one call that places tensors, which communicates otherwise on some of them."""
    # These functions send one collective for each tensor or placement, so another plan looks like a
    # collective that is left out in the middle of torch. The premise is that both branches have
    # come into the call by the same lines: else it is the call that one of them lacks.
    here = (classified.full.here, classified.short.here)
    record = next((each for each in here if each is not None and each.api in PLACING), None)
    if record is None or not all(
        any((r.api, r.path) == (record.api, record.path) for r in branch.sequence.records)
        for branch in classified.sides
    ):
        return None
    one, other = (branch.ranks for branch in classified.sides)
    ranks = classified.culprits
    if len(one) == len(other):  # either side may have another plan than was meant
        ranks = tuple(sorted({*one, *other}))
    return _finding(
        context,
        classified,
        Category.SHARDING_MISMATCH,
        f"{verb(ranks, 'places', 'place')} tensors in another way in {record.api}: "
        f"{_side_by_side(classified)}",
        f"Give {record.api} the same plan or placements on every rank.",
        culprits=ranks,
    )


def left_by_exit(
    context: Context, short: Ranks, ahead: Ranks, record: Collective
) -> Finding | None:
    """Ranks that have ended by a sys.exit() behind a test, while others are `ahead` in a call."""
    exits = []
    for rank in short:
        way = context.reports[rank].end.left_at
        test = context.sources.branch_of(way[-1]) if way else ""
        if not test:
            return None
        exits.append(f"{way[-1]} ({test})")
    return Finding(
        Category.EARLY_EXIT,
        short,
        f"{verb(short, 'has', 'have')} ended by sys.exit() at "
        f"{' and '.join(dict.fromkeys(exits))}, while {verb(ahead, 'is', 'are')} in "
        f"{named(record)}",
        "Let all ranks leave together: one that has nothing to do still takes part in every "
        "collective of its groups.",
        context.victims,
        (fact(ahead, record),),
        sides=(side(ahead, record), side(short, None)),
    )


def _in_another_group(context: Context, classified: Classified) -> Finding | None:
    """A rank that called in one group what its peers in another wait for it to call there."""
    # Proof needs three things: the same call is waited for in another group, by a rank that waits
    # for this one, and this rank is just about to make the call of that number there.
    record = classified.record
    issued = context.collectives.of[record.rank]
    # Its last call may be one too many: what the others wait for may come after it.
    if classified.culprits != classified.full.ranks or issued[-1].number == record.number:
        return None
    what = record.operation, record.dtype, record.shape, record.reduce_op
    for rank in context.graph.stuck:
        there = context.graph.at.get(rank)
        if there is None or record.rank not in context.graph.waits[rank]:
            continue
        same = what == (there.operation, there.dtype, there.shape, there.reduce_op)
        before = sum(e.group == there.group and e.number < record.number for e in issued)
        if record.group != there.group and same and before == there.slot:
            groups = context.collectives.groups
            own, other = (
                f"the group of {name_ranks(of)}" if (of := groups.get(group)) else f"group {group}"
                for group in (record.group, there.group)
            )
            mesh = _is_of_mesh(context, record.called)
            return _finding(
                context,
                classified,
                Category.MESH_MISMATCH if mesh else Category.SUBGROUP_MISUSE,
                f"{classified.full.named} calls {named(record)} in {own}, where rank {rank} waits "
                f"for it in {other}: {named(there)}",
                f"Use the group of the same {'mesh dimension' if mesh else 'kind'} on every rank.",
            )
    return None


def _story(context: Context, classified: Classified) -> tuple[Category, str, str, tuple[str, ...]]:
    """Return the mistake, what happened, what to change, and facts, of kinds told in a sentence."""
    record, sources = classified.record, context.sources
    full, short = classified.full, classified.short
    match classified.kind:
        case Kind.ANOTHER_ORDER:
            starts = ", ".join(
                f"{verb(b.ranks, 'begins', 'begin') if first else b.named} with {named(b.here)}"
                for first, b in zip((True, False), classified.sides, strict=True)
                if b.here is not None
            )
            order = "the same collectives in another order"
            own = classified.culprits == classified.sides[0].ranks
            cause = f"{starts}: {order}" if own else f"{order}: {starts}"
            remedy = "Call them in the same order on every rank: sort what you loop over."
            return Category.MISMATCHED_ORDER, cause, remedy, ()
        case Kind.SOME_BUCKETS:
            cause = (
                f"{short.named} did not reduce all buckets of gradients in {named(record)}: a "
                "parameter got no gradient there"
            )
            # A reduce_scatter is of fully_shard, which has no find_unused_parameters to offer.
            remedy = USE_ALL if "reduce_scatter" in record.operation else USE_OR_FIND
            return Category.UNUSED_PARAMS, cause, remedy, ()
        case Kind.NO_BUCKETS:
            # Records only say that nothing was reduced. So it looks under no_sync, without a
            # backward, and where a parameter got no gradient and there is one bucket. Where the
            # code is known, it must mention no_sync for that to be told; where it is not, all that
            # may be the case are named.
            category, why = Category.DIVERGENT_CONTROL_FLOW, "backward was not called"
            may_be_no_sync = not sources.knows(record) or sources.mentions(record, "no_sync")
            if classified.missing is MissingBuckets.ALL_AFTER_FORWARD and may_be_no_sync:
                category = Category.NO_SYNC_MISUSE
                why = "no_sync() is on there, or backward was not called"
            elif not sources.knows(record):
                why += ", no_sync() was on, or a parameter got no gradient"
            cause = (
                f"{short.named} reduced no gradients where {verb(full.ranks, 'is', 'are')} in "
                f"{named(record)} ({why})"
            )
            remedy = "Use no_sync() and backward() in the same iterations on all ranks."
            return category, cause, remedy, ()
        case Kind.EITHER_OR:
            cause = f"the ranks take different branches: {_side_by_side(classified)}"
            remedy = "Decide the branch from what all ranks share (all_reduce the decision first)."
            return Category.DIVERGENT_CONTROL_FLOW, cause, remedy, ()
        case Kind.ANOTHER_WAY:
            tests = _parting(context, *(branch.here for branch in classified.sides))
            why = f" ({tests[0].quoted})" if len(tests) == 1 else ""
            ways = _side_by_side(classified)
            cause = f"the ranks took different ways through the loop{why}: {ways}"
            return Category.DIVERGENT_CONTROL_FLOW, cause, TOGETHER, tuple(t.line for t in tests)
        case Kind.OTHER_OBJECTS:
            assert classified.there is not None
            line = sources.call_of_both(record, classified.there)
            facts = (f"{line}: {line.text}",) if line is not None else ()
            cause = (
                f"{_side_by_side(classified)}: one line calls both{at_place(line)}, on other "
                "objects: the ranks loop over other ones there, or in another order"
            )
            remedy = f"Loop over the same objects {IN_ORDER}"
            return Category.MISMATCHED_ORDER, cause, remedy, facts
        case Kind.TRIED_AGAIN:
            retry = sources.tries_again(record)
            assert retry is not None
            cause = (
                f"{verb(classified.culprits, 'has', 'have')} called {named(record)} once more than "
                f"{short.named}: the code calls it again after an error ({retry.quoted})"
            )
            return Category.DIVERGENT_CONTROL_FLOW, cause, TRY_AGAIN_TOGETHER, (retry.line,)
        case _ if _goes_over_others(context, classified):
            cause = (
                f"{verb(short.ranks, 'is', 'are')} at {_size(short.here)} where "
                f"{verb(full.ranks, 'is', 'are')} at {_size(full.here)}, in {named(record)}: they "
                "loop over other tensors there, or in another order"
            )
            remedy = f"Loop over the same tensors {IN_ORDER}"
            return Category.MISMATCHED_ORDER, cause, remedy, ()
        case _:  # one of them called it more often
            one, other, more = full, short, "more"
            if classified.culprits != full.ranks:
                one, other, more = short, full, "less"
            count = len(classified.records)
            times = f"once {more}" if count == 1 else f"{count} collectives {more}"
            cause = f"{one.named} called {named(record)} {times} than {other.named}"
            return Category.DIVERGENT_CONTROL_FLOW, cause, TOGETHER, ()


# -- one collective with contents that do not match --------------------------------------

MISMATCHES = {
    Difference.SHAPE: (
        Category.SHAPE_MISMATCH,
        "Give it one shape on all ranks: exchange the sizes, pad to the largest, cut afterwards.",
    ),
    Difference.DTYPE: (
        Category.DTYPE_MISMATCH,
        "Convert the tensor to one dtype on all ranks before this line.",
    ),
    Difference.OPERATION: (
        Category.OP_MISMATCH,
        "Call the same collective on all ranks at this point.",
    ),
    Difference.REDUCE_OP: (Category.OP_MISMATCH, "Use the same op= on all ranks."),
    Difference.ROOT: (
        Category.OP_MISMATCH,
        "Name the same rank as src= or dst= on all ranks.",
    ),
    Difference.GROUP: (
        Category.MESH_MISMATCH,
        "Use the group of the same mesh dimension on every rank.",
    ),
    Difference.LABEL: (
        Category.MISMATCHED_ORDER,
        "Use the same names in the same order on every rank.",
    ),
}


def _mismatch(context: Context, classified: Classified) -> Finding:
    own, other, what = classified.record, classified.there, classified.difference
    assert other is not None and what is not None
    ranks, others, culprits = classified.full.ranks, classified.short.ranks, classified.culprits
    first, second = (
        f"{verb(those, 'has', 'have')} {value_of(record, against, what)}"
        for those, record, against in sorted(
            ((ranks, own, other), (others, other, own)), key=lambda each: each[0] != culprits
        )
    )
    name = called(own) if what is not Difference.LABEL else own.operation
    if what is Difference.OPERATION:
        name = f"collective {own.slot}"
    at = at_place(own.place)
    if own.place and other.place not in (None, own.place):
        at += f" and {other.place}"
    # With two labels the tensors themselves may have been combined: then no rank waits.
    met = difference(own, other) is Difference.LABEL
    category, remedy = MISMATCHES[what]
    if what is Difference.GROUP and not _is_of_mesh(context, own.called):
        category, remedy = Category.SUBGROUP_MISUSE, "Give it the same group on every rank."
    return _finding(
        context,
        classified,
        category,
        f"{first}, {second}, in {name}{at}",
        remedy,
        waiting=() if met else None,
    )


def _is_of_mesh(context: Context, called: str) -> bool:
    made = (group for e in context.case.ranks for group in e.groups_made)
    return any(group.of_mesh and group.called == called for group in made)


def value_of(record: Collective, other: Collective, what: Difference) -> str:
    """The value of the property in which a record differs from `other`."""
    match what:
        case Difference.OPERATION:
            return called(record)
        case Difference.DTYPE:
            return record.dtype
        case Difference.SHAPE if record.shape == other.shape:
            return f"{record.numel} elements in {record.tensors} tensors"
        case Difference.SHAPE:
            return f"shape {list(record.shape)}"
        case Difference.REDUCE_OP:
            return f"op={record.reduce_op}"
        case Difference.ROOT:
            return f"root {record.root}"
        case Difference.LABEL:
            return repr(record.label)
        case Difference.GROUP:
            return f"group {record.called}"


# -- one branch only ---------------------------------------------------------------------


def _one_branch_only(context: Context, classified: Classified) -> Finding:
    """A collective that one branch calls and the other never does, whichever is right."""
    record, full, short = classified.record, classified.full, classified.short
    condition = context.sources.condition(record, classified.there, full.ranks, short.ranks)
    why, facts = (f" ({condition.quoted})", (condition.line,)) if condition else ("", ())
    category = Category.CONDITIONAL_COLLECTIVE
    culprits, how = _who_is_wrong(context, classified, condition)
    remedy = f"Call {called(record)} on every rank of its group{how}"
    if record.operation == "barrier":
        # A smaller group whose members are just these ranks: they may have meant that.
        groups = context.collectives.groups.items()
        own = [g for g, members in groups if g != record.group and members == full.ranks]
        if own:
            category, culprits = Category.BARRIER_MISUSE, full.ranks
            remedy = f"Only members of group {own[0]} come here: give them dist.barrier(group=...)."
        elif culprits == short.ranks and not condition:
            category = Category.BARRIER_MISUSE
            remedy = f"Let {short.named} reach the barrier too."
    elif record.part is Part.FORWARD and culprits == full.ranks:
        remedy = (
            "Call the model on every rank; or call the module inside, model.module(x), which "
            "sends no buffers to other ranks, under torch.no_grad()."
        )
    return _finding(
        context,
        classified,
        category,
        _only_some(context, classified, why, lacking=culprits == short.ranks),
        remedy,
        facts,
        culprits=culprits,
    )


def _who_is_wrong(
    context: Context, classified: Classified, condition: Condition | None
) -> tuple[Ranks, str]:
    """The culprits of a call that one branch lacks, and how it is to be called on every rank."""
    # Who is wrong: the minority. Without one, the test that names who leaves (`if rank == 1:
    # return`) blames those; any other test on the way blames who came through it, since most such
    # calls are one too many, under `if rank == 0:`. Without a test one branch may as well have
    # left on a way that the code does not show, such as an exception that was caught: both are
    # named, and the user sees both lines.
    full, short, record = classified.full, classified.short, classified.record
    if len(full.ranks) == len(short.ranks):
        if condition and condition.names_leavers:
            return short.ranks, f": {short.named} must not leave before it."
        untested = condition is None or condition.handles
        in_a_pass = classified.there and record.part
        if untested and context.sources.knows(record) and not in_a_pass:
            both = tuple(sorted((*full.ranks, *short.ranks)))
            return both, ", or on none: which side is wrong is not known."
    conditional = condition is not None and not condition.handles
    return (
        classified.culprits,
        ": move it out of the condition." if conditional else ", or on none.",
    )


def _only_some(context: Context, classified: Classified, why: str, *, lacking: bool) -> str:
    """A sentence: which ranks call it alone, and where the others are; culprits come first."""
    full, short, there = classified.full, classified.short, classified.there
    record = named(classified.record)
    where = f"{verb(short.ranks, 'is', 'are')} in {named(there)}" if there else ""
    where = where or context.standing(short.ranks)
    if lacking:
        does = verb(short.ranks, "does", "do")
        do = verb(full.ranks, "does", "do")
        return f"{does} not call {record} as {do}{why}; {again(where, short.ranks)}"
    call = agree(full.ranks, "calls", "call")
    return f"{full.named} alone {call} {record}{why}; {where}"


def _side_by_side(classified: Classified) -> str:
    """``rank 0 is in barrier at train.py, line 31; ranks 1 and 2 in all_reduce at ...``."""
    first, second = classified.sides
    if first.here and second.here and named(first.here) == named(second.here):
        shapes = [f"{verb(e.ranks, 'has', 'have')} {_size(e.here)}" for e in classified.sides]
        return f"{shapes[0]}, {shapes[1]}, in {named(first.here)}"
    start = f"in {named(first.here)}" if first.here else "ended"
    start = f"{verb(first.ranks, *(('is', 'are') if first.here else ('has', 'have')))} {start}"
    if second.here is None:
        return f"{start}; {verb(second.ranks, 'has', 'have')} ended"
    return f"{start}; {second.named} in {named(second.here)}"


def _size(record: Collective | None) -> str:
    return f"{record.dtype} {list(record.shape)}" if record is not None else "nothing"


# -- loops -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """The facts about the turn of a loop in which one branch calls what the other does not.

    Neither branch says by itself whether the shorter one had fewer turns, or as many and passed
    over the call in one of them. Fewer turns is the story only where nothing below is known.
    """

    more_names: bool
    """True for a loop over names where the shorter branch lacks this name."""
    way: Condition | None
    """The test by which a turn can go without the call."""
    begun: bool
    """Both have begun this turn: what they called before stands in it."""
    skipped: tuple[str, ...]
    """Counters: the shorter branch had all its batches, and skipped a backward."""
    counted: Place | None
    """The line of the loop where that counts its turns: then batches are none of its matter."""
    of_optimizer: bool
    """How often it is called is up to an optimizer, which calls a closure."""

    @property
    def is_left_out(self) -> bool:
        """True where the shorter branch went another way through the turn."""
        return bool(self.way or self.begun or self.skipped)

    @property
    def category(self) -> Category:
        """The mistake."""
        other_way = self.more_names or self.is_left_out
        return Category.DIVERGENT_CONTROL_FLOW if other_way else Category.UNEVEN_INPUTS

    @property
    def remedy(self) -> str:
        """The advice to the user."""
        if self.more_names:
            return SAME_NAMES
        if self.of_optimizer:
            return SAME_CLOSURE
        if self.counted and not self.is_left_out:
            at = self.counted
            return f"Give the loop the same bounds on every rank: `{at.text}` ({at})."
        return TOGETHER if self.is_left_out else UNEVEN_REMEDY

    @property
    def because(self) -> str:
        """`` (if loss > 3:)``; empty where no test is known."""
        return f" ({self.way.quoted})" if self.way else ""

    @property
    def facts(self) -> tuple[str, ...]:
        """Lines of evidence."""
        return (*((self.way.line,) if self.way else ()), *self.skipped)


def turn_of(
    context: Context, full: Branch, short: Branch, record: Collective, way: Condition | None = None
) -> Turn:
    """Collect the facts about the turn in which `full` calls `record`; `way` if known already."""
    sources, site = context.sources, call_site(record)
    more, less = (branch.sequence.labels.get(site, frozenset()) for branch in (full, short))
    closure = None if way else sources.by_optimizer(record)
    way = way or closure or sources.way_around(record)
    # If what both called last stands in the same turn, the shorter branch did enter this turn and
    # left it on the way. Then it had as many batches as the others, and to give it more changes
    # nothing.
    begun = full.last is not None and sources.in_one_turn(full.last, record)
    if begun and way is None:
        way = sources.condition(record, full.last)
    return Turn(
        bool(less) and less < more and record.label in more - less,
        way,
        bool(begun),
        _skipped_backward(context, short, full, record),
        sources.counted_loop(record),
        closure is not None,
    )


def _past_the_loop(context: Context, classified: Classified) -> Finding:
    past, inside, beyond = classified.short, classified.full, classified.there
    turn = turn_of(context, inside, past, classified.record)
    where = f", in {named(beyond)}" if beyond else ""
    are_in = f"{verb(inside.ranks, 'is', 'are')} in {named(classified.record)}"
    have = agree(past.ranks, "has", "have")
    left = f" and {have} left out the rest of the last turn{turn.because}" if turn.begun else ""
    cause = f"{verb(past.ranks, 'is', 'are')} past the loop{left}{where}, while {are_in}"
    if turn.more_names:
        cause = (
            f"{are_in}, a name that {verb(past.ranks, 'does', 'do')} not have in the loop; they "
            f"are past it{where}"
        )
    return _finding(context, classified, turn.category, cause, turn.remedy, turn.facts)


def _skipped_backward(
    context: Context, short: Branch, full: Branch, record: Collective
) -> tuple[str, ...]:
    """That `short` ran as many forwards as `full`, and fewer backwards: it had all its batches."""
    if record.part is not Part.BACKWARD:
        return ()
    mine, theirs = (
        {replica.key: replica for replica in report.parts.replicas}
        if (report := context.reports.get(branch.ranks[0]))
        else {}
        for branch in (short, full)
    )
    for key in mine.keys() & theirs.keys():
        one, other = mine[key], theirs[key]
        if 0 < one.forwards >= other.forwards and one.backwards < other.backwards:
            return (
                f"{short.named}: {one.forwards} forwards, {one.backwards} backwards; "
                f"{full.named}: {other.forwards} forwards, {other.backwards} backwards",
            )
    return ()


def _parting(context: Context, own: Collective | None, other: Collective | None) -> list[Condition]:
    """The conditions that may have sent ranks to one of these and not to the other."""
    if own is not None and other is not None and call_site(own) == call_site(other):
        way = context.sources.way_around(own)
        return [way] if way is not None else []
    return [
        condition
        for one, there in ((own, other), (other, own))
        if one is not None
        and (condition := context.sources.condition(one, there)) is not None
        and condition.varies >= Varies.LOCAL
    ]


def _goes_over_others(context: Context, classified: Classified) -> bool:
    """True where one line in a loop brings them all, and no test in the loop passes one over.

    Then the ranks loop over other things, or over the same in another order.
    """
    record, there = classified.record, classified.short.here
    if there is None or {call_site(other) for other in classified.records} != {call_site(there)}:
        return False
    sources = context.sources
    # Where dtype and shape are equal nothing shows that it was another tensor: then the loop went
    # round once more, which is told as that. A name, or a test in the loop that may pass one over:
    # they explain why one is lacking, and another order is only what is left.
    in_loop = sources.knows(record) and sources.in_a_loop(record)
    alike = (record.dtype, record.shape) == (there.dtype, there.shape)
    return bool(in_loop) and not (
        alike or record.label or sources.condition(record) or sources.way_around(record)
    )
