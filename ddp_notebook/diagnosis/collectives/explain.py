"""The finding of each kind of divergence: what happened, why, what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives.alignment import (
    Difference,
    MissingBuckets,
    call_site,
    difference,
)
from ddp_notebook.diagnosis.collectives.describe import (
    code,
    fact,
    function_of,
    in_call,
    moved,
    nothing_after,
    quoted,
    short_name,
    side,
    tensor,
    told_apart,
)
from ddp_notebook.diagnosis.collectives.divergence import Branch, Classified, Kind
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import thread_words
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.source_code.names import Varies
from ddp_notebook.diagnosis.source_code.sources import Condition, Sources
from ddp_notebook.model import (
    PLACING,
    Collective,
    Decision,
    Finding,
    Part,
    Phase,
    Place,
    Ranks,
    agree,
    format_ranks,
    name_ranks,
    verb,
)


def explain(context: Context, classified: Classified) -> Finding:
    """Make the finding of a divergence: the most exact story whose premise holds.

    The kind says how the two branches differ. Three facts tell more than that, and are asked first:
    that ranks left by an exit of their own, that both are in one call which places tensors, and
    that a rank called in one group what another group waits for.
    """
    full, short, kind = classified.full, classified.short, classified.kind
    if kind is Kind.ONE_BRANCH_ONLY and short.here is None:
        by_exit = left_by_exit(context, short.ranks, full.ranks, classified.record)
        if by_exit is not None:
            return by_exit
    finding = _placed_otherwise(context, classified)
    if finding is None and kind is Kind.ONE_BRANCH_ONLY:
        finding = _in_another_group(context, classified)
    return _shown(context, classified, finding or _story(context, classified))


def _facts(context: Context, classified: Classified) -> dict[str, Any]:
    """Return the facts that the words of most kinds name: both branches, and what they call.

    `call` is what `full` calls and `there` what `short` calls instead; `first` and `second` are the
    sides in the order of the divergence, with what each has there.
    """
    full, short = classified.full, classified.short
    call, there = told_apart(classified.record, classified.there)
    one, other = classified.sides
    first_call, second_call = told_apart(one.here, other.here)
    elsewhere = in_call(short.ranks, there, context.reports)
    if not there:
        elsewhere = context.briefly(short.ranks)
    return {
        "full": full.ranks,
        "short": short.ranks,
        "call": call,
        "there": there,
        "inside": in_call(full.ranks, call, context.reports),
        "elsewhere": elsewhere,
        "and_then": elsewhere.removeprefix(f"{short.named} "),
        "first": one.ranks,
        "second": other.ranks,
        "first_call": first_call,
        "second_call": second_call,
    }


def _shown(context: Context, classified: Classified, finding: Finding) -> Finding:
    """Add to a finding what both branches have at the divergence.

    Threads have a say in it. Where several threads of a rank call collectives of the group, their
    order is chance. So the order is the mistake, that of most ranks too, and all of them are
    culprits, where the branches have the same calls in another order, where the main thread of one
    and another thread of the other come first, or where two of their calls were seen under way at
    the same time and the branches are at other lines. At one line such calls are mentioned. And of
    two equal branches neither is blamed if just one of them has lost a thread to an error
    (`_lost_a_thread`).
    """
    evidence = tuple(
        fact(branch.ranks, record)
        if record is not None
        else nothing_after(branch.ranks, branch.sequence.end - 1)
        for branch, record in classified.shown
    )
    evidence += finding.evidence
    lost = _lost_a_thread(context, classified, finding.ranks)
    if lost is not None:
        who, error = lost
        finding = catalogue.finding(
            "undecided.thread-or-divergence",
            (),
            waiting=context.victims,
            evidence=(finding.cause, f"{name_ranks(who)}: {error}"),
            who=who,
            otherwise=finding.remedy,
        )
        evidence = (*finding.evidence, *evidence)
    several, at_once = threads_of(context, classified.record.group)
    shown = [record for _, record in classified.shown if record is not None]
    in_main = {record.call.thread == 0 for record in shown}
    order = (
        classified.kind is Kind.ANOTHER_ORDER
        or (bool(several) and len(in_main) > 1)
        or (bool(at_once) and len({call_site(record) for record in shown}) > 1)
    )
    if several and order:
        evidence = (finding.cause, *evidence)
        finding = catalogue.finding("mismatched-order.threads", several, waiting=context.victims)
    elif at_once:
        fix = catalogue.words("mismatched-order.threads.fix")
        finding = replace(finding, remedy=fix, waiting=context.victims)
    return replace(
        finding,
        evidence=(*evidence, *at_once),
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
) -> tuple[Ranks, str] | None:
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
    return losers[0].ranks, errors[losers[0].ranks[0]]


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
                    catalogue.words(
                        "mismatched-order.threads.at_once",
                        ranks=(rank,),
                        later=f"{quoted(later)} (collective {later.slot})",
                        sooner=f"{quoted(sooner)} (collective {sooner.slot})",
                    )
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
    return catalogue.finding(
        "sharding-mismatch.placed-otherwise",
        ranks,
        waiting=context.victims,
        function=function_of(record),
        **_facts(context, classified),
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
        exits.append(f"rank {rank}: `sys.exit()` at {way[-1]}, behind {code(test)}")
    return catalogue.finding(
        "early-exit.by-exit",
        short,
        waiting=context.victims,
        evidence=(fact(ahead, record), *exits),
        sides=(side(ahead, record), side(short, None)),
        inside=in_call(ahead, short_name(record), context.reports),
        function=function_of(record),
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
            own, other = (
                f"group [{format_ranks(of)}]" if of else f"group {code(group)}"
                for group in (record.group, there.group)
                for of in (context.collectives.groups.get(group),)
            )
            return catalogue.finding(
                "mesh-mismatch.another-group"
                if _is_of_mesh(context, record.called)
                else "subgroup-misuse.another-group",
                classified.culprits,
                waiting=context.victims,
                evidence=(fact((rank,), there),),
                call=function_of(record),
                own=own,
                other=other,
                peer=(rank,),
            )
    return None


def _story(context: Context, classified: Classified) -> Finding:
    """Return the finding of a kind, without what both branches have at the divergence."""
    record, sources = classified.record, context.sources
    full, short, ranks = classified.full, classified.short, classified.culprits
    facts = _facts(context, classified)
    evidence: tuple[str, ...] = ()
    match classified.kind:
        case Kind.MISMATCH:
            return _mismatch(context, classified)
        case Kind.ONE_BRANCH_ONLY:
            return _one_branch_only(context, classified)
        case Kind.PAST_THE_LOOP:
            turn = turn_of(context, full, short, record)
            return fewer_turns(context, turn, full, short, record, culprits=ranks, left=True)
        case Kind.NO_BUCKETS:
            kind = _of_no_buckets(sources, classified)
        case Kind.ANOTHER_ORDER:
            kind = "mismatched-order.moved"
        case Kind.SOME_BUCKETS:
            kind = "unused-params.some-buckets"
            # A reduce_scatter is of fully_shard, which has no find_unused_parameters to offer.
            if "reduce_scatter" in record.operation:
                kind = "unused-params.some-units"
        case Kind.EITHER_OR:
            kind = "divergent-control-flow.branches"
        case Kind.ANOTHER_WAY:
            kind = "divergent-control-flow.another-way"
            tests = _parting(context, *(branch.here for branch in classified.sides))
            evidence = tuple(test.line for test in tests)
            one = tests[0] if len(tests) == 1 and not tests[0].on_rank else None
            facts["test"] = code(one.quoted) if one else ""
        case Kind.OTHER_OBJECTS:
            assert classified.there is not None
            kind = "mismatched-order.other-objects"
            line = sources.call_of_both(record, classified.there)
            evidence = (f"{line}: {line.text}",) if line is not None else ()
        case Kind.TRIED_AGAIN:
            retry = sources.tries_again(record)
            assert retry is not None
            kind, evidence = "divergent-control-flow.tried-again", (retry.line,)
            facts["others"] = short.ranks if ranks == full.ranks else full.ranks
        case _ if _goes_over_others(context, classified):
            kind = "mismatched-order.other-tensors"
        case _:  # one of them called it more often
            kind = "divergent-control-flow.less-often"
            if ranks == full.ranks:
                kind = "divergent-control-flow.more-often"
            facts["count"] = len(classified.records)
    return catalogue.finding(kind, ranks, waiting=context.victims, evidence=evidence, **facts)


def _of_no_buckets(sources: Sources, classified: Classified) -> str:
    """Return the kind of a branch that reduced nothing in a backward pass of the other."""
    # Records only say that nothing was reduced. So it looks under no_sync, without a backward, and
    # where a parameter got no gradient and there is one bucket. Where the code is known, it must
    # mention no_sync for that to be told; where it is not, all that may be the case are named.
    known = sources.knows(classified.record)
    may_be_no_sync = not known or sources.mentions(classified.record, "no_sync")
    if classified.missing is MissingBuckets.ALL_AFTER_FORWARD and may_be_no_sync:
        return "no-sync-misuse.on-or-no-backward"
    return "divergent-control-flow.no-backward" if known else "divergent-control-flow.not-reduced"


# -- one collective with contents that do not match --------------------------------------


def _mismatch(context: Context, classified: Classified) -> Finding:
    own, other, what = classified.record, classified.there, classified.difference
    assert other is not None and what is not None
    (first, value), (second, against) = sorted(
        (
            (classified.full.ranks, value_of(own, other, what)),
            (classified.short.ranks, value_of(other, own, what)),
        ),
        key=lambda each: each[0] != classified.culprits,
    )
    mesh = what is Difference.GROUP and _is_of_mesh(context, own.called)
    # With two labels the tensors themselves may have been combined: then no rank waits.
    met = difference(own, other) is Difference.LABEL
    return catalogue.finding(
        {
            Difference.SHAPE: "shape-mismatch.model"
            if own.part is Part.CONSTRUCTOR
            else "shape-mismatch.shape",
            Difference.DTYPE: "dtype-mismatch.dtype",
            Difference.OPERATION: "op-mismatch.operation",
            Difference.REDUCE_OP: "op-mismatch.reduce-op",
            Difference.ROOT: "op-mismatch.root",
            Difference.GROUP: "mesh-mismatch.dimension" if mesh else "subgroup-misuse.group",
            Difference.LABEL: "mismatched-order.names",
        }[what],
        classified.culprits,
        waiting=() if met else context.victims,
        function=function_of(own),
        call=short_name(own),
        first=first,
        second=second,
        value=value,
        other=against,
    )


def _is_of_mesh(context: Context, called: str) -> bool:
    made = (group for e in context.case.ranks for group in e.groups_made)
    return any(group.of_mesh and group.called == called for group in made)


def value_of(record: Collective, other: Collective, what: Difference) -> str:
    """The value of the property in which a record differs from `other`."""
    match what:
        case Difference.OPERATION:
            named_alike = function_of(record) == function_of(other)
            return code(record.operation) if named_alike else function_of(record)
        case Difference.DTYPE:
            return record.dtype
        case Difference.SHAPE if record.shape == other.shape:
            return f"{record.numel} elements in {record.tensors} tensors"
        case Difference.SHAPE:
            return tensor(record)
        case Difference.REDUCE_OP:
            return record.reduce_op
        case Difference.ROOT:
            return f"rank {record.root}"
        case Difference.LABEL:
            return repr(record.label)
        case Difference.GROUP:
            return record.called


# -- one branch only ---------------------------------------------------------------------


def _one_branch_only(context: Context, classified: Classified) -> Finding:
    """A collective that one branch calls and the other never does, whichever is right."""
    record, full, short = classified.record, classified.full, classified.short
    condition = context.sources.condition(record, classified.there, full.ranks, short.ranks)
    ranks, tested = _who_is_wrong(context, classified, condition)
    evidence: tuple[str, ...] = (condition.line,) if condition else ()
    if classified.there is None and not all(map(context.finished, short.ranks)):
        evidence += (context.standing(short.ranks),)
    facts = _facts(context, classified)
    lacking = ranks == short.ranks
    # A smaller group whose members are just these ranks: they may have meant that.
    groups = context.collectives.groups.items()
    own = [g for g, members in groups if g != record.group and members == full.ranks]
    in_barrier = record.operation == "barrier"
    if in_barrier and own:
        return catalogue.finding(
            "barrier-misuse.members-only",
            full.ranks,
            waiting=context.victims,
            evidence=evidence,
            group=code(own[0]),
            **facts,
        )
    how = how_to_move(record, condition)
    if how["function"] != function_of(record):
        facts["call"] = f"{how['function']} ({function_of(record).strip('`')})"
    kind = _ONLY_SOME[lacking, tested]
    if in_barrier and lacking and not condition:
        kind = "barrier-misuse.not-reached"
    elif record.part is Part.FORWARD and ranks == full.ranks:
        kind = "conditional-collective.forward"
    elif len(ranks) == len(full.ranks) + len(short.ranks):
        kind = "conditional-collective.either"
    return catalogue.finding(
        kind,
        ranks,
        waiting=context.victims,
        evidence=evidence,
        model=_joined(context, full.ranks) or "model",
        **how,
        **facts,
    )


_ONLY_SOME = {
    (True, True): "conditional-collective.left-out",
    (True, False): "conditional-collective.left-out-untested",
    (False, True): "conditional-collective.called-by-some",
    (False, False): "conditional-collective.called-by-some-untested",
}
"""Kinds by whether those that do not call it are wrong, and whether a test on the way tells it."""


def how_to_move(record: Collective, condition: Condition | None) -> dict[str, Any]:
    """Return the facts of a call to make on every rank: what, in which group, past which test."""
    test = code(condition.quoted) if condition else ""
    precedes = condition is not None and condition.precedes
    return {
        "function": moved(record, condition) if condition else function_of(record),
        "group": code(record.called) if record.called else "",
        "around": "" if precedes else test,
        "before": test if precedes else "",
    }


def _joined(context: Context, ranks: Ranks) -> str:
    """The name of the model that DistributedDataParallel trains on a rank; empty without one."""
    report = context.reports.get(ranks[0])
    replicas = report.parts.replicas if report is not None else ()
    return (replicas[0].name or "model") if replicas else ""


def _who_is_wrong(
    context: Context, classified: Classified, condition: Condition | None
) -> tuple[Ranks, bool]:
    """The culprits of a call that one branch lacks, and whether a test on the way tells it."""
    # Who is wrong: the minority. Without one, the test that names who leaves (`if rank == 1:
    # return`) blames those; any other test on the way blames who came through it, since most such
    # calls are one too many, under `if rank == 0:`. Without a test one branch may as well have
    # left on a way that the code does not show, such as an exception that was caught: both are
    # named, and the user sees both lines.
    full, short, record = classified.full, classified.short, classified.record
    tested = condition is not None and not condition.handles
    if len(full.ranks) == len(short.ranks):
        if condition and condition.names_leavers:
            return short.ranks, True
        in_a_pass = classified.there and record.part
        if not tested and context.sources.knows(record) and not in_a_pass:
            return tuple(sorted((*full.ranks, *short.ranks))), False
    return classified.culprits, tested


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

    def kind(self, *, left: bool, again: bool) -> str:
        """The kind of mistake; `again` if the branch with a call more is wrong."""
        if self.more_names:
            return "divergent-control-flow.no-such-name"
        if self.of_optimizer:
            return "divergent-control-flow.closure"
        if not self.is_left_out:
            return "uneven-inputs.other-bounds" if self.counted else "uneven-inputs.left-loop"
        if left and self.begun:
            return "divergent-control-flow.unfinished-turn"
        if left:
            return "divergent-control-flow.left-loop"
        if again:
            return "divergent-control-flow.called-again"
        return "divergent-control-flow.skipped"

    @property
    def facts(self) -> tuple[str, ...]:
        """Lines of evidence."""
        counts = self.counted if self.counted and not self.is_left_out else None
        lines = ((self.way.line,) if self.way else (), self.skipped)
        return (*lines[0], *lines[1], *((f"{counts}: {counts.text}",) if counts else ()))


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


def fewer_turns(
    context: Context,
    turn: Turn,
    full: Branch,
    short: Branch,
    record: Collective,
    *,
    culprits: Ranks,
    left: bool,
) -> Finding:
    """One branch is in one more turn of a loop; `left` is false where the other passed one over."""
    return catalogue.finding(
        turn.kind(left=left, again=culprits == full.ranks),
        culprits,
        waiting=context.victims,
        evidence=turn.facts,
        full=full.ranks,
        short=short.ranks,
        call=short_name(record),
        inside=in_call(full.ranks, short_name(record), context.reports),
        inside_it=in_call(full.ranks, "it", context.reports),
        name=repr(record.label),
        test=code(turn.way.quoted) if turn.way and not turn.way.on_rank else "",
        bounds=code(turn.counted.text) if turn.counted else "",
        model=_joined(context, full.ranks) if record.part else "",
    )


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
