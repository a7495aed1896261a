"""Values that must be the same on all ranks of one training, or on none: a table of rows.

The scope of a row holds its premise, such as that optimizers made as many steps of one training.
Ranks that exchange nothing may differ in anything, so that no row compares them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, ne

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import outvoted
from ddp_notebook.diagnosis.source_code.patch import set_epoch
from ddp_notebook.diagnosis.source_code.singled_out import strayed
from ddp_notebook.diagnosis.source_code.training_code import draw_around
from ddp_notebook.diagnosis.training.replicas import (
    Model,
    by_hand,
    by_key,
    differ,
    differing,
    evaluated_together,
    exchanging,
    flat_sizes,
    named,
    optimizers,
    some,
)
from ddp_notebook.diagnosis.training.table import Compared, Row, differs, everyone, rule
from ddp_notebook.model import (
    Collective,
    Copy,
    EvaluationFacts,
    Finding,
    Input,
    LoaderFacts,
    OptimizerFacts,
    Part,
    Place,
    Ranks,
    ReplicaFacts,
    RunFacts,
    SamplerFacts,
    StepStart,
    counted,
    name_ranks,
)

# -- optimizers --------------------------------------------------------------------------

_RATE = ("lr", "learning_rate")
_SHOWN_METRICS = 4


def _of_one_group(context: Context) -> Iterator[dict[int, OptimizerFacts]]:
    """Yield the optimizers of a run, those of models in groups of their own for each group."""
    # Pipelines and ensembles give each group of ranks a model of its own under one key: there a
    # learning rate of its own is meant, unless the groups average by hand what they hold.
    for of in optimizers(context.facts).values():
        apart: dict[Ranks, dict[int, OptimizerFacts]] = {}
        for rank, optimizer in of.items():
            groups = [
                model.of[rank].group
                for model in context.models
                if model.key in optimizer.replicas and rank in model.of
            ]
            apart.setdefault(max(groups, key=len, default=()), {})[rank] = optimizer
        keys = {key for optimizer in of.values() for key in optimizer.replicas}
        models = [model for model in context.models if model.key in keys]
        joined = any(by_hand(model, context.collectives) for model in models)
        yield from [of] if joined else apart.values()


def _read_other_metrics(of: Mapping[int, OptimizerFacts]) -> bool:
    metrics = [optimizer.metrics for optimizer in of.values()]
    return () not in metrics and len(set(metrics)) > 1


def _other_rates(seen: Compared[OptimizerFacts]) -> Finding:
    rates = {rank: _rates(optimizer) for rank, optimizer in seen.by_rank.items()}
    by_metric = _read_other_metrics(seen.by_rank)
    return catalogue.finding(
        "replica-divergence.metric" if by_metric else "replica-divergence.rate",
        seen.culprits,
        evidence=tuple(_rates_shown(seen)),
        optimizer=seen.culprit.type,
        site=seen.culprit.place,
        **seen.against(rates),
    )


def _rates_differ(seen: Compared[OptimizerFacts]) -> bool:
    """True where ranks have different learning rates, and each can be read: no GPU works on one."""
    return differs(seen) and not any(None in rates for rates in seen.values.values())


def _rates(optimizer: OptimizerFacts) -> str:
    return ", ".join("?" if lr is None else f"{lr:g}" for lr in optimizer.lrs)


def _rates_shown(seen: Compared[OptimizerFacts]) -> Iterator[str]:
    yield from seen.lines(lambda optimizer: f"learning rate {_rates(optimizer)}")
    for rank, optimizer in seen.by_rank.items() if _read_other_metrics(seen.by_rank) else ():
        first = ", ".join(f"{value:.6g}" for value in optimizer.metrics[:_SHOWN_METRICS])
        more = " ..." if len(optimizer.metrics) > _SHOWN_METRICS else ""
        yield f"rank {rank}: its metric was {first}{more}"


def _own_options(seen: Compared[OptimizerFacts]) -> dict[int, tuple[str, ...]]:
    """Return each rank's options that not all have; all of them where these are the same."""
    # Of ten options the one that differs is to be named, and not all ten of each rank.
    common = set.intersection(*map(set, seen.values.values()))
    return {
        r: tuple(e for e in dict.fromkeys(options) if e not in common) or options
        for r, options in seen.values.items()
    }


@rule(
    Row[OptimizerFacts](
        read=attrgetter("lrs"),
        says=_other_rates,
        is_wrong=_rates_differ,
        whose=lambda seen: (
            outvoted({rank: optimizer.metrics for rank, optimizer in seen.by_rank.items()})
            if _read_other_metrics(seen.by_rank)
            else strayed(seen.context.sources, seen.values, _RATE)
        ),
    ),
    Row[OptimizerFacts](
        read=attrgetter("options"),
        says=lambda seen: catalogue.finding(
            "replica-divergence.option",
            seen.culprits,
            evidence=seen.lines(lambda optimizer: ", ".join(optimizer.options[:8])),
            optimizer=seen.culprit.type,
            site=seen.culprit.place,
            **seen.against({rank: some(own, 2) for rank, own in _own_options(seen).items()}),
        ),
        is_wrong=lambda seen: differs(seen) and len(set(map(len, seen.values.values()))) == 1,
        whose=lambda seen: strayed(
            seen.context.sources,
            seen.values,
            {each.partition("=")[0] for own in _own_options(seen).values() for each in own},
        ),
    ),
)
def learning_rates(context: Context) -> Iterator[dict[int, OptimizerFacts]]:
    """Compare the optimizers of one training that made as many steps on all of their ranks.

    Ranks that exchange nothing may try one value each.
    """
    for of in _of_one_group(context):
        together = all(optimizer.replicas or optimizer.mesh for optimizer in of.values())
        for part in [of] if together else exchanging(context.collectives, of):
            if len(part) > 1 and len({optimizer.steps for optimizer in part.values()}) == 1:
                yield part


# -- settings that change what is computed -----------------------------------------------


def _whose_setting(seen: Compared[str]) -> Ranks:
    last = _setting(seen).rpartition(".")[2].removesuffix("()")
    what = last.removeprefix("get_").removeprefix("are_").removesuffix("_enabled")
    return strayed(seen.context.sources, seen.values, (last, f"set_{what}", f"use_{what}"))


def _setter(name: str) -> str:
    """Return ``torch.set_default_dtype(...)`` of ``torch.get_default_dtype()``."""
    setter = name.replace(".get_", ".set_").replace(".are_", ".use_").replace("_enabled", "")
    return setter.replace("()", "(...)")


def _setting(seen: Compared[str]) -> str:
    return seen.by_rank[min(seen.by_rank)].partition("=")[0]


@rule(
    Row[str](
        read=lambda setting: setting,
        says=lambda seen: catalogue.finding(
            "numerics-mismatch.setting",
            seen.culprits,
            evidence=seen.lines(str),
            setting=_setting(seen),
            setter=_setter(_setting(seen)),
            **seen.against({rank: text.partition("=")[2] for rank, text in seen.by_rank.items()}),
        ),
        whose=_whose_setting,
    ),
)
def other_precision(context: Context) -> Iterator[dict[int, str]]:
    """Compare ranks that train one model in the first setting (``name=value``) that differs."""
    for model in context.models:
        settings = {
            rank: (*context.facts[rank].precision, f"torch.autocast={replica.autocast or 'off'}")
            for rank, replica in model.of.items()
            if replica.forwards
        }
        # Settings are compared by their place, so a rank whose torch has more of them, or fewer,
        # cannot be compared: what differs there is torch.
        if len(settings) < 2 or len({len(setting) for setting in settings.values()}) != 1:
            continue
        for values in zip(*settings.values(), strict=True):
            if len(set(values)) > 1:
                yield dict(zip(settings, values, strict=True))
                return


# -- buffers and statistics --------------------------------------------------------------


def _drifted(of: Mapping[int, ReplicaFacts]) -> tuple[str, ...]:
    """Return the buffers that no rank sends and that differ; ranks may have other statistics."""
    # Statistics of batches may differ with broadcast_buffers=False, as each rank has seen others.
    model = Model(of)
    stepped = all(replica.steps for replica in of.values())
    if model.sends_buffers or not model.replicated or not stepped:
        return ()
    found = differing({rank: replica.buffers for rank, replica in of.items()})
    return tuple(name for name in found if name not in model.first.batch_buffers)


def _have_same_names(seen: Compared[ReplicaFacts]) -> bool:
    return len({tuple(sorted(order)) for order in seen.values.values()}) == 1


@rule(
    Row[ReplicaFacts](
        read=attrgetter("buffer_order"),
        says=lambda seen: catalogue.finding(
            "buffer-sync.order" if _have_same_names(seen) else "buffer-sync.names",
            seen.culprits,
            evidence=seen.lines(lambda replica: some(replica.buffer_order or ("none",))),
            model=Model(seen.by_rank).title,
        ),
    ),
    Row[ReplicaFacts](
        read=attrgetter("buffers"),
        says=lambda seen: catalogue.finding(
            "buffer-sync.not-sent",
            seen.culprits,
            evidence=(
                f"differ between {name_ranks(seen.by_rank)}: {some(_drifted(seen.by_rank))}",
            ),
            model=Model(seen.by_rank).title,
            names=named(_drifted(seen.by_rank)),
        ),
        is_wrong=lambda seen: bool(_drifted(seen.by_rank)),
        whose=everyone,
    ),
    most=1,
)
def buffers(context: Context) -> Iterator[Mapping[int, ReplicaFacts]]:
    """Compare the buffers of each model."""
    yield from (model.of for model in context.models)


@dataclass(frozen=True)
class _Evaluated:
    model: Model
    evaluation: EvaluationFacts
    times: int


def _have_own_statistics(of: Mapping[int, EvaluationFacts]) -> bool:
    hashes = {evaluation.statistics for evaluation in of.values()}
    trained = all(evaluation.backwards and not evaluation.training for evaluation in of.values())
    return trained and "" not in hashes and len(hashes) > 1


# https://github.com/huggingface/pytorch-image-models/issues/110
# https://github.com/facebookresearch/detectron2/issues/5398
@rule(
    Row[_Evaluated](
        read=lambda each: each.evaluation.statistics,
        says=lambda seen: catalogue.finding(
            "buffer-sync.statistics",
            seen.culprits,
            evidence=(
                f"running statistics of {name_ranks(seen.by_rank)} differ at the start of "
                f"{counted(seen.culprit.times, 'evaluation')}",
            ),
            model=seen.culprit.model.title,
            site=seen.culprit.evaluation.place,
        ),
        whose=everyone,
    ),
)
def other_statistics(context: Context) -> Iterator[dict[int, _Evaluated]]:
    """Compare the first evaluation of each model in which ranks have statistics of their own."""
    for model in context.models:
        apart = [of for of in evaluated_together(model) if _have_own_statistics(of)]
        if apart and model.whole and not model.sends_buffers:
            yield {rank: _Evaluated(model, each, len(apart)) for rank, each in apart[0].items()}


# -- what ranks read ---------------------------------------------------------------------

_FEWEST_INPUTS = 2
_PLAIN = ("SequentialSampler", "RandomSampler")


def _divided_among(context: Context) -> int:
    """Return the number of ranks among which the data are to be divided; 0 if unknown."""
    facts = context.facts
    # Not the world size: ranks that hold parts of one model must read the same data. What a group
    # of DDP's averages over is known; without DDP it is the ranks that were seen to have data of
    # their own. Two answers are none.
    sizes = {replica.group_size for model in context.models for replica in model.of.values()}
    sizes = sizes or {len(one.split.data_ranks) for one in facts.values()}
    return sizes.pop() if len(sizes) == 1 else 0


def _is_divided_among_all(seen: Compared[SamplerFacts]) -> bool:
    return _divided_among(seen.context) == len(seen.by_rank) > 0


def _is_of_other_order(seen: Compared[SamplerFacts]) -> bool:
    """The data sets have the same data in another order, or are another part of the same data."""
    # Only where the sampler divides among all that train: then each rank's list must be the same.
    size, orders = _divided_among(seen.context), list(seen.values.values())
    data = {sampler.data for sampler in seen.by_rank.values()}
    divided = {sampler.num_replicas for sampler in seen.by_rank.values()} == {size}
    if not divided or size != max(2, len(seen.by_rank)) or len(data) > 1 or "" in {*data, *orders}:
        return False
    # All lists of a data set must be in another order: one alone may be drawn at random on purpose,
    # beside the data.
    (first, *part), *others = (order.split("|") for order in orders)
    return any(
        part != other_part or all(map(ne, first.split(), other.split()))
        for other, *other_part in others
    )


def _shuffled(seen: Compared[SamplerFacts]) -> dict[int, SamplerFacts]:
    return {r: each for r, each in seen.by_rank.items() if each.shuffle and len(each.epochs) > 1}


def _same_epoch(seen: Compared[SamplerFacts]) -> Finding:
    ever = any(seen.by_rank[rank].epochs_set for rank in seen.culprits)
    place = seen.culprit.place
    return catalogue.finding(
        "sampler-misuse.same-epoch" if ever else "sampler-misuse.no-epoch",
        seen.culprits,
        evidence=tuple(_epochs_shown(seen)),
        times=len(seen.culprit.epochs),
        site=place,
        patch="" if ever else seen.context.sources.changed(set_epoch, place),
    )


def _epochs_shown(seen: Compared[SamplerFacts]) -> Iterator[str]:
    for rank, sampler in _shuffled(seen).items():
        yield f"rank {rank}: epochs {', '.join(map(str, sampler.epochs[:8]))}"


# https://github.com/pytorch/pytorch/issues/31771
# https://github.com/kan-bayashi/ParallelWaveGAN/issues/177
@rule(
    Row[SamplerFacts](
        read=attrgetter("num_replicas"),
        says=lambda seen: catalogue.finding(
            "sampler-misuse.num-replicas",
            seen.culprits,
            evidence=seen.lines(lambda e: f"num_replicas={e.num_replicas}, rank={e.rank}"),
            number=seen.culprit.num_replicas,
            count=len(seen.by_rank),
            site=seen.culprit.place,
        ),
        is_wrong=_is_divided_among_all,
        whose=lambda seen: tuple(
            rank for rank, number in seen.values.items() if number != len(seen.by_rank)
        ),
    ),
    Row[SamplerFacts](
        read=attrgetter("rank"),
        says=lambda seen: catalogue.finding(
            "sampler-misuse.shard",
            seen.culprits,
            evidence=seen.lines(lambda e: f"shard {e.rank} of {e.num_replicas}"),
            site=seen.culprit.place,
        ),
        is_wrong=lambda seen: (
            _is_divided_among_all(seen) and len(set(seen.values.values())) < len(seen.by_rank)
        ),
        whose=lambda seen: tuple(
            rank for own, (rank, shard) in enumerate(sorted(seen.values.items())) if shard != own
        ),
    ),
    Row[SamplerFacts](
        read=attrgetter("order"),
        says=lambda seen: catalogue.finding(
            "sampler-misuse.order",
            seen.culprits,
            evidence=seen.lines(lambda e: f"order {e.order} of {e.length} samples"),
            site=seen.culprit.place,
        ),
        is_wrong=_is_of_other_order,
    ),
    Row[SamplerFacts](
        read=attrgetter("seed"),
        says=lambda seen: catalogue.finding(
            "sampler-misuse.seed",
            seen.culprits,
            evidence=seen.lines(lambda e: f"seed={e.seed}"),
            site=seen.culprit.place,
            **seen.against({rank: str(seed) for rank, seed in seen.values.items()}),
        ),
        is_wrong=lambda seen: (
            differs(seen) and all(sampler.shuffle for sampler in seen.by_rank.values())
        ),
        # seed + rank is a habit that is right for dropout, and wrong here on every rank alike.
        whose=lambda seen: (
            everyone(seen)
            if len({seed - rank for rank, seed in seen.values.items()}) == 1
            else strayed(seen.context.sources, seen.values, ("seed",))
        ),
    ),
    Row[SamplerFacts](
        read=attrgetter("epochs"),
        says=_same_epoch,
        whose=lambda seen: tuple(
            rank for rank, sampler in _shuffled(seen).items() if len(set(sampler.epochs)) == 1
        ),
    ),
    Row[SamplerFacts](
        read=attrgetter("epochs"),
        says=lambda seen: catalogue.finding(
            "sampler-misuse.other-epochs",
            seen.culprits,
            evidence=tuple(_epochs_shown(seen)),
            site=seen.culprit.place,
        ),
        is_wrong=lambda seen: len({len(each.epochs) for each in _shuffled(seen).values()}) == 1,
        whose=lambda seen: outvoted({r: each.epochs for r, each in _shuffled(seen).items()}),
    ),
    most=1,
)
def sampler_misuse(context: Context) -> Iterator[dict[int, SamplerFacts]]:
    """Compare the DistributedSamplers that ranks have under one key."""
    yield from by_key(context.facts, lambda run: run.samplers).values()


def _undivided(seen: Compared[LoaderFacts]) -> Finding:
    loader = seen.culprit
    facts = (
        f"the first {len(loader.inputs)} inputs are the same, byte for byte, on "
        f"{name_ranks(seen.by_rank)}",
        *([f"the data set has {loader.length} samples"] if loader.length else []),
    )
    return catalogue.finding(
        "sampler-misuse.stream"
        if loader.stream
        else "sampler-misuse.not-divided"
        if loader.sampler in _PLAIN
        else "sampler-misuse.own-sampler",
        seen.culprits,
        evidence=facts,
        what=loader.stream or loader.sampler,
        site=loader.place,
    )


# https://github.com/huggingface/datasets/issues/5360
# https://github.com/Lightning-AI/pytorch-lightning/issues/15734
@rule(
    Row[LoaderFacts](
        read=attrgetter("inputs"),
        says=_undivided,
        # One batch alone may be meant to be the same on all ranks.
        is_wrong=lambda seen: (
            not differs(seen) and len(set(seen.by_rank[min(seen.by_rank)].inputs)) >= _FEWEST_INPUTS
        ),
        whose=everyone,
    ),
)
def same_batches(context: Context) -> Iterator[dict[int, LoaderFacts]]:
    """Compare the loaders that all ranks have whose data are to be divided, all inputs known."""
    size = _divided_among(context)
    for of in by_key(context.facts, lambda run: run.loaders).values():
        if len(of) == size > 1 and not any("" in loader.inputs for loader in of.values()):
            yield of


# -- random numbers ----------------------------------------------------------------------

_FEWEST_DRAWS = 3


@dataclass(frozen=True)
class _Drawing:
    """Where a rank draws random numbers for its own samples, and what it began each step with."""

    model: Model
    draw: str
    steps: int
    starts: tuple[StepStart, ...]


def _are_drawn_for_own_inputs(row: tuple[StepStart, ...]) -> bool:
    inputs = {start.input for start in row}
    return all(start.drew and start.input for start in row) and len(inputs) == len(row)


# https://github.com/Robbyant/lingbot-vla-v2/issues/41
# https://github.com/huggingface/accelerate/issues/236
@rule(
    Row[_Drawing](
        read=lambda drawing: tuple(start.random for start in drawing.starts),
        says=lambda seen: catalogue.finding(
            "rng-mismatch.same-draws",
            seen.culprits,
            evidence=(
                f"drawn for the samples: {seen.culprit.draw}",
                f"before {seen.culprit.steps} of the first {len(seen.culprit.starts)} training "
                "forwards torch's generator had drawn numbers and had the same state on "
                f"{name_ranks(seen.by_rank)}",
                "the model got different samples on each rank",
            ),
        ),
        is_wrong=lambda seen: all(
            len(set(row)) == 1 for row in zip(*seen.values.values(), strict=False)
        ),
        whose=everyone,
    ),
)
def same_draws(context: Context) -> Iterator[dict[int, _Drawing]]:
    """Compare what models draw with whose code draws numbers for samples that no other rank has.

    That the numbers are the same proves nothing: ranks may draw one order of all samples, and take
    their own parts of it. So the code must say that they are drawn for the rank's own batch.
    """
    for model in context.models:
        place = model.first.start_place
        if place is None or not model.replicated:
            continue
        rows = zip(*(replica.starts for replica in model.of.values()), strict=False)
        own = sum(map(_are_drawn_for_own_inputs, rows))
        if own >= _FEWEST_DRAWS and (draw := draw_around(context.sources, place)):
            yield {r: _Drawing(model, draw, own, each.starts) for r, each in model.of.items()}


# -- ranks that hold parts of one model --------------------------------------------------
#
# They compute with each other's parts. So they must get the same samples, and draw the same random
# numbers for what all of them have.

_FEWEST_LOSSES = 3
_APART = 1e-5
"""Losses that differ by less, of their size, are the same: rounding makes some millionths."""
_ELSEWISE = frozenset(
    {
        *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
        *("all_to_all", "all_to_all_single", "send", "recv"),
    }
)
"""With these ranks share a batch, a sequence or experts: each may have a loss of its own."""
_EXCHANGES = ("all_to_all", "scatter")
"""Operations of experts; gloo scatters in place of an all-to-all with gradients."""
_SUMS = ("all_reduce", "all_reduce_coalesced", "reduce")


@dataclass(frozen=True)
class _Fed:
    """The inputs of a rank with a part of a model, in the training steps that can be seen."""

    inputs: tuple[Hashable, ...]
    why: str
    place: Place | None


def _inputs_of(facts: RunFacts) -> tuple[Input, ...]:
    return facts.split.forwards[0].inputs if facts.split.forwards else ()


def _fed(of: Mapping[int, RunFacts], why: str) -> dict[int, _Fed]:
    steps = list(_steps_with_other_inputs(of))
    places = (e.place for run in of.values() for e in run.split.forwards if e.place)
    place = next(places, None)
    return {rank: _Fed(tuple(step[rank] for step in steps), why, place) for rank in of}


def _steps_with_other_inputs(of: Mapping[int, RunFacts]) -> Iterator[dict[int, tuple[str, ...]]]:
    """Yield the steps in which not all got the same; with as many inputs on each, all read."""
    # A pipeline's stages, or gradient checkpointing, call the model more than once in a step.
    for step in sorted({e.backwards for e in _inputs_of(next(iter(of.values())))}):
        got = {
            rank: tuple(e.hash for e in _inputs_of(run) if e.backwards == step)
            for rank, run in of.items()
        }
        counts = {len(each) for each in got.values()}
        known = all("" not in each for each in got.values())
        if len(counts) == 1 and known and len(set(got.values())) > 1:
            yield got


def _is_untrue(of: Mapping[int, RunFacts], ranks: Ranks, step: int) -> bool:
    """True when a tensor that was said to be the same on these ranks is not."""
    rows = [
        [e for e in run.split.claims if e.backwards == step and e.ranks == ranks]
        for run in of.values()
    ]
    if len({len(row) for row in rows}) != 1:
        return False
    return any(
        len({e.place for e in claims}) == 1 and differ(*(e.tensor for e in claims))
        for claims in zip(*rows, strict=True)
    )


def summed(context: Context) -> list[Ranks]:
    """Return the groups over which a function of the user's sums partial results, and no more."""
    facts = context.facts
    found = {ranks for one in facts.values() for ranks in one.split.sums}
    return sorted(
        ranks
        for ranks in found
        if len(ranks) > 1
        and set(ranks) <= set(facts)
        and all(ranks in facts[rank].split.sums for rank in ranks)
        and not _shares_batches(context, ranks)
    )


def _shares_batches(context: Context, ranks: Ranks) -> bool:
    """True where these ranks also average gradients, or have parts of a batch or a sequence."""
    # By sizes, since no name says it: gradients that are averaged have the sizes of parameters.
    collectives = context.collectives
    held = (optimizer.numels for rank in ranks for optimizer in context.facts[rank].optimizers)
    sizes = flat_sizes(held)

    def is_of_batch(record: Collective) -> bool:
        # What DDP's reducer calls is known: in a backward it averages gradients, so that these
        # ranks have a batch each; in a forward it only sends buffers.
        if record.part is not None:
            return record.part is Part.BACKWARD
        averages = record.operation in _SUMS and (record.numel in sizes or record.tensors > 1)
        in_function = bool(record.path) and record.path[-1].function in ("forward", "backward")
        sums = averages and record.numel > 1 and not in_function
        return record.operation in _ELSEWISE or sums

    return any(
        collectives.groups.get(record.group, ranks) == ranks and is_of_batch(record)
        for rank in ranks
        for record in collectives.of.get(rank, ())
    )


@rule(
    Row[_Fed](
        read=attrgetter("inputs"),
        says=lambda seen: catalogue.finding(
            "replica-input-mismatch.samples",
            seen.culprits,
            evidence=(
                f"{name_ranks(seen.by_rank)}: {seen.culprit.why}; the model's inputs differ in "
                f"{len(seen.culprit.inputs)} of the first training steps",
            ),
            group=everyone(seen),
            site=seen.culprit.place,
        ),
        is_wrong=lambda seen: len(seen.by_rank[min(seen.by_rank)].inputs) >= _FEWEST_INPUTS,
    ),
)
def other_inputs(context: Context) -> Iterator[dict[int, _Fed]]:
    """Compare what ranks got that are known to compute together, in steps in which it differs.

    DTensor was told that a tensor is the same there, and it is not; or they add up their parts of
    layers, and come to other losses.
    """
    facts = context.facts
    claimed = {claim.ranks for run in facts.values() for claim in run.split.claims}
    for ranks in sorted(ranks for ranks in claimed if set(ranks) <= set(facts)):
        of = {rank: facts[rank] for rank in ranks}
        if any(_is_untrue(of, ranks, e.backwards) for run in of.values() for e in run.split.claims):
            yield _fed(of, "DTensor was told that a tensor is the same on them")
    for ranks in summed(context):
        of = {rank: facts[rank] for rank in ranks}
        # The loss is computed from what the ranks have summed, so it is one number on all of them;
        # it is another only where what went into the sums belongs to other samples.
        rows = {rank: run.split.losses for rank, run in of.items()}
        counts = {len(losses) for losses in rows.values()}
        if (
            len(counts) == 1
            and min(counts) >= _FEWEST_LOSSES
            and any(
                max(losses) - min(losses) > _APART * max(map(abs, losses))
                for losses in zip(*rows.values(), strict=True)
            )
        ):
            yield _fed(of, "they add up their parts of layers")


def _got_the_same(of: Mapping[int, RunFacts]) -> bool:
    got = {tuple((e.backwards, e.hash) for e in _inputs_of(run)) for run in of.values()}
    inputs = next(iter(got))
    return len(got) == 1 and len(inputs) >= _FEWEST_INPUTS and all(hash for _, hash in inputs)


@rule(
    Row[RunFacts](
        read=lambda run: tuple(each.random for each in _inputs_of(run)),
        says=lambda seen: catalogue.finding(
            "rng-mismatch.dropout",
            seen.culprits,
            evidence=(
                f"torch's generator had another state on each of {name_ranks(seen.by_rank)} before "
                f"the first {len(_inputs_of(seen.culprit))} training forwards",
                "the model's inputs were the same on these ranks, and it has dropout",
                "parameters that all of them hold have drifted apart",
            ),
            site=seen.culprit.split.forwards[0].place,
        ),
        # Random numbers must be known, and be other ones before each of the forwards.
        is_wrong=lambda seen: all(
            "" not in row and len(set(row)) > 1 for row in zip(*seen.values.values(), strict=True)
        ),
        whose=everyone,
    ),
)
def other_draws(context: Context) -> Iterator[dict[int, RunFacts]]:
    """Compare ranks with parts of one model, the same samples, dropout, and copies that drift.

    What is split may be dropped otherwise on each rank: then nothing drifts.
    """
    copies: dict[tuple[Ranks, str], dict[int, Copy]] = {}
    for rank, run in sorted(context.facts.items()):
        for copy in run.split.copies:
            copies.setdefault((copy.ranks, copy.name), {})[rank] = copy
    records = chain.from_iterable(context.collectives.of.values())
    experts = any(record.operation.startswith(_EXCHANGES) for record in records)
    apart: dict[Ranks, list[dict[int, Copy]]] = {}
    for (ranks, _), of in copies.items():
        # Copies of ranks that have data of their own are averaged, or not, by data parallelism: why
        # those drift other rules say.
        shares_data = ranks in {context.facts[rank].split.data_ranks for rank in of}
        drifted = differ(*(copy.end for copy in of.values()))
        # Where only the plan says that they are copies, ranks may have experts of their own.
        copied = not experts or all(copy.declared for copy in of.values())
        if set(of) == set(ranks) and drifted and not shares_data and copied:
            apart.setdefault(ranks, []).append(of)
    for ranks, those in apart.items():
        runs = {rank: context.facts[rank] for rank in ranks}
        # Copies that began apart were never one, and dropout is not what parted them.
        began = not any(differ(*(copy.begin for copy in of.values())) for of in those)
        drops = all(run.split.forwards and run.split.forwards[0].drops for run in runs.values())
        if began and drops and _got_the_same(runs):
            yield runs
