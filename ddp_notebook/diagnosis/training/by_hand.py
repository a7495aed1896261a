"""Rules about models without DDP, whose gradients or parameters ranks exchange by hand.

What the ranks made of each other's gradients shows in a few values: those that the optimizer used
are a sum of what the ranks' own backwards left, each times a weight.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.least_squares import distance, solved
from ddp_notebook.diagnosis.majority import by_ranks, outvoted
from ddp_notebook.diagnosis.source_code.buckets import unsent_bucket
from ddp_notebook.diagnosis.source_code.divisions import chooses_rate_by_world
from ddp_notebook.diagnosis.training.replicas import (
    Model,
    differing,
    exchanged,
    may_have_joined,
    some,
)
from ddp_notebook.diagnosis.training.rules import is_adaptive, optimizers, where
from ddp_notebook.model import (
    Category,
    Collective,
    Finding,
    OptimizerFacts,
    Ranks,
    agree,
    in_brackets,
    name_ranks,
)
from ddp_notebook.model.parallel.split import Forwards

_ROUNDING = 1e-5
_APART = 1e-3
"""Factors of one step that differ by less count as equal."""
_WEIGHT = 1e-2
"""The tolerance of a weight in a sum."""
_FEWEST_STEPS, _FEWEST_EACH, _FEWEST_CHANGES, _FEWEST_BESIDE = 2, 2, 2, 3
_MOST_RANKS = 16
_MEANS = frozenset({"all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor"})
_GATHERING = frozenset(
    {"all_gather", "all_gather_into_tensor", "scatter", "barrier"}
    | {"reduce_scatter", "reduce_scatter_tensor"}
)
"""Operations by which ranks get each other's parts, forward and backward (gloo scatters)."""
_PARTING = frozenset({"all_to_all", "all_to_all_single", "scatter"})
"""gloo scatters in place of an all-to-all with gradients."""
_OUTGOING = frozenset({"send", "reduce", "gather"})
_UNLIKE = 0.1
"""Gradients that differ by more, of their size, are of other samples."""
_FEWEST_VALUES = 4
"""How many nonzero values of gradients must be the same on all ranks."""

_Of = Mapping[int, OptimizerFacts]


def other_beginnings(context: Context) -> Iterator[Finding]:
    """Models that differ when training begins, whose gradients are averaged by hand.

    All ranks step with the same gradients, which they exchanged; that the parameters differ
    before the first step is then no intention.
    """
    for of in _plain(context):
        gradients = [optimizer.first_gradients for optimizer in of.values()]
        weights = {rank: optimizer.first_weights for rank, optimizer in of.items()}
        if not _all_close(gradients) or sum(map(bool, gradients[0])) < _FEWEST_VALUES:
            continue
        # A parameter without a gradient may be a part of a layer, each rank's own.
        complete = all(len(w) <= len(g) for w, g in zip(weights.values(), gradients, strict=True))
        same = _all_close(list(weights.values()))
        if same or not complete or not exchanged(context.collectives, of):
            continue
        yield _different_from_the_start(of, gradients[0], weights)


def _different_from_the_start(
    of: _Of, gradients: Sequence[float], weights: Mapping[int, tuple[float, ...]]
) -> Finding:
    each = next(iter(of.values()))
    return Finding(
        Category.REPLICA_DIVERGENCE,
        outvoted(weights),
        f"the parameters differ between the ranks before the first step of {each.type}, though "
        "its gradients are the same on all: the models did not begin with the same values"
        f"{in_brackets(each.place)}",
        "Have every rank begin with the same parameters: torch.manual_seed(seed), the same on "
        "all, before the model is made; or dist.broadcast(p.data, src=0) for each.",
        evidence=(
            *by_ranks({r: f"parameters begin with {_few(w)}" for r, w in weights.items()}),
            f"gradients of the first step on all ranks: {_few(gradients)}",
        ),
    )


def scaled_apart(context: Context) -> Iterator[Finding]:
    """Gradients that ranks have averaged by hand, and that a few of them multiply by a factor.

    All ranks began with the same parameters, and most step with the same gradients.
    """
    for of in _plain(context):
        gradients = {rank: optimizer.first_gradients for rank, optimizer in of.items()}
        right = max((_ranks_with(gradients, own) for own in gradients.values()), key=len)
        others = {r: _ratio(gradients[right[0]], g) for r, g in gradients.items() if r not in right}
        if not _all_close([optimizer.first_weights for optimizer in of.values()]):
            continue
        if (
            others
            and len(others) < len(right)
            and all(others.values())
            and exchanged(context.collectives, of)
        ):
            each = next(iter(of.values()))
            yield Finding(
                Category.REPLICA_DIVERGENCE,
                tuple(others),
                "the gradients are those of the other ranks, times a factor: they are clipped or "
                f"scaled there alone, and the parameters drift apart{in_brackets(each.place)}",
                "Do the same with the averaged gradients on every rank: clip on all or on none.",
                evidence=tuple(
                    f"rank {rank}: times {factor:.4g} in the first step"
                    for rank, factor in others.items()
                ),
            )


def skipped_steps(context: Context) -> Iterator[Finding]:
    """Ranks average their gradients by hand, and some make fewer steps with them than others."""
    for of in _plain(context):
        steps = {rank: optimizer.steps for rank, optimizer in of.items()}
        # What is neither left alone nor multiplied by one factor is mixed with that of others.
        mixed = all(2 * e.factors.count(None) > len(e.factors) for e in of.values())
        if len(set(steps.values())) == 1 or not mixed or not _drifts_from_equal(context, of):
            continue
        each = next(iter(of.values()))
        yield Finding(
            Category.REPLICA_DIVERGENCE,
            outvoted(steps),
            f"{each.type} does not make as many steps on every rank, though the ranks average "
            "their gradients: where one skips a step by a value of its own, the parameters drift "
            f"apart{in_brackets(each.place)}",
            "Decide on all ranks together whether to step: by the averaged gradients, or by a flag "
            "that all_reduce gives to all.",
            evidence=(
                *by_ranks({r: f"{n} steps, {_backwards(context, r)}" for r, n in steps.items()}),
                "the same parameters on all ranks before the first step, and not afterwards",
            ),
        )


def _backwards(context: Context, rank: int) -> str:
    return f"{context.facts[rank].backwards} backwards"


def _drifts_from_equal(context: Context, of: _Of) -> bool:
    """The parameters were the same, are no more, and nothing but the steps changed them."""
    equal = _all_close([optimizer.first_weights for optimizer in of.values()])
    seen = [
        [optimizer.last_weights, *(_flat(sample.weights) for sample in optimizer.later)]
        for optimizer in of.values()
    ]
    apart = any(not _all_close(weights) for weights in zip(*seen, strict=False))
    together = len({context.facts[rank].backwards for rank in of}) == 1
    moved = any(optimizer.moved_steps for optimizer in of.values())
    return equal and apart and together and not moved and exchanged(context.collectives, of)


def never_fetched(context: Context) -> Iterator[Finding]:
    """Ranks send their gradients to one that steps, and never get its new parameters."""
    for of in optimizers(context.facts).values():
        (server, each), *others = of.items()
        stepless = [rank for rank, facts in sorted(context.facts.items()) if not facts.optimizers]
        if others or each.steps < _FEWEST_BESIDE or each.replicas:
            continue
        sizes = {*each.numels, sum(each.numels)} - {1}
        stale = tuple(r for r in stepless if _is_stale(context, r, sizes))
        if stale:
            yield Finding(
                Category.REPLICA_DIVERGENCE,
                stale,
                f"{name_ranks(stale)} compute gradients for {each.type} on rank {server}, and get "
                "nothing of its parameters after the first backward: the gradients are those of "
                f"the model as it was at first{in_brackets(each.place)}",
                f"Send the parameters from rank {server} to the others after each step (send, "
                "broadcast), and copy them into the model before its next forward.",
                evidence=(
                    f"rank {server}: {each.steps} steps of {each.type}",
                    *by_ranks({r: f"{_backwards(context, r)}, no steps" for r in stale}),
                ),
            )


def _is_stale(context: Context, rank: int, sizes: Container[int]) -> bool:
    """It sent tensors of these sizes after several backwards, and got none of any size.

    Or nothing is known of what it sent: then the answer is asked for again when it is.
    """
    later = [r for r in context.collectives.of.get(rank, ()) if r.backwards and r.numel > 1]
    sent = {r.backwards for r in later if r.operation in _OUTGOING and r.numel in sizes}
    only = len(sent) >= _FEWEST_BESIDE and all(r.operation in _OUTGOING for r in later)
    unknown = not context.collectives.of
    return context.facts[rank].backwards >= _FEWEST_BESIDE and (only or unknown)


def _plain(context: Context) -> Iterator[_Of]:
    """The optimizers that all ranks have, without DDP and of nothing that is sharded."""
    for of in optimizers(context.facts).values():
        plain = not any(optimizer.replicas or optimizer.mesh for optimizer in of.values())
        if plain and len(of) > 1 and set(of) == set(context.facts):
            yield of


def _ranks_with(gradients: Mapping[int, tuple[float, ...]], own: tuple[float, ...]) -> Ranks:
    return tuple(rank for rank, gradient in gradients.items() if _all_close([gradient, own]))


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The factor from `one` to `other`; 0 if no single factor gives it."""
    ratios = [b / a for a, b in zip(one, other, strict=False) if a]
    if len(one) != len(other) or len(ratios) < _FEWEST_VALUES:
        return 0.0
    return ratios[0] if max(ratios) - min(ratios) <= _APART * abs(ratios[0]) else 0.0


def _all_close(rows: Sequence[Sequence[float]]) -> bool:
    first = rows[0]
    return all(
        len(row) == len(first)
        and all(
            abs(a - b) <= _ROUNDING * max(abs(a), abs(b)) for a, b in zip(row, first, strict=True)
        )
        for row in rows
    )


def _few(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values[:3])


# -- what ranks made of each other's gradients -------------------------------------------


@dataclass(frozen=True)
class _Trained:
    """An optimizer without DDP, on all ranks; enough of its steps was seen."""

    context: Context
    of: _Of

    @property
    def ranks(self) -> Ranks:
        return tuple(self.of)

    @property
    def each(self) -> OptimizerFacts:
        """The optimizer on the lowest rank."""
        return next(iter(self.of.values()))

    @property
    def at(self) -> str:
        """The line of its first step."""
        return in_brackets(self.each.place)

    @property
    def began_equal(self) -> bool:
        """Its parameters were the same on all ranks, and not all of them zero."""
        begins = {rank: optimizer.begins for rank, optimizer in self.of.items()}
        return any(digest.norm for digest in self.each.begins) and not differing(begins)

    @property
    def alone(self) -> bool:
        """Each rank stepped with its own gradients, and nothing else changed the parameters.

        They began with the same values, and are not the same any more.
        """
        kinds = {kind for row in self.kinds() for kind in row}
        if "kept" not in kinds or kinds - {"kept", ""}:
            return False
        moved = any(optimizer.moved_steps for optimizer in self.of.values())
        apart = not _all_close([optimizer.last_weights for optimizer in self.of.values()])
        return self.began_equal and apart and not moved

    @property
    def on_other_data(self) -> bool:
        """The ranks' own gradients differ by more than rounding and statistics of batches make."""
        return any(
            _are_unlike(first, row)
            for first, *others in zip(*self._own_rows(), strict=False)
            for row in others
        )

    def _own_rows(self) -> list[list[list[float]]]:
        return [
            [_flat(sample.own) for sample in optimizer.samples] for optimizer in self.of.values()
        ]

    @property
    def split(self) -> bool:
        """True where ranks may have parts of one model: they communicate within a forward."""
        return any(self.context.facts[rank].split.forwards for rank in self.of) or any(
            r.is_point_to_point or r.operation in _PARTING
            for records in self.context.collectives.of.values()
            for r in records
        )

    def kinds(self) -> list[tuple[str, ...]]:
        """For each step seen, what became of each parameter's gradients.

        ``averaged``: the same on all ranks; ``kept``: each rank used its own; ``scaled``: its
        own, times a number; "" for unknown.
        """
        return [
            tuple(map(_kind, self._by_parameter(step, "own"), self._by_parameter(step, "used")))
            for step in range(len(self.each.samples))
        ]

    def kinds_unclipped(self) -> list[tuple[str, ...]]:
        """The same, where each rank has multiplied all of its gradients once more, as by clipping.

        By what, is seen where a rank used its own.
        """
        found = []
        for step in range(len(self.each.samples)):
            own, used = self._by_parameter(step, "own"), self._by_parameter(step, "used")
            scaled = (map(_ratio, *pair) for pair in zip(own, used, strict=True) if all(pair[0]))
            factors = next((list(each) for each in map(list, scaled) if all(each)), None)
            if factors is not None:
                used = [
                    tuple(tuple(v / by for v in row) for row, by in zip(rows, factors, strict=True))
                    for rows in used
                ]
            found.append(tuple(map(_kind, own, used)))
        return found

    def later_kinds(self) -> list[tuple[str, ...]]:
        """The same of later steps, which are some time apart."""
        rows = [optimizer.later for optimizer in self.of.values()]
        return [
            tuple(
                map(
                    _kind,
                    zip(*(each.own for each in step), strict=False),
                    zip(*(each.used for each in step), strict=False),
                )
            )
            for step in zip(*rows, strict=False)
        ]

    def _by_parameter(self, step: int, which: str) -> list[tuple[tuple[float, ...], ...]]:
        rows = [getattr(optimizer.samples[step], which) for optimizer in self.of.values()]
        return list(zip(*rows, strict=False))

    def weights(self, at: int = 0) -> list[tuple[float, ...] | None]:
        """The weights of the ranks' own gradients in what the `at`-th rank used, in each step."""
        return [self._weights(step, at) for step in range(len(self.each.samples))]

    def _weights(self, step: int, at: int) -> tuple[float, ...] | None:
        samples = [optimizer.samples[step] for optimizer in self.of.values()]
        own = [_flat(sample.own) for sample in samples]
        used = _flat(samples[at].used)
        if {len(row) for row in own} != {len(used)} or len(used) < _FEWEST_EACH * len(own):
            return None
        return solved(own, used)

    def used_the_same(self) -> bool:
        """All ranks stepped with the same gradients, as far as was seen."""
        rows = [tuple(_flat(e.used) for e in optimizer.samples) for optimizer in self.of.values()]
        return all(_all_close(step) for step in zip(*rows, strict=True))

    def sent(self, operations: Container[str], backwards: Container[int]) -> list[set[int]]:
        """The sizes of what each rank exchanged by hand, after so many backwards."""
        of = self.context.collectives.of
        return [
            {
                r.numel
                for r in of.get(rank, ())
                if r.part is None and r.operation in operations and r.backwards in backwards
            }
            for rank in self.of
        ]

    def finding(
        self, category: Category, cause: str, remedy: str, evidence: tuple[str, ...]
    ) -> Finding:
        return Finding(category, self.ranks, f"{cause}{self.at}", remedy, evidence=evidence)


def _trained(context: Context) -> Iterator[_Trained]:
    for of in _plain(context):
        comparable = (
            len(
                {
                    (optimizer.numels, optimizer.steps, len(optimizer.samples))
                    for optimizer in of.values()
                }
            )
            == 1
        )
        trained = _Trained(context, of)
        if comparable and len(of) <= _MOST_RANKS and len(trained.each.samples) >= _FEWEST_STEPS:
            yield trained


def trained_together(context: Context) -> list[Model]:
    """The models that all ranks train as one: with DDP, by hand, or sharded over all of them.

    Of the last two little more is known than how they were used.
    """
    plain = models_without_ddp(context)
    if plain and not _is_one_training(context, tuple(sorted(context.facts))):
        plain = []
    return [*context.models.values(), *plain]


def models_without_ddp(context: Context) -> list[Model]:
    """The models that no DDP object contains; none where ranks do not have the same ones."""
    ranks = sorted(context.facts)
    rows = [context.facts[rank].plain for rank in ranks]
    if len({tuple(replica.key for replica in row) for row in rows}) != 1:
        return []
    return [
        Model({r: replace(e, group_size=len(ranks)) for r, e in zip(ranks, row, strict=True)})
        for row in zip(*rows, strict=True)
    ]


def _is_one_training(context: Context, ranks: Ranks) -> bool:
    """True where FSDP2 shards over all ranks, or all step with gradients that they averaged."""
    sharded = {context.facts[rank].split.data_ranks for rank in ranks} == {ranks}
    of = list(_trained(context))
    without = [o for o in optimizers(context.facts).values() if not _is_of_models(o)]
    by_hand = bool(of) and len(of) == len(without) and all(map(_is_averaged, of))
    return len(ranks) > 1 and (sharded or by_hand)


def _is_of_models(of: _Of) -> bool:
    return all(optimizer.replicas for optimizer in of.values())


def _is_averaged(trained: _Trained) -> bool:
    """Ranks with the same samples have the same gradients, whether they average them or not."""
    kinds = {kind for row in trained.kinds() for kind in row}
    same = trained.used_the_same() and exchanged(trained.context.collectives, trained.of)
    return ("averaged" in kinds or same) and "kept" not in kinds and not trained.split


def summed_gradients(context: Context) -> Iterator[Finding]:
    """Gradients are added up over the ranks, and neither they nor the loss are divided."""
    for trained in _trained(context) if _are_whole_means(context) else ():
        size, each = len(trained.of), trained.each
        summed = trained.used_the_same() and all(_are(1.0, w) for w in trained.weights())
        scaled = is_adaptive(each) or chooses_rate_by_world(context.sources, where(context.facts))
        if summed and not scaled and not trained.split:
            yield trained.finding(
                Category.LOSS_SCALING,
                f"the gradients are added up over {size} ranks, and each rank's loss is a mean: "
                f"each step of {each.type} is {size} times as large as with the mean over all "
                "samples",
                f"Divide after all_reduce: p.grad /= dist.get_world_size(), here {size}.",
                (
                    f"what {each.type} used is the sum of what the ranks' backwards left, in "
                    f"{len(each.samples)} steps looked at",
                    "the first losses on every rank are means, and not divided",
                ),
            )


def divided_twice(context: Context) -> Iterator[Finding]:
    """What ranks add up by hand is divided by their number twice, before and after.

    Only where each step has one backward: otherwise a number of micro-batches may be as large.
    """
    for trained in _trained(context) if _are_whole_means(context) else ():
        size, each = len(trained.of), trained.each
        twice = all(_are(1 / size**2, w) for w in trained.weights()) and trained.used_the_same()
        single = all([b for b, _ in e.windows] == [1] for e in trained.of.values())
        scaled = is_adaptive(each) or chooses_rate_by_world(context.sources, where(context.facts))
        if twice and single and not scaled and not trained.split:
            yield trained.finding(
                Category.LOSS_SCALING,
                f"the gradients are divided by the number of ranks, {size}, twice: each step of "
                f"{each.type} is {size} times smaller than with the mean over all samples",
                "Divide once, before or after all_reduce; ReduceOp.AVG divides by itself.",
                (
                    f"what {each.type} used is the sum of what the ranks' backwards left, divided "
                    f"by {size**2}, in {len(each.samples)} steps looked at",
                    "the first losses on every rank are means, and not divided",
                ),
            )


def _are_whole_means(context: Context) -> bool:
    """True when each loss that is known is a mean, and not divided."""
    losses = [loss for facts in context.facts.values() for loss in facts.losses]
    return bool(losses) and all(e.mean and _is(e.factor, 1.0) for e in losses)


def scaled_before_averaged(context: Context) -> Iterator[Finding]:
    """Each rank multiplies its gradients by a factor of its own, then they are averaged.

    Weights by numbers of samples add up to one; those of clipping are all at most one's share.
    """
    for trained in _trained(context):
        size = len(trained.of)
        weights = [w for w in trained.weights() if w is not None and _are_clipped(w)]
        if len(weights) < len(trained.each.samples) or not trained.used_the_same():
            continue
        yield trained.finding(
            Category.LOCAL_STATISTIC,
            "each rank makes its own gradients smaller by another factor before they are "
            "averaged, as clipping by the rank's own norm does",
            "Average first, then clip: torch.nn.utils.clip_grad_norm_ after the all_reduce.",
            tuple(
                f"rank {rank}: times {', '.join(f'{w[i] * size:.3g}' for w in weights)} before "
                "the average"
                for i, rank in enumerate(trained.of)
            ),
        )


def averaged_in_part(context: Context) -> Iterator[Finding]:
    """Some parameters' gradients are averaged, and those of others between them are not."""
    for trained in _trained(context):
        rows, up_to = _kinds_before_clipping(trained)
        changes = sum(a != b for a, b in pairwise(filter(None, rows[0])))
        # A part of its own may be meant to be each rank's: a head, an embedding.
        apart = changes >= _FEWEST_CHANGES or _are_last_of_a_backward(trained, rows[0])
        between = len(set(rows)) == 1 and apart
        if not between:
            rows = _with_what_came_later(trained, rows)
        kept = _of_kind(trained, rows[-1], "kept", "scaled")
        averaged = _of_kind(trained, rows[-1], "averaged")
        if not (kept and averaged and _began_as_one(trained)):
            continue
        yield trained.finding(
            Category.REPLICA_DIVERGENCE,
            f"the gradients of {some(averaged)} are averaged over the ranks, those of "
            f"{some(kept)} are not: every rank steps with its own, and they drift apart",
            "Average the gradients of every parameter that all ranks train: for p in "
            "model.parameters(): dist.all_reduce(p.grad); p.grad /= world_size.",
            (
                f"in {len(rows)} steps the same on all ranks: {some(averaged)}; what each rank's "
                f"own backward left: {some(kept)}{up_to}",
                "all began with the same values",
            ),
        )


def unregistered(context: Context) -> Iterator[Finding]:
    """Modules in a plain dict or list: their model does not have their parameters.

    So what ranks average by model.parameters() leaves them out, and the optimizer, which has them
    from elsewhere, steps with each rank's own gradients.
    """
    models = [model for facts in context.facts.values() for model in facts.plain]
    names = list(dict.fromkeys(name for model in models for name in model.unregistered))
    for trained in filter(_began_as_one, _trained(context) if names else ()):
        kinds = trained.kinds()[0]
        kept, averaged = (_of_kind(trained, kinds, kind) for kind in ("kept", "averaged"))
        if not (kept and averaged):
            continue
        yield trained.finding(
            Category.PARAMS_OUTSIDE_DDP,
            f"{some(names)} {agree(names, 'is a module', 'are modules')} in a plain dict or list: "
            "model.parameters() leaves out what they have. The ranks average the gradients of the "
            "rest, and every rank steps with its own of these",
            "Put them into nn.ModuleDict or nn.ModuleList: then they are parts of the model, also "
            "for DistributedDataParallel, state_dict and to(device).",
            (
                f"the same on all ranks: gradients of {some(averaged)}; what each rank's own "
                f"backward left: {some(kept)}",
                "all began with the same values",
            ),
        )


def _began_as_one(trained: _Trained) -> bool:
    return trained.began_equal and not trained.split


def _kinds_before_clipping(trained: _Trained) -> tuple[list[tuple[str, ...]], str]:
    """The kinds, and what is to be said where they are seen only without what clipping did."""
    rows = trained.kinds()
    if "averaged" not in rows[0] and "scaled" in rows[0]:
        return trained.kinds_unclipped(), "; all times one number of the rank's"
    return rows, ""


def _are_last_of_a_backward(trained: _Trained, row: tuple[str, ...]) -> bool:
    """True where one hook, or one loop, has buckets of gradients reduced, and the last are not.

    They are of the first layers: what waits in a bucket that is sent when it is full. Also where
    the records are not known: then the answer is asked for again when they are.
    """
    order = [kind for kind in row if kind]
    averaged = order.count("averaged")
    kept = len(order) - averaged
    are_first = kept > 0 and order[kept:] == ["averaged"] * averaged
    of = trained.context.collectives.of
    return are_first and (not of or all(_leaves_one(trained, of.get(r, ())) for r in trained.of))


def _leaves_one(trained: _Trained, issued: Sequence[Collective]) -> bool:
    """Whether what sends a rank's buckets leaves the last one unsent."""
    sizes = {digest.numel for digest in trained.each.begins}
    buckets = [each for each in issued if each.part is None and each.numel not in sizes]
    if trained.each.one_hook and any(map(_is_in_backward, buckets)):
        return True
    paths = dict.fromkeys(record.path for record in buckets)
    return any(unsent_bucket(trained.context.sources, path) for path in paths)


def _is_in_backward(record: Collective) -> bool:
    return any("backward(" in place.text for place in record.path[:-1])


def left_with_experts(context: Context) -> Iterator[Finding]:
    """Ranks have experts of their own, and leave out of the averages what is not theirs as well.

    A router, say: it began the same on all ranks, the experts beside it did not.
    """
    for trained in _trained(context):
        rows = trained.kinds()
        kept = _of_kind(trained, rows[0], "kept", "scaled")
        averaged = _of_kind(trained, rows[0], "averaged")
        own, shared = _own_and_shared(trained, kept)
        may_have_experts = trained.split or not context.collectives.of
        if len(set(rows)) > 1 or not (averaged and shared and own and may_have_experts):
            continue
        yield trained.finding(
            Category.REPLICA_DIVERGENCE,
            f"{some(shared)} began the same on all ranks and {agree(shared, 'is', 'are')} left out "
            "when the ranks average gradients, together with experts of each rank's own: every "
            "rank steps with its own gradients of it, and routes otherwise than the others",
            "Leave only the experts out, not what all ranks have: average the gradients of the "
            "router (gate) as well.",
            (
                f"the same on all ranks in {len(rows)} steps: {some(averaged)}; what each rank's "
                f"own backward left: {some(kept)}",
                f"began with values of each rank's own: {some(own)}",
            ),
        )


def _own_and_shared(trained: _Trained, names: list[str]) -> tuple[list[str], list[str]]:
    """Those of these parameters that began with other values on each rank, or with the same.

    Not what begins as a constant, such as a bias: that tells nothing.
    """
    begins = {rank: optimizer.begins for rank, optimizer in trained.of.items()}
    constant = {digest.name for digest in trained.each.begins if len(set(digest.sample)) < 2}
    own = [name for name in differing(begins) if name in names]
    return own, [name for name in names if name not in constant.union(own)]


def _with_what_came_later(trained: _Trained, rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The kinds of later steps, if all that is then kept was not trained at first, or is nothing.

    What was unfrozen since then is in no list that was made before.
    """
    first, later = rows[0], trained.later_kinds()
    averaged = len(set(rows)) == 1 and "averaged" in first and "kept" not in first
    unfrozen = later and all(
        kind != "kept" or before == ""
        for row in later
        for kind, before in zip(row, first, strict=False)
    )
    return later if averaged and unfrozen else [()]


def _of_kind(trained: _Trained, kinds: Sequence[str], *wanted: str) -> list[str]:
    named = zip(trained.each.sampled, kinds, strict=False)
    return [name for name, kind in named if kind in wanted]


def reduced_to_one(context: Context) -> Iterator[Finding]:
    """The ranks send their gradients to one of them, and all of them step."""
    for trained in _trained(context):
        even = [all(map(_is_even, trained.weights(i))) for i in range(len(trained.of))]
        moved = any(optimizer.moved_steps for optimizer in trained.of.values())
        if sum(even) != 1 or moved or trained.used_the_same():
            continue
        root = trained.ranks[even.index(True)]
        if _reduces_to(context, root):
            yield trained.finding(
                Category.REPLICA_DIVERGENCE,
                f"dist.reduce gives the sum of the gradients to rank {root} alone, and every rank "
                "steps with what it has: the parameters drift apart",
                "Use dist.all_reduce for gradients that every rank's optimizer uses.",
                (
                    f"rank {root} used a sum of all ranks' gradients, the others did not, in "
                    f"{len(trained.each.samples)} steps",
                ),
            )


def unused_averages(context: Context) -> Iterator[Finding]:
    """Ranks exchange what has the sizes of their parameters; neither these nor gradients change."""
    for trained in _trained(context):
        each = trained.each
        sizes = set(each.numels) - {1}
        sent = trained.sent(_MEANS, range(1, each.watched_steps))
        all_of_it = all(sizes <= own or sum(each.numels) in own for own in sent)
        unknown = not context.collectives.of
        if trained.alone and not trained.split and (unknown or (sizes and all_of_it)):
            yield trained.finding(
                Category.REPLICA_DIVERGENCE,
                "the ranks exchange tensors of the parameters' sizes, and what comes of it goes "
                "into no parameter and no gradient: each rank trains alone",
                "Reduce the tensor itself, or copy the result back: p.data.copy_(mean).",
                (
                    f"in {each.watched_steps} steps nothing but {each.type} changed the "
                    "parameters, with what each rank's own backward left",
                    "the same on all ranks at first, and not afterwards",
                ),
            )


def beside_ddp(context: Context) -> Iterator[Finding]:
    """A model that began the same on all ranks is trained in no DDP, beside one that is in it.

    For most of the run: what is made for a while, and thrown away, may be a rank's own.
    """
    models = [model for model in context.models.values() if _is_trained_by_all(context, model)]
    for model in models[:1]:
        for trained in _trained(context):
            if _is_alone_throughout(trained):
                yield _beside(trained, model)


def _is_trained_by_all(context: Context, model: Model) -> bool:
    everywhere = model.whole and set(model.of) == set(context.facts)
    return bool(everywhere and model.first.forwards and model.first.steps >= _FEWEST_BESIDE)


def _is_alone_throughout(trained: _Trained) -> bool:
    facts = trained.context.facts
    short = any(
        2 * (optimizer.span[1] - optimizer.span[0]) < facts[rank].backwards
        for rank, optimizer in trained.of.items()
    )
    joined = may_have_joined(trained.context.collectives, trained.of, trained.each.numels)
    return trained.alone and not (short or joined or trained.split) and trained.on_other_data


def _beside(trained: _Trained, model: Model) -> Finding:
    each = trained.each
    return trained.finding(
        Category.PARAMS_OUTSIDE_DDP,
        f"{each.type} trains {len(each.numels)} parameters in no DistributedDataParallel, "
        f"beside {model.title}: they began the same on all ranks, nothing averages their "
        "gradients, and every rank has its own values by now",
        "Wrap that model in DistributedDataParallel as well.",
        (
            f"in {each.watched_steps} steps nothing but {each.type} changed them, with what "
            "each rank's own backward left",
            "the same on all ranks at first, and not afterwards",
        ),
    )


def unsummed_parts(context: Context) -> Iterator[Finding]:
    """Ranks have parts of a sequence or a batch, gather each other's, and step with their own.

    Their samples differ, and the parameters began the same: these are not split, the samples are.
    """
    for trained in _trained(context):
        of = {rank: context.facts[rank].split.forwards for rank in trained.of}
        if _got_other_inputs(of) and trained.alone and _only_gathered(context):
            place = next((e.place for those in of.values() for e in those if e.place), None)
            yield trained.finding(
                Category.REPLICA_DIVERGENCE,
                "each rank computes on a part of its own and gathers what the others have"
                f"{in_brackets(place)}, but the gradients of the parameters, which all of them "
                "have, are not summed: every rank steps with those of its part",
                "all_reduce every parameter's gradient over the ranks that share the samples, and "
                "divide as your loss needs it; or wrap the model in DistributedDataParallel.",
                (
                    "the model got other inputs on each rank, and gathered in its forward",
                    "the parameters were the same on all ranks at first, and are not any more",
                ),
            )


def _got_other_inputs(of: Mapping[int, Sequence[Forwards]]) -> bool:
    rows = [tuple(e.hash for forwards in those for e in forwards.inputs) for those in of.values()]
    return len(set(rows)) == len(rows) and all(row and "" not in row for row in rows)


def _only_gathered(context: Context) -> bool:
    """The ranks exchanged more than numbers in training only to see each other's parts.

    A gather's own backward may add the gradients of what was gathered up.
    """
    return all(
        r.operation in _GATHERING or _is_in_function(r)
        for records in context.collectives.of.values()
        for r in records
        if r.part is None and r.numel > 1 and r.backwards
    )


def _is_in_function(record: Collective) -> bool:
    """True of what a forward or backward calls, such as those of a torch.autograd.Function."""
    return bool(record.path) and record.path[-1].function in ("forward", "backward")


def _are_unlike(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) != len(other) or distance(one, other) > _UNLIKE


def _kind(own: Sequence[Sequence[float]], used: Sequence[Sequence[float]]) -> str:
    if not all(own) or _all_close(own):
        return ""
    if _all_close(used):
        return "averaged"
    pairs = list(zip(own, used, strict=True))
    if all(map(_all_close, pairs)):
        return "kept"
    return "scaled" if all(_ratio(*pair) for pair in pairs) else "other"


def _flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


def _are_clipped(weights: tuple[float, ...]) -> bool:
    """No rank's gradients count more than in an average, and some count less than others."""
    share = 1 / len(weights)
    low, high = min(weights), max(weights)
    return 0 < low < (1 - 10 * _WEIGHT) * high and high <= (1 + _WEIGHT) * share


def _is_even(weights: tuple[float, ...] | None) -> bool:
    """True of a sum or a mean over all ranks."""
    return weights is not None and (_are(1.0, weights) or _are(1 / len(weights), weights))


def _are(wanted: float, weights: tuple[float, ...] | None) -> bool:
    return weights is not None and all(_is(weight, wanted) for weight in weights)


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _WEIGHT * wanted


def _reduces_to(context: Context, root: int) -> bool:
    """Every rank called reduce to this one; or it is not known yet what they called."""
    sent = context.collectives.of
    return not sent or all(
        any(r.operation == "reduce" and r.root == root and r.part is None for r in records)
        for records in sent.values()
    )
