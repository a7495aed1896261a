"""Events of training steps: values, factors, handles, devices, results.

The last rule finds that replicas differ although nothing else explains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, minority, outvoted
from ddp_notebook.diagnosis.source_code.patch import wait
from ddp_notebook.diagnosis.source_code.training_code import is_reported
from ddp_notebook.diagnosis.training.equal import summed
from ddp_notebook.diagnosis.training.replicas import (
    Model,
    differing,
    evaluated_together,
    named,
    optimizers,
    some,
)
from ddp_notebook.model import (
    EvaluationFacts,
    Finding,
    OptimizerFacts,
    Place,
    RunFacts,
    WorkFacts,
    counted,
    name_ranks,
)

_Of = Mapping[int, OptimizerFacts]


# -- handles of collectives --------------------------------------------------------------


def unwaited(context: Context) -> Iterator[Finding]:
    """Find tensors that were changed, and gradients used, while a collective was at work on them.

    What was only read meanwhile leaves no trace, and is not told.
    https://github.com/pytorch/pytorch/issues/180614
    """
    lines: dict[tuple[str, str], dict[int, WorkFacts]] = {}
    for rank, facts in sorted(context.facts.items()):
        for work in facts.works:
            if work.written or work.stepped:
                lines.setdefault((str(work.place), work.operation), {})[rank] = work
    yield from (_misused(context, of) for of in lines.values())
    functional = {rank: facts.functional for rank, facts in sorted(context.facts.items())}
    # More results are left than torch itself may have left: a line of the user's left them.
    forgotten = {rank: each for rank, each in functional.items() if each.left > each.others}
    if forgotten:
        yield catalogue.finding(
            "async-misuse.functional",
            tuple(forgotten),
            evidence=by_ranks(
                forgotten, lambda e: f"{e.left} of {e.direct + e.others} results not waited for"
            ),
            site=next(iter(forgotten.values())).place,
        )


def _misused(context: Context, of: Mapping[int, WorkFacts]) -> Finding:
    each = next(iter(of.values()))
    sends = each.operation in ("isend", "send")
    stepped = any(one.stepped for one in of.values())
    return catalogue.finding(
        "async-misuse.sent"
        if sends
        else "async-misuse.gradients"
        if stepped
        else "async-misuse.changed",
        tuple(of),
        evidence=by_ranks(
            of,
            lambda e: (
                f"{e.issued} started, {e.unwaited} never waited for"
                + (f"; {counted(e.written, 'tensor')} changed before" if e.written else "")
                + (f"; {counted(e.stepped, 'gradient')} used before" if e.stepped else "")
            ),
        ),
        operation=each.operation,
        site=each.place,
        # A send that waits at once may wait for ever.
        patch="" if sends else context.sources.changed(wait, each.place),
    )


# -- gradients between the backward and the step -----------------------------------------

_SAME = 1e-3
"""Factors that differ by less, of their size, are the same."""
_FEWEST_STEPS, _FEWEST_CLIPPED, _MOST_SHOWN = 2, 3, 3


def local_factors(context: Context) -> Iterator[Finding]:
    """Find gradients of one model in parts that each rank multiplies by another factor.

    https://github.com/allenai/OLMo/pull/601
    """
    by_hand = summed(context)
    for of in optimizers(context.facts).values():
        meshes = {optimizer.mesh for optimizer in of.values() if optimizer.mesh}
        for mesh in sorted(meshes.union(by_hand)):
            group = {rank: e for rank, e in of.items() if rank in mesh}
            own = {optimizer.mesh for optimizer in group.values()}
            if len(group) == len(mesh) > 1 and own == {mesh if mesh in meshes else ()}:
                yield from _multiplied_apart(group)


def _multiplied_apart(of: _Of) -> Iterator[Finding]:
    rows = _rows({rank: optimizer.factors for rank, optimizer in of.items()})
    apart = [(step, row) for step, row in rows if _differ(row)]
    if len(apart) < _FEWEST_STEPS:
        return
    each, (step, factors) = next(iter(of.values())), apart[0]
    yield catalogue.finding(
        "local-statistic.sharded",
        tuple(of),
        evidence=(
            *(f"rank {r}: times {f:g} in step {step + 1}" for r, f in factors.items()),
            f"a different factor on each rank in {len(apart)} of the first {len(rows)} steps in "
            "which gradients were scaled",
        ),
        optimizer=each.type,
        site=each.place,
    )


def clipped_apart(context: Context) -> Iterator[Finding]:
    """Find gradients of micro-batches, not averaged yet, that each rank multiplies by its own."""
    for of in optimizers(context.facts).values():
        each = next(iter(of.values()))
        between = _rows({rank: optimizer.between for rank, optimizer in of.items()})
        apart = [row for _, row in between if _differ(row)] if each.replicas else []
        if len(apart) < _FEWEST_CLIPPED:
            continue
        yield catalogue.finding(
            "local-statistic.micro-batches",
            tuple(of),
            evidence=by_ranks(
                {
                    rank: f"times {', '.join(f'{row[rank]:.3g}' for row in apart[:_MOST_SHOWN])} "
                    "before the next backward of the same step"
                    for rank in of
                }
            ),
            site=each.place,
        )


def _rows(of: Mapping[int, tuple[float | None, ...]]) -> list[tuple[int, dict[int, float]]]:
    """Return the numbers of the steps in which all ranks have one factor, with each rank's."""
    rows = [dict(zip(of, row, strict=True)) for row in zip(*of.values(), strict=False)]
    return [
        (i, {r: f or 0.0 for r, f in row.items()})
        for i, row in enumerate(rows)
        if all(row.values())
    ]


def _differ(factors: Mapping[int, float]) -> bool:
    low, high = min(factors.values()), max(factors.values())
    return high - low > _SAME * max(abs(low), abs(high))


# -- values ------------------------------------------------------------------------------


def first_nan(context: Context) -> Iterator[Finding]:
    """Find the ranks whose values were bad before the others', where parameters are by now."""
    facts = context.facts
    broken = {name for model in context.models for name in model.broken}
    first = {r: f.nan_backward for r, f in facts.items() if f.nan_backward is not None}
    if not broken or not first:
        return
    # By the number of the backward and not by a clock: after the next reduction all ranks have the
    # bad values, so only who had them one backward earlier can be the source.
    begin = min(first.values())
    ranks = tuple(sorted(rank for rank, number in first.items() if number == begin))
    if len(ranks) == len(facts):
        return  # the training itself diverges, on all ranks
    each = facts[ranks[0]]
    yield catalogue.finding(
        "nan-on-one-rank.first",
        ranks,
        evidence=(
            *(
                f"rank {r}: first NaN or Inf in {facts[r].nan_what} of backward {number}"
                for r, number in sorted(first.items())
            ),
            f"NaN or Inf at the end: {some(sorted(broken))}",
        ),
        what=each.nan_what,
        number=begin,
        site=each.nan_place,
    )


# -- devices -----------------------------------------------------------------------------


def shared_gpus(context: Context) -> Iterator[Finding]:
    """Find ranks on one GPU while another is free."""
    # By host: a GPU's number is that of its host, and ranks see no other host's GPUs.
    hosts: dict[str, dict[int, RunFacts]] = {}
    for rank, run in sorted(context.facts.items()):
        if run.gpu and any(replica.device.startswith("cuda") for replica in run.replicas):
            hosts.setdefault(run.host, {})[rank] = run
    for of in hosts.values():
        # To share a GPU is right where ranks outnumber GPUs. It is a mistake only if another one is
        # free.
        used = {run.gpu for run in of.values()}
        if len(used) < len(of) and max(run.gpus for run in of.values()) > len(used):
            yield _shared(of)


def _shared(of: dict[int, RunFacts]) -> Finding:
    first: dict[str, int] = {}
    for rank, run in of.items():
        first.setdefault(run.gpu, rank)
    late = tuple(rank for rank, run in of.items() if first[run.gpu] != rank)
    return catalogue.finding(
        "gpu-mapping.shared",
        late,
        evidence=tuple(f"rank {r}: {e.replicas[0].device}, {e.gpu}" for r, e in of.items()),
        others=tuple(sorted({first[of[rank].gpu] for rank in late})),
    )


_FOREIGN = (("cuda", "gloo"), ("cpu", "nccl"))
"""Devices, each with a backend that is for others."""


def backends(context: Context) -> Iterator[Finding]:
    """Find parameters on a device that the group's backend is not for."""
    gpus = [run.gpu for run in context.facts.values() if run.gpu]
    for model in context.models:
        ranks = tuple(
            rank
            for rank, replica in model.of.items()
            if (replica.device.partition(":")[0], replica.backend) in _FOREIGN
        )
        # NCCL wants a GPU of its own for each rank: without that gloo is the right choice.
        if ranks and (model.first.device == "cpu" or len(set(gpus)) == len(context.facts)):
            each = model.of[ranks[0]]
            yield catalogue.finding(
                "backend-device-mismatch.model",
                ranks,
                evidence=tuple(
                    f"rank {r}: {model.of[r].device}, {model.of[r].backend}" for r in ranks
                ),
                model=model.title,
                device=each.device,
                backend=each.backend,
                right="nccl" if each.device.startswith("cuda") else "gloo",
            )


# -- results -----------------------------------------------------------------------------

_SILENT = ("barrier", "monitored_barrier")


def unjoined_results(context: Context) -> Iterator[Finding]:
    """Find evaluations on parts after which ranks exchange nothing, and one alone reports.

    https://github.com/goodfire-ai/spd/issues/149
    """
    for model in context.models:
        if not model.whole or not all(replica.steps for replica in model.of.values()):
            continue
        # Whether a number is reported as that of the whole no record tells: the source is asked.
        evaluations = evaluated_together(model)
        wrong = [of for of in evaluations if _are_of_parts(of) and _is_reported(context, of)]
        if not wrong or _exchanged(context, model, evaluations[0]):
            continue
        (rank,) = _who_wrote(wrong[0])
        yield catalogue.finding(
            "metric-misaggregation.one-reports",
            tuple(model.of),
            evidence=(
                f"the inputs of {counted(len(wrong), 'evaluation')} differ between "
                f"{name_ranks(model.of)}",
                f"only rank {rank} printed after them",
                "your code called no collective after the first of them",
            ),
            model=model.title,
            reporter=(rank,),
            site=_place_of(wrong[0]),
        )


def _are_of_parts(of: Mapping[int, EvaluationFacts]) -> bool:
    """Each rank evaluated on data of its own, and one alone printed something afterwards."""
    meant = all(evaluation.loader or not evaluation.training for evaluation in of.values())
    inputs = [evaluation.inputs for evaluation in of.values()]
    known = all(each and "" not in each for each in inputs)
    return meant and known and len(set(inputs)) == len(inputs) and len(_who_wrote(of)) == 1


def _who_wrote(of: Mapping[int, EvaluationFacts]) -> list[int]:
    """Return the ranks that printed something; none unless that is known of all."""
    if any(evaluation.wrote is None for evaluation in of.values()):
        return []
    return [rank for rank, evaluation in of.items() if evaluation.wrote]


def _place_of(of: Mapping[int, EvaluationFacts]) -> Place | None:
    return next((each.place for each in of.values() if each.place is not None), None)


def _is_reported(context: Context, of: Mapping[int, EvaluationFacts]) -> bool:
    """True when the code prints a number that this evaluation came to."""
    place = _place_of(of)
    tree = context.sources.tree(place) if place is not None else None
    return tree is not None and place is not None and is_reported(tree, place.line)


def _exchanged(context: Context, model: Model, first: Mapping[int, EvaluationFacts]) -> bool:
    """True when results may have been joined: by anything but DDP and barriers, or unknown."""
    # Records that were overwritten since may have had it: `first` is then more than 0.
    # Only what was called once the evaluation had begun can have joined its results; each record
    # has how many backwards there were before it.
    since = min(evaluation.backwards for evaluation in first.values())
    collectives = context.collectives
    return any(
        collectives.first.get(rank, 0)
        or any(
            record.part is None and record.operation not in _SILENT and record.backwards >= since
            for record in collectives.of.get(rank, ())
        )
        for rank in model.of
    )


# -- replicas that differ ----------------------------------------------------------------


def loaded_on_some(context: Context) -> Iterator[Finding]:
    """Find replicas or optimizers that differ, and whose state only some ranks have loaded.

    Before a model is wrapped, that is as it should be: DDP sends what rank 0 has.
    https://github.com/vllm-project/speculators/pull/926
    """
    for model in context.models:
        trained = all(replica.steps for replica in model.of.values())
        if not model.whole or not trained or not _all_is_reduced(model):
            continue
        if model.diverged:
            loads = {rank: (each.loads, each.load_place) for rank, each in model.of.items()}
            yield from _loaded(model, model.title, loads, model.diverged)
        for every in optimizers(context.facts).values():
            of = model.ranks_of(every)
            if set(of) != set(model.of) or any(model.key not in e.replicas for e in of.values()):
                continue
            names = model.diverged or differing({rank: each.state for rank, each in of.items()})
            optimizer = f"`{next(iter(of.values())).type}`"
            loads = {rank: (each.loads, each.load_place) for rank, each in of.items()}
            yield from _loaded(model, optimizer, loads, names) if names else ()


def _all_is_reduced(model: Model) -> bool:
    """True of a model all of whose steps used the gradients of all ranks, by DDP itself."""
    # Steps of one rank alone that are averaged by hand are meant so; and what a hook does with
    # gradients is its own affair: PostLocalSGD, gossip.
    return not any(r.local_steps or r.bypassed_steps or r.hook for r in model.of.values())


def _loaded(
    model: Model,
    title: str,
    loads: Mapping[int, tuple[int, Place | None]],
    names: tuple[str, ...],
) -> Iterator[Finding]:
    """Find that only some ranks loaded a state that differs."""
    loaded = tuple(rank for rank, (count, _) in loads.items() if count)
    others = tuple(rank for rank in loads if rank not in loaded)
    if not loaded or not others:
        return
    # What rank 0 loads is meant for all; any other may have loaded by mistake. Of two, either.
    ranks = outvoted({rank: rank in loaded for rank in loads})
    calls = {rank: f"{counted(n, 'call')} of load_state_dict" for rank, (n, _) in loads.items()}
    yield catalogue.finding(
        "checkpoint-misuse.not-on-all",
        others if 0 in loaded and len(loads) > 2 else ranks,
        evidence=(*by_ranks(calls), f"differ between {name_ranks(model.of)}: {some(names)}"),
        loaded=loaded,
        others=others,
        what=title,
        site=loads[loaded[0]][1],
    )


def diverged_replicas(context: Context) -> Iterator[Finding]:
    """Find replicas that differ, where no other rule explains it."""
    for model in context.models:
        names = model.diverged
        trained = any(replica.steps for replica in model.of.values())
        if not names or not trained or not _all_is_reduced(model):
            continue
        states = {
            rank: tuple((d.hash, d.norm, d.sample) for d in replica.parameters if d.name in names)
            for rank, replica in model.of.items()
        }
        steps = {rank: replica.steps for rank, replica in model.of.items()}
        # Who made more or fewer steps than most is to blame, whatever its values are. Otherwise the
        # values vote; with two ranks, or where all differ, nobody is right rather than another.
        ranks = minority(steps) or outvoted(states)
        reduced = all(replica.forwards for replica in model.of.values())
        yield catalogue.finding(
            "replica-divergence.undecided"
            if len(ranks) == len(states)
            else "replica-divergence.drift",
            ranks,
            evidence=(
                *model.counts(model.of, lambda e: counted(e.steps, "step")),
                *model.apart,
                *(
                    f"the optimizer's state differs, too: {some(other)}"
                    for of in optimizers(context.facts).values()
                    if (other := differing({r: each.state for r, each in of.items()}))
                ),
            ),
            names=named(names),
            model=model.title,
            averaged="all gradients" if reduced else "",
        )
