"""Coverage of each trained parameter: by a reducer, an optimizer, and a gradient of all ranks.

Most rows count the steps, or name the parameters, of which a rank knows that something is missing.
That ranks average by hand what DDP does not is no mistake: then they are equal afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.diagnosis.source_code.patch import through_wrapper
from ddp_notebook.diagnosis.training.replicas import (
    Model,
    by_hand,
    differing,
    may_have_joined,
    named,
    optimizers,
    some,
)
from ddp_notebook.diagnosis.training.table import (
    Compared,
    Row,
    everyone,
    rule,
    those_that_have,
)
from ddp_notebook.model import (
    Decision,
    Finding,
    OptimizerFacts,
    Part,
    Place,
    ReplicaFacts,
    TensorDigest,
    counted,
    name_ranks,
)

_FEWEST_IDLE = 2
"""The fewest steps without any gradient that count: a single one may serve a scheduler."""

_Replicas = Compared[ReplicaFacts]
_Optimizers = Mapping[int, OptimizerFacts]


# -- a gradient of all ranks -------------------------------------------------------------


def _not_by_hand(context: Context) -> Iterable[Model]:
    return (model for model in context.models if not by_hand(model, context.collectives))


def _title(seen: _Replicas) -> str:
    return Model(seen.by_rank).title


def _place(seen: _Replicas, place: str) -> Place | None:
    """Return a place of the culprits: ``bad_place``."""
    return Model(seen.by_rank).place_of(seen.culprits, attrgetter(place))


def _counts(seen: _Replicas, text: Callable[[ReplicaFacts], str]) -> tuple[str, ...]:
    """Return what the culprits counted, and that the replicas differ by now."""
    model = Model(seen.by_rank)
    return (*model.counts(seen.culprits, text), *model.apart)


def _trained_outside(of: Mapping[int, ReplicaFacts], each: ReplicaFacts) -> tuple[str, ...]:
    """Return the parameters that a reducer does not know, and that its rank trains."""
    # Without a gradient, and equal on all ranks, it was frozen for all of this run.
    trained = {digest.name for digest in each.gradients} | set(Model(of).diverged)
    return tuple(name for name in each.outside if name in trained)


def _without_replaced(seen: _Replicas) -> tuple[int, ...]:
    """Return the ranks with unready steps, unless the reducer does not know what came in place."""
    return tuple(
        rank
        for rank, each in seen.by_rank.items()
        if each.unready_steps
        and not (each.unready and set(each.unready) <= set(_trained_outside(seen.by_rank, each)))
    )


# https://github.com/pytorch/pytorch/issues/128949
@rule(
    Row[ReplicaFacts](
        read=attrgetter("unready_steps"),
        says=lambda seen: catalogue.finding(
            "unused-params.not-reduced",
            seen.culprits,
            evidence=_counts(
                seen,
                lambda e: (
                    f"{e.unready_steps} of {e.steps} steps came before all of "
                    f"{some(e.unready or ('its parameters',))} had a gradient"
                ),
            ),
            names=named(seen.culprit.unready) or "some parameters",
            model=_title(seen),
            site=_place(seen, "bad_place"),
        ),
        whose=_without_replaced,
    ),
)
def unused_parameters(context: Context) -> Iterator[Mapping[int, ReplicaFacts]]:
    """Find steps with gradients that were not reduced, as some parameters had none."""
    yield from (model.of for model in context.models)


def _was_reduced(context: Context, ranks: Iterable[int]) -> bool:
    of = context.collectives.of
    return any(record.part is Part.BACKWARD for rank in ranks for record in of.get(rank, ()))


def _bypassed(seen: _Replicas) -> bool:
    # A model may also be called past DDP on purpose, beside forwards that are reduced: then only
    # replicas that differ prove the mistake.
    ranks = those_that_have(seen)
    never = not any(seen.by_rank[rank].forwards for rank in ranks)
    alone = never and not _was_reduced(seen.context, ranks)
    return alone or bool(Model(seen.by_rank).diverged)


def _never_forwarded(seen: _Replicas) -> bool:
    """True where a method of the module was called, and not the module, by all that is known.

    That replicas differ proves that nothing else reduced their gradients.
    """
    went_through = any(replica.forwards or replica.bypasses for replica in seen.by_rank.values())
    reduced = _was_reduced(seen.context, seen.context.collectives.of)
    return not went_through and bool(Model(seen.by_rank).diverged) and not reduced


def _stepped_at(seen: _Replicas) -> Place | None:
    """Return where an optimizer steps that trains this model on all ranks."""
    key, held = seen.culprit.key, optimizers(seen.context.facts).values()
    trains = (
        each
        for each in held
        if all(key in o.replicas and o.steps > o.idle_steps for o in each.values())
    )
    optimizer = next(iter(next(trains, {}).values()), None)
    return optimizer.place if optimizer is not None else None


# https://github.com/jingyaogong/minimind/pull/854
# https://github.com/moojink/openvla-oft/issues/160
# https://github.com/intel/e2eAIOK/pull/198
@rule(
    Row[ReplicaFacts](
        read=attrgetter("bypassed_steps"),
        says=lambda seen: catalogue.finding(
            "ddp-bypass.module-called",
            seen.culprits,
            evidence=_counts(
                seen,
                lambda e: (
                    f"{e.bypassed_steps} of {e.steps} steps bypassed DDP; "
                    f"{counted(e.forwards, 'forward')} through DDP"
                ),
            ),
            name=_name(seen),
            site=_place(seen, "bypass_place"),
            patch=seen.context.sources.changed(
                partial(through_wrapper, name=_name(seen)), _place(seen, "bypass_place")
            ),
        ),
        is_wrong=_bypassed,
        whose=those_that_have,
    ),
    Row[ReplicaFacts](
        read=attrgetter("forwards"),
        says=lambda seen: catalogue.finding(
            "ddp-bypass.no-forward",
            seen.culprits,
            evidence=_counts(seen, lambda e: f"{counted(e.steps, 'step')}, no forward through DDP"),
            name=_name(seen),
            site=_stepped_at(seen),
        ),
        is_wrong=_never_forwarded,
        whose=everyone,
    ),
    most=1,
)
def module_bypass(context: Context) -> Iterator[Mapping[int, ReplicaFacts]]:
    """Find models whose forward was trained on, and did not come through DDP."""
    yield from (model.of for model in _not_by_hand(context))


def _name(seen: _Replicas) -> str:
    return Model(seen.by_rank).first.name or "model"


# https://github.com/modelscope/FunASR/pull/3472
@rule(
    Row[ReplicaFacts](
        read=attrgetter("local_steps"),
        says=lambda seen: catalogue.finding(
            "no-sync-misuse.last-backward",
            seen.culprits,
            evidence=_counts(
                seen,
                lambda e: (
                    f"{e.local_steps} of {e.steps} steps used gradients that were not averaged; "
                    f"{e.no_sync_forwards} of {e.forwards} forwards under no_sync"
                ),
            ),
            model=_title(seen),
            site=_place(seen, "bad_place"),
        ),
        whose=those_that_have,
    ),
)
def no_sync(context: Context) -> Iterator[Mapping[int, ReplicaFacts]]:
    """Find steps with gradients of the rank alone, of models whose replicas differ by now."""
    yield from (model.of for model in _not_by_hand(context) if model.diverged)


# https://github.com/huggingface/accelerate/pull/3762
@rule(
    Row[OptimizerFacts](
        read=attrgetter("pending_steps"),
        says=lambda seen: catalogue.finding(
            "no-sync-misuse.sync-off",
            seen.culprits,
            evidence=by_ranks(
                {rank: seen.by_rank[rank] for rank in seen.culprits},
                lambda e: f"gradient sync was off in {e.pending_steps} of {e.steps} steps",
            ),
            optimizer=seen.culprit.type,
            site=seen.culprit.pending_place,
        ),
        whose=those_that_have,
    ),
)
def kept_back(context: Context) -> Iterator[_Optimizers]:
    """Find steps while gradient sync was off."""
    yield from optimizers(context.facts).values()


# -- in a reducer ------------------------------------------------------------------------

_HARDLY = 0.1


def unwrapped_parameters(context: Context) -> Iterator[Finding]:
    """Find parameters that an optimizer updates and no reducer knows."""
    for model in _not_by_hand(context):
        finding = _OUTSIDE.finding(context, model.of)
        if finding is not None:
            yield finding
        # Those that are in no model at all, of an optimizer that trains this one besides.
        for every in optimizers(context.facts).values():
            of = model.ranks_of(every)
            trains_it = all(model.key in optimizer.replicas[:1] for optimizer in of.values())
            if set(of) != set(model.of) or not model.whole or not trains_it:
                continue
            # What began with other values on each rank is meant to be its own: experts, clients.
            own = differing({rank: optimizer.begins for rank, optimizer in of.items()})
            unlike = differing({rank: optimizer.unwrapped for rank, optimizer in of.items()})
            names = [name for name in unlike if name not in own and not _hardly_apart(of, name)]
            # Ranks that exchange anything large may have joined them in a way that is not seen.
            numels = [digest.numel for digest in next(iter(of.values())).unwrapped]
            if names and not may_have_joined(context.collectives, of, numels):
                yield catalogue.finding(
                    "params-outside-ddp.other-parameters",
                    tuple(of),
                    evidence=(f"differ between {name_ranks(of)}: {some(names)}",),
                    names=named(names),
                )


_OUTSIDE: Row[ReplicaFacts] = Row(
    read=attrgetter("outside"),
    says=lambda seen: catalogue.finding(
        "params-outside-ddp.after-wrapping",
        seen.culprits,
        evidence=_counts(
            seen, lambda e: f"trains {some(_trained_outside(seen.by_rank, e))}, without a hook"
        ),
        names=named(_trained_outside(seen.by_rank, seen.culprit)),
        model=_title(seen),
    ),
    whose=lambda seen: tuple(
        r for r, each in seen.by_rank.items() if _trained_outside(seen.by_rank, each)
    ),
)


def _hardly_apart(of: _Optimizers, name: str) -> bool:
    """The ranks' values differ by far less than training has changed them.

    Rounding and statistics of batches do that, where all train on the same samples.
    """
    # By the few sampled values of each digest, as points in space: how far training has moved them
    # from where they began, against how far the ranks are from each other.
    begins = [_values(optimizer.begins, name) for optimizer in of.values()]
    ends = [_values(optimizer.unwrapped, name) for optimizer in of.values()]
    if len({len(row) for row in (*begins, *ends)}) > 1 or not ends[0]:
        return False
    moved = min(map(math.dist, begins, ends))
    return max(math.dist(ends[0], row) for row in ends) < _HARDLY * moved


def _values(digests: Iterable[TensorDigest], name: str) -> list[float]:
    return [v for digest in digests if digest.name == name for v in digest.sample if v is not None]


# -- in an optimizer ---------------------------------------------------------------------


def detached_optimizers(context: Context) -> Iterator[Finding]:
    """Find optimizers whose tensors never get a gradient, while those of a model are not held."""
    all_of = optimizers(context.facts).values()
    # That none of its tensors gets a gradient is so for healthy optimizers as well: of a half of
    # the model that waits for its turn, or of one that is stepped for its scheduler. So a model
    # must be there that is trained, has tensors of mostly these sizes, and is held by no optimizer.
    held = {key for of in all_of for optimizer in of.values() for key in optimizer.replicas}
    for of in all_of:
        optimizer = next(iter(of.values()))
        if all(
            _FEWEST_IDLE <= optimizer.steps == optimizer.idle_steps for optimizer in of.values()
        ):
            for model in context.models:
                if model.key not in held and _as_large(model, of):
                    yield catalogue.finding(
                        "optimizer-detached.other-tensors",
                        tuple(of),
                        evidence=_idle(
                            of,
                            {
                                rank: f"no optimizer that steps holds parameters of {model.title}, "
                                f"which had {counted(replica.backwards, 'backward')}"
                                for rank, replica in model.of.items()
                            },
                        ),
                        optimizer=optimizer.type,
                        model=model.title,
                        site=optimizer.place,
                    )
            # An optimizer that divides its parameters among the ranks may have none on some.
            sharded = {r: context.facts[r].sharded_without_optimizer for r in of}
            if all(e.numels and e.numels == sharded[r] for r, e in of.items()):
                yield catalogue.finding(
                    "optimizer-detached.fully-shard",
                    tuple(of),
                    evidence=_idle(
                        of,
                        {
                            r: "sharded parameters of the same sizes are in no optimizer, in "
                            f"{counted(context.facts[r].backwards, 'backward')}"
                            for r in of
                        },
                    ),
                    optimizer=optimizer.type,
                    site=optimizer.place,
                )
        elif all(optimizer.unheld for optimizer in of.values()):
            yield catalogue.finding(
                "optimizer-detached.replaced",
                tuple(of),
                evidence=by_ranks(
                    of,
                    lambda e: (
                        f"{e.idle_tensors} tensors of {e.type} got no gradient from any backward; "
                        f"{some(e.unheld)} did, and no optimizer holds them"
                    ),
                ),
                names=named(optimizer.unheld),
                optimizer=optimizer.type,
                site=optimizer.place,
            )


def _as_large(model: Model, of: _Optimizers) -> bool:
    """True of a model that is trained, with parameters most of which have an optimizer's sizes.

    Not all: a part may have been replaced since, such as the head for a new task.
    """
    # As multisets: many layers have one size.
    sizes = Counter(digest.numel for digest in model.first.parameters)
    trained = all(replica.backwards >= _FEWEST_IDLE for replica in model.of.values())
    return (
        trained
        and set(of) == set(model.of)
        and all(
            (Counter(each.numels) & sizes).total() * 2 > max(len(each.numels), sizes.total())
            for each in of.values()
        )
    )


def _idle(of: _Optimizers, instead: Mapping[int, str]) -> tuple[str, ...]:
    """Return that no tensor had a gradient, and which ones do instead, as lines of evidence."""
    return by_ranks(
        {
            rank: f"none of its {len(e.numels)} tensors had a gradient in {e.idle_steps} of "
            f"{counted(e.steps, 'step')}; {instead[rank]}"
            for rank, e in of.items()
        }
    )


def _are_forgotten(seen: _Replicas) -> bool:
    names, runs = seen.by_rank[min(seen.by_rank)].unheld, seen.context.facts.values()
    told = {name for run in runs for each in run.optimizers for name in each.unheld}
    same = all(unheld == names for unheld in seen.values.values())
    return bool(names) and same and not told.issuperset(names)


@rule(
    Row[ReplicaFacts](
        read=attrgetter("unheld"),
        says=lambda seen: catalogue.finding(
            "optimizer-detached.left-out",
            seen.culprits,
            evidence=(
                f"on {name_ranks(seen.by_rank)}: a gradient in each step, in no optimizer, the "
                f"same values after {seen.culprit.steps} steps: {some(seen.culprit.unheld)}",
            ),
            names=named(seen.culprit.unheld),
            model=_title(seen),
        ),
        is_wrong=_are_forgotten,
        whose=everyone,
    ),
)
def unheld_parameters(context: Context) -> Iterator[Mapping[int, ReplicaFacts]]:
    """Find parameters that got gradients, and that no optimizer holds."""
    yield from (model.of for model in context.models)


# -- one tensor under two names ----------------------------------------------------------


def untied(context: Context) -> Iterator[Finding]:
    """Find weights that the code makes one tensor, began with equal values, and are two by now."""
    for model in context.models:
        for pair in model.first.twins:
            line = context.sources.ties(*pair)
            # On every replica both are parameters, and have other values.
            apart = all(
                pair in replica.twins
                and replica.steps
                and len({(d.norm, d.sample) for d in replica.parameters if d.name in pair}) == 2
                for replica in model.of.values()
            )
            if line is None or not apart:
                continue
            one, other = pair
            yield catalogue.finding(
                "weight-tying-lost.two-parameters",
                tuple(model.of),
                evidence=(
                    f"equal when the model was wrapped, not equal after {model.first.steps} steps: "
                    f"{one}, {other}",
                    f"{line}: {line.text}",
                ),
                one=one,
                other=other,
                model=model.title,
                code=line.text,
                decides=Decision(line, "one tensor, says the code"),
            )
