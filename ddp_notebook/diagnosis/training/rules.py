"""Rules about gradients, values and buffers of a run that ended well.

A rule asks for proof: replicas that differ although they must be equal, or a mistake that is
one whatever became of it. What a healthy run does on its way gives no finding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, each_with, minority, outvoted
from ddp_notebook.diagnosis.source_code.singled_out import strayed
from ddp_notebook.diagnosis.training.replicas import (
    Model,
    by_hand,
    differing,
    exchanging,
    may_have_joined,
    some,
)
from ddp_notebook.model import (
    Category,
    Finding,
    OptimizerFacts,
    Part,
    Place,
    Ranks,
    ReplicaFacts,
    RunFacts,
    TensorDigest,
    agree,
    counted,
    in_brackets,
    name_ranks,
)

_ADAPTIVE = ("Ada", "NAdam", "RAdam", "RMSprop", "Rprop", "Lion", "SparseAdam")
_HARDLY = 0.1
_RATE = ("lr", "learning_rate")
_FEWEST_IDLE = 2
"""The fewest steps without any gradient that count: a single one may serve a scheduler."""
_SHOWN_METRICS = 4


def _place_of(model: Model, ranks: Ranks, which: Callable[[ReplicaFacts], Place | None]) -> str:
    return in_brackets(
        next((place for r in ranks if (place := which(model.of[r])) is not None), None)
    )


def _apart(model: Model) -> tuple[str, ...]:
    """That the replicas differ, as a line of evidence; none when they do not."""
    names = model.diverged
    return (f"not the same on {name_ranks(model.of)}: {some(names)}",) if names else ()


def _counts(model: Model, ranks: Ranks, text: Callable[[ReplicaFacts], str]) -> tuple[str, ...]:
    return by_ranks({rank: text(model.of[rank]) for rank in ranks})


# -- gradients that were not reduced -----------------------------------------------------


def unused_parameters(context: Context) -> Iterator[Finding]:
    """A step was made while the reducer waited for gradients of parameters that got none."""
    for model in context.models.values():
        ranks = tuple(
            rank
            for rank, replica in model.of.items()
            if replica.unready_steps and not _replaced(model, replica)
        )
        if not ranks:
            continue
        names = model.of[ranks[0]].unready or ("some parameters",)
        yield Finding(
            Category.UNUSED_PARAMS,
            ranks,
            f"{some(names)} of {model.title} got no gradient: a bucket was never reduced, and "
            f"the step used gradients of one rank{_place_of(model, ranks, _bad)}",
            "Use the parameters in forward, leave them out of the model, or give "
            "DistributedDataParallel find_unused_parameters=True.",
            evidence=(
                *_counts(
                    model,
                    ranks,
                    lambda e: (
                        f"{e.unready_steps} of {e.steps} steps came before all of "
                        f"{some(e.unready or ('its parameters',))} had a gradient"
                    ),
                ),
                *_apart(model),
            ),
        )


def _replaced(model: Model, each: ReplicaFacts) -> bool:
    """True when what got no gradient was replaced by what the reducer does not know."""
    return bool(each.unready) and set(each.unready) <= set(_trained_outside(model, each))


def _bad(each: ReplicaFacts) -> Place | None:
    return each.bad_place


def module_bypass(context: Context) -> Iterator[Finding]:
    """Steps with gradients of forwards that went around the wrapper."""
    for key, model in context.models.items():
        ranks = tuple(rank for rank, replica in model.of.items() if replica.bypassed_steps)
        if not ranks:
            yield from _never_through(context, key, model)
        never = not any(model.of[rank].forwards for rank in ranks) and not any(
            record.part is Part.BACKWARD
            for rank in ranks
            for record in context.collectives.of.get(rank, ())
        )
        if not ranks or by_hand(model, context.collectives) or not (model.diverged or never):
            continue
        yield Finding(
            Category.DDP_BYPASS,
            ranks,
            f"the forward calls the module inside {model.title} and not the wrapper: no gradient "
            f"is reduced{_place_of(model, ranks, lambda e: e.bypass_place)}",
            "Call the DistributedDataParallel object itself in training: "
            f"{model.first.name or 'model'}(x), not {model.first.name or 'model'}.module(x).",
            evidence=(
                *_counts(
                    model,
                    ranks,
                    lambda e: (
                        f"{e.bypassed_steps} of {e.steps} steps after forwards around the "
                        f"wrapper; {e.forwards} forwards through it"
                    ),
                ),
                *_apart(model),
            ),
        )


def _was_reduced(context: Context) -> bool:
    of = context.collectives.of.values()
    return any(record.part is Part.BACKWARD for records in of for record in records)


def _never_through(context: Context, key: str, model: Model) -> Iterator[Finding]:
    """A model that is trained, and whose wrapper saw no forward: a method of the module was called.

    That replicas differ proves that nothing else reduced their gradients.
    """
    went_through = any(replica.forwards or replica.bypasses for replica in model.of.values())
    if (
        went_through
        or not model.diverged
        or _was_reduced(context)
        or by_hand(model, context.collectives)
    ):
        return
    of = next((of for of in optimizers(context.facts).values() if _trains(of, key)), {})
    place = in_brackets(next((optimizer.place for optimizer in of.values()), None))
    name = model.first.name or "model"
    yield Finding(
        Category.DDP_BYPASS,
        tuple(model.of),
        f"no forward that was trained on came through {model.title}, so no gradient is reduced: "
        f"the optimizer steps with gradients of one rank{place}",
        f"Compute the loss from a call of the DistributedDataParallel object itself, {name}(...), "
        f"not of {name}.module, its layers or its methods: have the module's forward do what they "
        "do.",
        evidence=(
            *_counts(model, tuple(model.of), lambda e: f"{e.steps} steps, no forward through it"),
            *_apart(model),
        ),
    )


def _trains(of: Mapping[int, OptimizerFacts], key: str) -> bool:
    return all(
        key in optimizer.replicas and optimizer.steps > optimizer.idle_steps
        for optimizer in of.values()
    )


def no_sync(context: Context) -> Iterator[Finding]:
    """Steps with gradients whose last backward no_sync covered."""
    for model in context.models.values():
        ranks = tuple(rank for rank, replica in model.of.items() if replica.local_steps)
        if not ranks or not model.diverged or by_hand(model, context.collectives):
            continue
        yield Finding(
            Category.NO_SYNC_MISUSE,
            ranks,
            f"no_sync covers the last backward before the optimizer's step: {model.title} steps "
            f"with gradients of one rank{_place_of(model, ranks, _bad)}",
            "Leave no_sync for the last micro-batch before optimizer.step().",
            evidence=(
                *_counts(
                    model,
                    ranks,
                    lambda e: (
                        f"{e.local_steps} of {e.steps} steps used gradients that were not "
                        f"reduced; {e.no_sync_forwards} of {e.forwards} forwards under no_sync"
                    ),
                ),
                *_apart(model),
            ),
        )


def unwrapped_parameters(context: Context) -> Iterator[Finding]:
    """Parameters that an optimizer updates and no reducer knows."""
    for key, model in context.models.items():
        if not by_hand(model, context.collectives):
            yield from _unknown_to_reducer(model)
            yield from _of_no_model(key, model, context)


def _unknown_to_reducer(model: Model) -> Iterator[Finding]:
    def trained(each: ReplicaFacts) -> tuple[str, ...]:
        return _trained_outside(model, each)

    ranks = tuple(rank for rank, replica in model.of.items() if trained(replica))
    if ranks:
        names = trained(model.of[ranks[0]])
        yield Finding(
            Category.PARAMS_OUTSIDE_DDP,
            ranks,
            f"{some(names)} of {model.title} {agree(names, 'was', 'were')} added or "
            f"unfrozen after wrapping: {agree(names, 'its', 'their')} gradients are not "
            "reduced",
            "Add and unfreeze parameters before DistributedDataParallel(model), or wrap the "
            "model again after it.",
            evidence=(
                *_counts(model, ranks, lambda e: f"trains {some(trained(e))}, without a hook"),
                *_apart(model),
            ),
        )


def _trained_outside(model: Model, each: ReplicaFacts) -> tuple[str, ...]:
    """Parameters that the reducer does not know, and that the rank trains."""
    trained = {digest.name for digest in each.gradients} | set(model.diverged)
    return tuple(name for name in each.outside if name in trained)


def _of_no_model(key: str, model: Model, context: Context) -> Iterator[Finding]:
    for of in optimizers(context.facts).values():
        if set(of) != set(model.of) or not model.whole:
            continue
        if not all(key in optimizer.replicas[:1] for optimizer in of.values()):
            continue
        names = _apart_by_now(of)
        numels = [digest.numel for digest in next(iter(of.values())).unwrapped]
        if names and not may_have_joined(context.collectives, of, numels):
            yield Finding(
                Category.PARAMS_OUTSIDE_DDP,
                tuple(of),
                f"the optimizer also trains {some(names)}, in no DistributedDataParallel: every "
                "rank has its own values by now",
                "Put every trained parameter into the module that DistributedDataParallel wraps.",
                evidence=(f"not the same on {name_ranks(of)}: {some(names)}",),
            )


def _apart_by_now(of: Mapping[int, OptimizerFacts]) -> tuple[str, ...]:
    """Parameters without DDP that differ between the ranks, and did not at first.

    What began with other values on each rank is meant to be its own: experts, clients.
    """
    own = differing({rank: optimizer.begins for rank, optimizer in of.items()})
    unlike = differing({rank: optimizer.unwrapped for rank, optimizer in of.items()})
    return tuple(n for n in unlike if n not in own and not _hardly_apart(of, n))


def _hardly_apart(of: Mapping[int, OptimizerFacts], name: str) -> bool:
    """The ranks' values differ by far less than training has changed them.

    Rounding and statistics of batches do that, where all train on the same samples.
    """
    begins = [_values(optimizer.begins, name) for optimizer in of.values()]
    ends = [_values(optimizer.unwrapped, name) for optimizer in of.values()]
    if len({len(row) for row in (*begins, *ends)}) > 1 or not ends[0]:
        return False
    moved = min(map(math.dist, begins, ends))
    return max(math.dist(ends[0], row) for row in ends) < _HARDLY * moved


def _values(digests: Iterable[TensorDigest], name: str) -> list[float]:
    return [v for digest in digests if digest.name == name for v in digest.sample if v is not None]


def _never_moves(of: Mapping[int, OptimizerFacts]) -> bool:
    return all(_FEWEST_IDLE <= optimizer.steps == optimizer.idle_steps for optimizer in of.values())


def detached_optimizers(context: Context) -> Iterator[Finding]:
    """An optimizer steps with tensors that never get a gradient; a model of such sizes has none."""
    all_of = optimizers(context.facts).values()
    held = {key for of in all_of for optimizer in of.values() for key in optimizer.replicas}
    for of in all_of:
        if _never_moves(of):
            models = [model for key, model in context.models.items() if key not in held]
            yield from (_detached(model, of) for model in models if _as_large(model, of))
            if all(e.numels == context.facts[r].sharded_without_optimizer for r, e in of.items()):
                yield _of_before_sharding(context, of)
        elif all(optimizer.unheld for optimizer in of.values()):
            yield _detached_in_part(of)


def _as_large(model: Model, of: Mapping[int, OptimizerFacts]) -> bool:
    """True of a model that is trained, with parameters most of which have an optimizer's sizes.

    Not all: a part may have been replaced since, such as the head for a new task.
    """
    numels = [digest.numel for digest in model.first.parameters]
    trained = all(replica.backwards >= _FEWEST_IDLE for replica in model.of.values())
    return trained and set(of) == set(model.of) and all(_alike(e, numels) for e in of.values())


def _alike(each: OptimizerFacts, numels: Sequence[int]) -> bool:
    shared = Counter(each.numels) & Counter(numels)
    return shared.total() * 2 > max(len(each.numels), len(numels))


def _detached(model: Model, of: Mapping[int, OptimizerFacts]) -> Finding:
    each = next(iter(of.values()))
    return Finding(
        Category.OPTIMIZER_DETACHED,
        tuple(of),
        f"{each.type} was made of other tensors than the parameters of {model.title}: none of "
        f"them ever gets a gradient, and its steps change nothing{in_brackets(each.place)}",
        "Make the optimizer of the parameters of the model that is trained, after the model was "
        "copied, moved or loaded: it keeps the tensors that it was given.",
        evidence=by_ranks(
            {
                rank: f"none of its {len(e.numels)} tensors had a gradient in {e.idle_steps} of "
                f"{counted(e.steps, 'step')}, and no optimizer that steps holds parameters of "
                f"{model.title}, which had {counted(model.of[rank].backwards, 'backward')}"
                for rank, e in of.items()
            }
        ),
    )


def _of_before_sharding(context: Context, of: Mapping[int, OptimizerFacts]) -> Finding:
    each = next(iter(of.values()))
    return Finding(
        Category.OPTIMIZER_DETACHED,
        tuple(of),
        f"{each.type} was made before fully_shard: it holds the tensors that the parameters were, "
        f"none of them ever gets a gradient, and its steps change nothing{in_brackets(each.place)}",
        "Make the optimizer after fully_shard(model): it keeps the tensors that it was given.",
        evidence=by_ranks(
            {
                rank: f"none of its {len(e.numels)} tensors had a gradient in {e.idle_steps} of "
                f"{counted(e.steps, 'step')}; sharded parameters of the same sizes are in no "
                f"optimizer, in {counted(context.facts[rank].backwards, 'backward')}"
                for rank, e in of.items()
            }
        ),
    )


def _detached_in_part(of: Mapping[int, OptimizerFacts]) -> Finding:
    each = next(iter(of.values()))
    get, they = ("gets", "it is") if len(each.unheld) == 1 else ("get", "they are")
    return Finding(
        Category.OPTIMIZER_DETACHED,
        tuple(of),
        f"no optimizer holds {some(each.unheld)}, which {get} gradients: {they} never updated; "
        f"{each.type} holds as many tensors that are in no model any more{in_brackets(each.place)}",
        "Make the optimizer after the last change of the model (a new head, a copy, a load): it "
        "keeps the tensors that it was given. Or give it the new ones: opt.add_param_group(...).",
        evidence=by_ranks(
            {
                rank: f"{e.idle_tensors} tensors of {e.type} got no gradient from any backward; "
                f"{some(e.unheld)} did, and no optimizer holds them"
                for rank, e in of.items()
            }
        ),
    )


def unheld_parameters(context: Context) -> Iterator[Finding]:
    """A few parameters get gradients, and no optimizer has them: a layer was forgotten."""
    told = _told_of_optimizers(context)
    for model in context.models.values():
        names = model.first.unheld
        if (
            not names
            or told.issuperset(names)
            or any(replica.unheld != names for replica in model.of.values())
        ):
            continue
        one = len(names) == 1
        yield Finding(
            Category.OPTIMIZER_DETACHED,
            tuple(model.of),
            f"no optimizer holds {some(names)} of {model.title}, which {'gets' if one else 'get'} "
            f"gradients: {'it is' if one else 'they are'} never updated, though what is before "
            "and after is",
            "Give the optimizer all parameters that are to be trained; call requires_grad_(False) "
            "on those that are not, before DistributedDataParallel(model).",
            evidence=(
                f"on {name_ranks(model.of)}: a gradient in each step, in no optimizer, the same "
                f"values after {model.first.steps} steps: {some(names)}",
            ),
        )


def _told_of_optimizers(context: Context) -> set[str]:
    return {name for of in context.facts.values() for each in of.optimizers for name in each.unheld}


def optimizers(facts: Mapping[int, RunFacts]) -> dict[str, dict[int, OptimizerFacts]]:
    """The optimizers of a run, by key, then by rank."""
    found: dict[str, dict[int, OptimizerFacts]] = {}
    for rank in sorted(facts):
        for optimizer in facts[rank].optimizers:
            found.setdefault(optimizer.key, {})[rank] = optimizer
    return found


def is_adaptive(each: OptimizerFacts) -> bool:
    """True of an optimizer whose steps hardly depend on the scale of the gradients."""
    return each.type.startswith(_ADAPTIVE)


def where(facts: Mapping[int, RunFacts]) -> set[str]:
    """The files in which losses and optimizers of a run are used."""
    losses = (loss.place for of in facts.values() for loss in of.losses)
    steps = (optimizer.place for of in facts.values() for optimizer in of.optimizers)
    return {place.file for place in (*losses, *steps) if place is not None}


# -- values ------------------------------------------------------------------------------


def first_nan(context: Context) -> Iterator[Finding]:
    """Parameters are not finite any more, and some ranks had a bad value before the others."""
    facts = context.facts
    broken = {name for model in context.models.values() for name in model.broken}
    first = {r: f.nan_backward for r, f in facts.items() if f.nan_backward is not None}
    if not broken or not first:
        return
    begin = min(first.values())
    ranks = tuple(sorted(rank for rank, number in first.items() if number == begin))
    if len(ranks) == len(facts):
        return  # the training itself diverges, on all ranks
    each = facts[ranks[0]]
    after = {
        r: f"{f.nan_what} of backward {f.nan_backward}" for r, f in facts.items() if r in first
    }
    yield Finding(
        Category.NAN_ON_ONE_RANK,
        ranks,
        f"{each.nan_what} of backward {begin} is not finite there first, and comes to every rank "
        f"with the gradients{in_brackets(each.nan_place)}",
        "Look at that rank's batch and loss; skip a bad step on all ranks together (all_reduce a "
        "flag first).",
        evidence=(
            *(f"rank {r}: not finite first in {text}" for r, text in sorted(after.items())),
            f"not finite at the end: {some(sorted(broken))}",
        ),
    )


def learning_rates(context: Context) -> Iterator[Finding]:
    """The same optimizer with other learning rates, or other options, after as many steps.

    Ranks that exchange nothing may try one value each.
    """
    for of in _of_one_group(context):
        together = all(optimizer.replicas or optimizer.mesh for optimizer in of.values())
        for part in [of] if together else exchanging(context.collectives, of):
            if len(part) > 1 and len({optimizer.steps for optimizer in part.values()}) == 1:
                yield from _other_rates(context, part)
                yield from _other_options(context, part)


def _of_one_group(context: Context) -> Iterator[dict[int, OptimizerFacts]]:
    """The optimizers of a run, those whose models are in groups of their own for each group.

    Groups that exchange nothing are experiments side by side.
    """
    for of in optimizers(context.facts).values():
        apart: dict[Ranks, dict[int, OptimizerFacts]] = {}
        for rank, optimizer in of.items():
            own = [
                m.of for k, m in context.models.items() if k in optimizer.replicas and rank in m.of
            ]
            groups = [of[rank].group for of in own]
            apart.setdefault(max(groups, key=len, default=()), {})[rank] = optimizer
        keys = {key for optimizer in of.values() for key in optimizer.replicas}
        models = [model for key, model in context.models.items() if key in keys]
        joined = any(by_hand(model, context.collectives) for model in models)
        yield from [of] if joined else apart.values()


def _other_options(context: Context, of: Mapping[int, OptimizerFacts]) -> Iterator[Finding]:
    options = {rank: optimizer.options for rank, optimizer in of.items()}
    if len(set(options.values())) < 2 or len({len(option) for option in options.values()}) > 1:
        return
    own = _own_options(options)
    names = {each.partition("=")[0] for each in chain(*own.values())}
    ranks = strayed(context.sources, options, names)
    each, texts = of[ranks[0]], {rank: some(some_of) for rank, some_of in own.items()}
    has = f"{each.type} has {texts[ranks[0]]}, and something else on the other ranks"
    if len(ranks) == len(of):
        has = f"{each.type} has {each_with(texts)}, which of them is meant cannot be told"
    yield Finding(
        Category.REPLICA_DIVERGENCE,
        ranks,
        f"{has}: replicas drift apart{in_brackets(each.place)}",
        "Give the optimizer the same options on every rank.",
        evidence=tuple(f"rank {rank}: {', '.join(o[:8])}" for rank, o in options.items()),
    )


def _own_options(options: Mapping[int, tuple[str, ...]]) -> dict[int, Sequence[str]]:
    """Of each rank's options those that not all have; all of them where these are the same."""
    common = set.intersection(*map(set, options.values()))
    return {r: [e for e in dict.fromkeys(o) if e not in common] or o for r, o in options.items()}


def _other_rates(context: Context, of: Mapping[int, OptimizerFacts]) -> Iterator[Finding]:
    lrs = {rank: optimizer.lrs for rank, optimizer in of.items()}
    if len(set(lrs.values())) == 1:
        return
    metrics = {rank: optimizer.metrics for rank, optimizer in of.items()}
    own = () not in metrics.values() and len(set(metrics.values())) > 1
    ranks = outvoted(metrics) if own else strayed(context.sources, lrs, _RATE)
    each = of[ranks[0]]
    rates = {rank: _rates(own) for rank, own in lrs.items()}
    why = ", as ReduceLROnPlateau reads a metric of each rank's own" if own else ""
    yield Finding(
        Category.REPLICA_DIVERGENCE,
        ranks,
        f"{each.type} steps with learning rate {_told_apart(rates, ranks, why)}: replicas drift "
        f"apart{in_brackets(each.place)}",
        "Give the optimizer and its scheduler the same values on every rank; a scheduler "
        "that reads a metric needs the same metric (all_reduce it).",
        evidence=(
            *(f"rank {rank}: learning rate {text}" for rank, text in rates.items()),
            *(_metrics_read(metrics) if own else ()),
        ),
    )


def _told_apart(rates: Mapping[int, str], ranks: Ranks, why: str) -> str:
    right = next((rates[rank] for rank in sorted(rates) if rank not in ranks), "")
    if why or not right:
        return f"{each_with(rates)}{why or ', which of them is meant cannot be told'}"
    return f"{rates[ranks[0]]}, others with {right}"


def _metrics_read(metrics: Mapping[int, Sequence[float]]) -> Iterator[str]:
    for rank, values in metrics.items():
        more = " ..." if len(values) > _SHOWN_METRICS else ""
        first = ", ".join(f"{value:.6g}" for value in values[:_SHOWN_METRICS])
        yield f"rank {rank}: its metric was {first}{more}"


def _rates(lrs: Iterable[float | None]) -> str:
    return ", ".join("?" if lr is None else f"{lr:g}" for lr in lrs)


def parted_groups(context: Context) -> Iterator[Finding]:
    """One training, whose DDP objects reduce gradients in groups of some of the ranks only.

    That groups train apart may be meant so: trials, folds. Not where all began the same, with the
    same settings, each with samples of its own, and a sampler splits the samples over all of them.
    """
    for key, model in context.models.items():
        groups = {replica.group for replica in model.of.values()}
        members = sorted(rank for group in groups for rank in group)
        whole = len(groups) > 1 and members == sorted(model.of) and () not in groups
        whole = whole and _is_sampled_for_all(context, model)
        names = differing({rank: replica.parameters for rank, replica in model.of.items()})
        if not whole or not names or not _are_alike_alone(context, key, model):
            continue
        shown = " and ".join(name_ranks(group) for group in sorted(groups))
        yield Finding(
            Category.REPLICA_DIVERGENCE,
            tuple(model.of),
            f"{model.title} reduces gradients in groups: {shown}, each among themselves. Nothing "
            "joins the groups, and their parameters drift apart",
            "Leave process_group out of DistributedDataParallel(...), so that all ranks average "
            "their gradients; or average those of the groups by hand before each step.",
            evidence=(
                f"DistributedSampler splits the samples over all {len(model.of)} ranks",
                f"the same values and settings at first, and not the same now: {some(names)}",
            ),
        )


def _is_sampled_for_all(context: Context, model: Model) -> bool:
    """True where a DistributedSampler splits the samples over all ranks: they train one model."""
    size = len(model.of)
    samplers = [context.facts[rank].samplers for rank in model.of]
    return all(any(sampler.num_replicas == size for sampler in of) for of in samplers)


def _are_alike_alone(context: Context, key: str, model: Model) -> bool:
    """All began with the same, train with the same settings, and exchange nothing but metrics."""
    of = [o for optimizer in optimizers(context.facts).values() for o in optimizer.values()]
    settings = {
        (optimizer.type, optimizer.lrs, optimizer.options)
        for optimizer in of
        if key in optimizer.replicas
    }
    begins = {replica.begins for replica in model.of.values()}
    numels = [digest.numel for digest in model.first.parameters]
    same = len(settings) == len(begins) == 1 and () not in begins
    joined = may_have_joined(context.collectives, model.of, numels)
    return same and not joined and _have_own_samples(model)


def _have_own_samples(model: Model) -> bool:
    inputs = [tuple(start.input for start in replica.starts) for replica in model.of.values()]
    return len(set(inputs)) == len(inputs) and all(row and "" not in row for row in inputs)


def diverged_replicas(context: Context) -> Iterator[Finding]:
    """Replicas differ, and no other rule explains it."""
    for model in context.models.values():
        names = model.diverged
        if not names or not any(replica.steps for replica in model.of.values()):
            continue
        if any(replica.local_steps or replica.bypassed_steps for replica in model.of.values()):
            continue  # steps of one rank alone, averaged by hand: that is meant so
        if any(replica.hook for replica in model.of.values()):
            continue  # what the hook does with gradients is its own affair: PostLocalSGD, gossip
        states = {rank: _state(replica, names) for rank, replica in model.of.items()}
        ranks = minority({rank: replica.steps for rank, replica in model.of.items()}) or outvoted(
            states
        )
        whose = "between the ranks" if len(ranks) == len(states) else "from the other ranks'"
        reduced = all(replica.forwards for replica in model.of.values())
        though = ", though every gradient was reduced" if reduced else ""
        yield Finding(
            Category.REPLICA_DIVERGENCE,
            ranks,
            f"{some(names)} of {model.title} differ {whose}{though}",
            "Look for what changes parameters or optimizer on some ranks only: a checkpoint, an "
            "initialisation after wrapping, a skipped step, clipping by a value of one rank.",
            evidence=(
                *_counts(model, tuple(model.of), lambda e: f"{e.steps} steps"),
                *_apart(model),
                *_other_states(context.facts),
            ),
        )


def _state(each: ReplicaFacts, names: Iterable[str]) -> tuple[object, ...]:
    wanted = set(names)
    return tuple((d.hash, d.norm, d.sample) for d in each.parameters if d.name in wanted)


def _other_states(facts: Mapping[int, RunFacts]) -> Iterator[str]:
    for of in optimizers(facts).values():
        names = (
            differing({rank: optimizer.state for rank, optimizer in of.items()})
            if len(of) > 1
            else ()
        )
        if names:
            yield f"the optimizer's state differs too: {some(names)}"


def buffers(context: Context) -> Iterator[Finding]:
    """Buffers in another order, or ones that DDP does not send and that have drifted apart."""
    for model in context.models.values():
        orders = {rank: replica.buffer_order for rank, replica in model.of.items()}
        if len(set(orders.values())) > 1:
            same = len({tuple(sorted(order)) for order in orders.values()}) == 1
            what = "in another order" if same else "of other names"
            yield Finding(
                Category.BUFFER_SYNC,
                outvoted(orders),
                f"the buffers of {model.title} are {what} than on the other ranks: DDP sends them "
                "by place, so they get each other's values",
                "Register the same buffers in the same order on every rank.",
                evidence=tuple(f"rank {r}: {some(o or ('none',))}" for r, o in orders.items()),
            )
        elif model.whole and not any(replica.broadcast_buffers for replica in model.of.values()):
            yield from _drifted(model)


def _drifted(model: Model) -> Iterator[Finding]:
    """Without broadcast_buffers; statistics of batches are commonly left to each rank."""
    batch = set(model.first.batch_buffers)
    found = differing({rank: replica.buffers for rank, replica in model.of.items()})
    names = tuple(name for name in found if name not in batch)
    if names and all(replica.steps for replica in model.of.values()):
        yield Finding(
            Category.BUFFER_SYNC,
            tuple(model.of),
            f"with broadcast_buffers=False the buffer {some(names)} of {model.title} is another "
            "on every rank by now",
            "Leave broadcast_buffers=True, or all_reduce the buffer where it changes.",
            evidence=(f"not the same on {name_ranks(model.of)}: {some(names)}",),
        )
