"""Rules about what becomes of gradients between the backward and the optimizer's step."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.least_squares import solved
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.diagnosis.parallel.split import summed
from ddp_notebook.diagnosis.source_code.accumulation import undivided_count
from ddp_notebook.diagnosis.source_code.divisions import (
    chooses_rate_by_world,
    divides_loss_by_world,
)
from ddp_notebook.diagnosis.source_code.skips import skipping_test
from ddp_notebook.diagnosis.training.replicas import Model
from ddp_notebook.diagnosis.training.rules import is_adaptive, optimizers, where
from ddp_notebook.model import (
    Category,
    Finding,
    GradientSample,
    LossFacts,
    OptimizerFacts,
    Ranks,
    Remark,
    RunFacts,
    counted,
    in_brackets,
)

_APART = 1e-3
"""Factors that differ by less, of their size, are the same."""
_COMPRESSED, _ABOUT = 1e-2, 0.05
"""How exact is what a hook makes of gradients in 16 bits, and of the weights in it."""
_FEWEST_STEPS = 2
_FEWEST_LEFTOVERS = 3
_FEWEST_LOSSES, _MANY_LOSSES = 4, 8
_FEWEST_SKIPPED = 4
_HALVINGS = 8
"""After so many skipped steps a GradScaler's scale is 256 times smaller."""
_MOSTLY = 0.5
_MOST_SHOWN = 3
_UNEQUAL, _UNEQUAL_IN_MANY, _UNEQUAL_TOKENS = 2.0, 1.5, 1.2
"""Ranks that average over so many times as many samples as others, in each step; the second, in
at least `_MANY_LOSSES` of them: by chance the same rank is not behind so often. The last is for
targets, some of which are ignored: batches of other sizes may be meant, other padding is not."""

_Of = Mapping[int, OptimizerFacts]


def kept_back(context: Context) -> Iterator[Finding]:
    """Steps of a sharded model, while gradients of a backward were not reduced yet."""
    for of in optimizers(context.facts).values():
        ranks = {rank: optimizer for rank, optimizer in of.items() if optimizer.pending_steps}
        if not ranks:
            continue
        each = next(iter(ranks.values()))
        yield Finding(
            Category.NO_SYNC_MISUSE,
            tuple(ranks),
            f"{each.type} steps while the last backward's gradients are not reduced: gradient sync "
            f"is off for it, and they go into a later step{in_brackets(each.pending_place)}",
            "Have set_requires_gradient_sync(True) (and set_requires_all_reduce) for the last "
            "micro-batch before optimizer.step().",
            evidence=by_ranks(
                {r: f"{e.pending_steps} of {e.steps} steps" for r, e in ranks.items()}
            ),
        )


def local_factors(context: Context) -> Iterator[Finding]:
    """Gradients of one model in parts are multiplied by another factor on each rank."""
    by_hand = summed(context)
    for of in optimizers(context.facts).values():
        meshes = {optimizer.mesh for optimizer in of.values() if optimizer.mesh}
        for mesh in sorted(meshes.union(by_hand)):
            group = {rank: e for rank, e in of.items() if rank in mesh}
            own = {optimizer.mesh for optimizer in group.values()}
            if len(group) == len(mesh) > 1 and own == {mesh if mesh in meshes else ()}:
                yield from _multiplied_apart(group)


def _multiplied_apart(of: _Of) -> Iterator[Finding]:
    steps = [i for i in _common_steps(of) if _differ(_factors_at(of, i))]
    if len(steps) >= _FEWEST_STEPS:
        yield _local(of, steps[0], len(steps))


def _local(of: _Of, step: int, steps: int) -> Finding:
    each = next(iter(of.values()))
    return Finding(
        Category.LOCAL_STATISTIC,
        tuple(of),
        f"the gradients of one sharded model are multiplied by another factor on each rank before "
        f"{each.type} steps{in_brackets(each.place)}: a norm was taken of the rank's own shard",
        "Take the norm over all shards: torch.nn.utils.clip_grad_norm_ does; by hand, all_reduce "
        "the sum of squares before the root.",
        evidence=(
            *(f"rank {r}: times {e.factors[step]:g} in step {step + 1}" for r, e in of.items()),
            f"another factor on each rank in {steps} of the first "
            f"{len(_common_steps(of))} steps in which it was one factor",
        ),
    )


def clipped_apart(context: Context) -> Iterator[Finding]:
    """Gradients of micro-batches, not averaged yet, are multiplied by each rank's own factor."""
    for of in optimizers(context.facts).values():
        each = next(iter(of.values()))
        apart = _between_apart(of) if each.replicas else []
        if len(apart) < _FEWEST_LEFTOVERS:
            continue
        yield Finding(
            Category.LOCAL_STATISTIC,
            tuple(of),
            "between the micro-batches of a step each rank multiplies its gradients, which are not "
            "averaged yet, by another factor, as clipping by the rank's own norm does"
            f"{in_brackets(each.place)}",
            "Clip once, after the backward of the last micro-batch, when the gradients are those "
            "of all ranks: clip_grad_norm_ directly before optimizer.step().",
            evidence=by_ranks(
                {
                    rank: f"times {', '.join(f'{row[rank]:.3g}' for row in apart[:_MOST_SHOWN])} "
                    "before the next backward of the same step"
                    for rank in of
                }
            ),
        )


def _between_apart(of: _Of) -> list[dict[int, float]]:
    """The factors between two micro-batches, where all ranks know one and they differ."""
    rows = zip(*(optimizer.between for optimizer in of.values()), strict=False)
    factors = [{rank: f or 0.0 for rank, f in zip(of, row, strict=True)} for row in rows]
    return [row for row in factors if all(row.values()) and _differ(row)]


def clipped_scaled(context: Context) -> Iterator[Finding]:
    """Gradients are clipped while a GradScaler's scale is in them, and divided by it afterwards.

    To multiply them meanwhile is no mistake, as by one over the tokens: so the code must clip.
    """
    if not any(context.sources.with_words("clip_grad_norm_(")):
        return
    for of in optimizers(context.facts).values():
        if not all(map(_is_clipped_scaled, of.values())):
            continue
        each = next(iter(of.values()))
        clipped = [f"{f:.3g}" for f in each.before_scaler if f is not None]
        yield Finding(
            Category.LOSS_SCALING,
            tuple(of),
            f"the gradients are clipped before {each.type} steps while the scale of GradScaler is "
            f"still in them, and divided by it afterwards{in_brackets(each.place)}: the limit is "
            "that of scaled gradients, so steps are as many times too small as the scale is large",
            "Call scaler.unscale_(optimizer) after backward() and before clip_grad_norm_().",
            evidence=(
                f"times {', '.join(clipped[:4])} between backward and GradScaler.step, which then "
                "divided by the scale",
            ),
        )


def _is_clipped_scaled(each: OptimizerFacts) -> bool:
    """Before GradScaler.step never larger, by another factor each time; and divided within it."""
    steps = zip(each.before_scaler, each.factors, strict=False)
    before = [b for b, f in steps if b and f and f < _MOSTLY * b]
    many = len(before) >= _FEWEST_LEFTOVERS and 2 * len(before) > len(each.factors)
    return many and max(before) <= 1 + _APART and min(before) < (1 - _ABOUT) * max(before)


def averaged_twice(context: Context) -> Iterator[Finding]:
    """Gradients that DDP has averaged are divided by the world size once more."""
    for of in optimizers(context.facts).values():
        size, model = len(of), _only_model(context, of)
        if size < 2 or model is None or set(model.of) != set(of) or not model.whole:
            continue
        if any(replica.backwards != replica.steps or replica.hook for replica in model.of.values()):
            continue  # micro-batches: their number may be the world size
        steps = _common_steps(of)
        wrong = [i for i in steps if all(_is(f, 1 / size) for f in _factors_at(of, i).values())]
        if len(wrong) < _FEWEST_LEFTOVERS or len(wrong) < len(steps):
            continue
        each = next(iter(of.values()))
        yield Finding(
            Category.LOSS_SCALING,
            tuple(of),
            f"the gradients of {model.title} are divided by the world size, {size}, though "
            f"DistributedDataParallel has averaged them: each step is {size} times too small"
            f"{in_brackets(each.place)}",
            "Leave the division out: DistributedDataParallel averages over the ranks.",
            evidence=(
                f"times {1 / size:g} between backward and step, in {counted(len(wrong), 'step')}",
            ),
        )


def summed_by_hooks(context: Context) -> Iterator[Finding]:
    """A communication hook gives DDP the sum of the ranks' gradients, not their mean."""
    for model in context.models.values() if _are_plain_means(context) else ():
        size, steps = len(model.of), _hooked(model)
        if not steps or not model.whole or not all(map(_is_a_sum, steps)):
            continue
        yield Finding(
            Category.LOSS_SCALING,
            tuple(model.of),
            f"the communication hook {model.first.hook} of {model.title} adds the gradients up "
            f"over {size} ranks and does not divide: they are {size} times as large as those that "
            "DistributedDataParallel gives without a hook",
            f"Divide in the hook by the number of ranks, here {size}, before or after all_reduce: "
            "DistributedDataParallel leaves that to a hook.",
            evidence=(
                f"what the hook left is the sum of what it was given, in {len(steps)} backwards",
                "the first losses on every rank are means, and not divided",
            ),
        )


def _are_plain_means(context: Context) -> bool:
    """No loss is divided, and no learning rate is chosen, by the number of ranks."""
    losses = [loss for facts in context.facts.values() for loss in facts.losses]
    plain = bool(losses) and all(e.mean and _is(e.factor, 1.0) for e in losses)
    return plain and not chooses_rate_by_world(context.sources, where(context.facts))


def _hooked(model: Model) -> list[tuple[float, ...] | None]:
    """The weights of the ranks' own gradients in what a hook made of them, in each backward."""
    rows = [replica.hooked for replica in model.of.values()]
    if len(rows) < 2 or len({len(row) for row in rows}) > 1 or len(rows[0]) < _FEWEST_STEPS:
        return []
    return [_mixed(step) for step in zip(*rows, strict=True)]


def _mixed(samples: Sequence[GradientSample]) -> tuple[float, ...] | None:
    own = [[value for row in sample.own for value in row] for sample in samples]
    used = [value for row in samples[0].used for value in row]
    if {len(row) for row in own} != {len(used)} or len(used) < 2 * len(own):
        return None
    return solved(own, used, _COMPRESSED)


def _is_a_sum(weights: tuple[float, ...] | None) -> bool:
    return weights is not None and all(abs(weight - 1.0) <= _ABOUT for weight in weights)


def divided_losses(context: Context) -> Iterator[Finding]:
    """A loss is divided by the world size, and DDP averages the gradients all the same.

    That the number is the world size may be chance: the code must say so too.
    """
    for model, rows in _losses(context):
        size, place = len(rows), rows[0][0].place
        divided = all(loss.mean and _is(loss.factor, 1 / size) for row in rows for loss in row)
        single = all(replica.backwards == replica.steps for replica in model.of.values())
        if divided and single and place and divides_loss_by_world(context.sources, place):
            yield Finding(
                Category.LOSS_SCALING,
                tuple(model.of),
                f"the loss of {model.title} is divided by the world size, {size}, though "
                "DistributedDataParallel averages the gradients: each step is "
                f"{size} times too small{in_brackets(place)}",
                "Leave the division out: DistributedDataParallel averages over the ranks.",
                evidence=(
                    f"the first {len(rows[0])} losses on every rank are a mean, times {1 / size:g}",
                ),
            )


def divided_by_all(context: Context) -> Iterator[Finding]:
    """A sum is divided by the number of all ranks' targets, and DDP averages all the same."""
    for model, rows in _losses(context):
        of_all = _divided_by_all(rows)
        if len(of_all) < _FEWEST_STEPS or _makes_up_for(context, model):
            continue
        size = len(rows)
        yield Finding(
            Category.LOSS_SCALING,
            tuple(model.of),
            f"the loss of {model.title} is a sum that is divided by the number of targets on all "
            f"{size} ranks, and DistributedDataParallel then averages the gradients: each step is "
            f"{size} times too small{in_brackets(rows[0][0].place)}",
            "Multiply the loss by the world size, as DistributedDataParallel divides by it: "
            "loss * dist.get_world_size() / count.",
            evidence=tuple(
                f"divided by {divisor:g} on every rank: the targets of "
                f"{', '.join(f'rank {r}: {n:g}' for r, n in zip(model.of, counts, strict=True))}"
                for divisor, counts in of_all[:_MOST_SHOWN]
            ),
        )


def _makes_up_for(context: Context, model: Model) -> bool:
    """True if gradients are multiplied by the world size before a step, or the rate hangs on it."""
    size = len(model.of)
    of = [of for of in optimizers(context.facts).values() if _only_model(context, of) is model]
    factors = [factor for each in of for e in each.values() for factor in e.factors if factor]
    by_size = any(_is(factor, size) for factor in factors)
    return by_size or chooses_rate_by_world(context.sources, where(context.facts))


def _divided_by_all(rows: list[tuple[LossFacts, ...]]) -> list[tuple[float, tuple[float, ...]]]:
    """By what the losses of each step are divided, with each rank's targets, which make that up.

    A step's micro-batches have one divisor; the last ones may not be all. Empty if it is not so.
    """
    steps = [list(step) for _, step in groupby(zip(*rows, strict=True), lambda e: e[0].divisor)]
    found = [(step[0][0].divisor, _counts_of(step)) for step in steps[:-1]]
    sums = all(all(counts) and _is(sum(counts), divisor) for divisor, counts in found)
    same = all(len({loss.divisor for loss in of}) == 1 for of in zip(*rows, strict=True))
    return found if sums and same else []


def _counts_of(step: list[tuple[LossFacts, ...]]) -> tuple[float, ...]:
    """Each rank's targets in the micro-batches of a step."""
    return tuple(sum(loss.count for loss in row) for row in zip(*step, strict=True))


def undivided_losses(context: Context) -> Iterator[Remark]:
    """Gradients of micro-batches are added up, and nothing is divided by their number.

    A remark, no finding: the learning rate may have been chosen for it.
    Several losses of one batch add up as well, and the parts of a sequence. So one line must have
    all backwards, each of a plain mean, and the code must count them to know when to step. Where
    gradients are clipped, or the optimizer is adaptive, their scale hardly matters.
    """
    losses = [loss for facts in context.facts.values() for loss in facts.losses]
    places = {loss.place for loss in losses}
    found = optimizers(context.facts)
    if len(found) != 1 or len(places) != 1 or not all(e.mean and _is(e.factor, 1) for e in losses):
        return
    (of,), place = found.values(), next(iter(places))
    number = _micro_batches(of)
    if number < 2 or place is None or set(of) != set(context.facts):
        return
    if any(is_adaptive(optimizer) for optimizer in of.values()):
        return
    count = undivided_count(context.sources, where(context.facts), number)
    if count:
        each = next(iter(of.values()))
        yield Remark(
            "undivided-micro-batches",
            tuple(of),
            f"{each.type} steps with the sum of the gradients of {number} micro-batches, each of a "
            f"mean: nothing is divided by their number, so they are {number} times those of one "
            f"batch of all samples{in_brackets(place)}. If the learning rate was not chosen for "
            f"that, divide each loss by {number} before backward().",
            (
                f"each step after the first came {number} backwards after the one before; the step "
                f"is made where {count}",
                f"the first {len(losses) // len(of)} losses on every rank are means, and not "
                "divided",
            ),
        )


def _micro_batches(of: _Of) -> int:
    """How many backwards each step came after, on all ranks; 0 where not always as many.

    Or where all gradients were divided by something before the step, as by clipping.
    """
    counts = {(optimizer.windows and optimizer.windows[0][0]) or 0 for optimizer in of.values()}
    number = counts.pop() if len(counts) == 1 else 0
    steady = all(
        len(optimizer.windows) == 1
        and optimizer.windows[0][1] >= _FEWEST_STEPS
        and optimizer.span[0] == number
        for optimizer in of.values()
    )
    scaled = any(f is not None and not _is(f, 1) for e in of.values() for f in e.factors)
    return number if steady and not scaled else 0


def unequal_means(context: Context) -> Iterator[Finding]:
    """Some ranks' losses are means over far fewer samples, in every step; DDP averages them."""
    for model, rows in _losses(context):
        times, *places = _lopsided(rows)
        if not _are_means(rows) or times < _least_times(rows):
            continue
        few, many = (tuple(model.of)[place] for place in places)
        yield Finding(
            Category.LOSS_SCALING,
            tuple(model.of),
            f"the loss is a mean over far fewer samples on rank {few} than on rank {many} in every "
            "step, and DistributedDataParallel averages the ranks' means: a sample (or token) of "
            f"rank {few} counts at least {times:.3g} times as much{in_brackets(rows[0][0].place)}",
            "Divide the sum of the loss by what all ranks count: all_reduce the number of samples "
            '(tokens), use reduction="sum", and multiply loss / number by the world size, by which '
            "DistributedDataParallel divides.",
            evidence=tuple(
                f"rank {rank}: means over {', '.join(f'{_count(e):g}' for e in row[:6])} samples"
                for rank, row in zip(model.of, rows, strict=True)
            ),
        )


def _least_times(rows: list[tuple[LossFacts, ...]]) -> float:
    if len(rows[0]) < _MANY_LOSSES:
        return _UNEQUAL
    tokens = all(loss.ignores for row in rows for loss in row)
    return _UNEQUAL_TOKENS if tokens else _UNEQUAL_IN_MANY


def _are_means(rows: list[tuple[LossFacts, ...]]) -> bool:
    """True where all are means times one factor, or all are sums that were divided."""
    losses = [loss for row in rows for loss in row]
    means = all(loss.mean and loss.factor for loss in losses)
    if means:
        return len({loss.factor for loss in losses}) == 1
    return all(loss.divisor and not loss.mean for loss in losses)


def _count(loss: LossFacts) -> float:
    return loss.count if loss.mean else loss.divisor


def _lopsided(rows: list[tuple[LossFacts, ...]]) -> tuple[float, int, int]:
    """How many times as many samples the same rank averages over as another one, in each step.

    With their positions; 0 where it is not the same ones in all steps.
    """
    steps = [tuple(map(_count, step)) for step in zip(*rows, strict=True)]
    ends = {(step.index(min(step)), step.index(max(step))) for step in steps}
    times = min(max(step) / min(step) if min(step) else 0.0 for step in steps)
    return (times if len(ends) == 1 else 0.0, *ends.pop())


def _losses(context: Context) -> Iterator[tuple[Model, list[tuple[LossFacts, ...]]]]:
    """The one model of a run, with DDP on all ranks, and the first losses of each of them.

    Those of lines from which all ranks began a backward: a rank may train another model alone.
    """
    models = [model for model in context.models.values() if model.first.steps]
    if len(models) != 1 or not models[0].whole or set(models[0].of) != set(context.facts):
        return
    every = [context.facts[rank].losses for rank in models[0].of]
    lines = set.intersection(*({loss.place for loss in row} for row in every))
    rows = [tuple(loss for loss in row if loss.place in lines) for row in every]
    least = min(len(row) for row in rows)
    hooks = any(replica.hook for replica in models[0].of.values())
    if len(rows) > 1 and least >= _FEWEST_LOSSES and not hooks:
        yield models[0], [row[:least] for row in rows]


def _only_model(context: Context, of: _Of) -> Model | None:
    """The one model that these optimizers train on every rank; None where there are several."""
    found = [
        model
        for key, model in context.models.items()
        if all(key in optimizer.replicas for optimizer in of.values())
    ]
    return found[0] if len(found) == 1 else None


def leftovers(context: Context) -> Iterator[Finding]:
    """Gradients of the step before were never cleared."""
    for of in optimizers(context.facts).values():
        ranks = {
            rank: optimizer
            for rank, optimizer in of.items()
            if optimizer.leftover_steps >= max(_FEWEST_LEFTOVERS, optimizer.watched_steps - 1)
        }
        if not ranks:
            continue
        each = next(iter(ranks.values()))
        yield Finding(
            Category.STALE_GRADIENTS,
            tuple(ranks),
            f"the gradients are never cleared between steps of {each.type}: each step uses those "
            f"of all steps before as well{in_brackets(each.place)}",
            "Call optimizer.zero_grad() once for each step, before its first backward.",
            evidence=by_ranks(
                {
                    r: f"{e.leftover_steps} of the first {e.watched_steps} steps added to the "
                    "gradients of the step before"
                    for r, e in ranks.items()
                }
            ),
        )


def left_by_others(context: Context) -> Iterator[Finding]:
    """The backward for another optimizer's step goes through a model, as a generator's does.

    What it leaves there is not cleared before that model's own backward.
    """
    for of in optimizers(context.facts).values():
        mixed = {rank: optimizer for rank, optimizer in of.items() if optimizer.mixed_steps}
        if not mixed:
            continue
        each = next(iter(mixed.values()))
        yield Finding(
            Category.STALE_GRADIENTS,
            tuple(mixed),
            f"{each.type} steps with gradients of two losses: the backward for another "
            "optimizer's step went through its model, and what that left there was not cleared "
            f"before the model's own backward{in_brackets(each.place)}",
            "Call this optimizer's zero_grad() right before the backward of its own loss; or keep "
            "its parameters out of the other backward with requires_grad_(False).",
            evidence=by_ranks(
                {
                    r: f"{e.mixed_steps} of the first {e.watched_steps} steps used what was left"
                    for r, e in mixed.items()
                }
            ),
        )


def left_by_skipped(context: Context) -> Iterator[Finding]:
    """A step is skipped by a test, and the gradients of its backward go into the next step.

    That some steps came after several backwards is how gradients are accumulated. So most must
    come after one, and the code must show a way to the next backward that clears nothing.
    """
    places = {loss.place for facts in context.facts.values() for loss in facts.losses}
    place = next(iter(places)) if len(places) == 1 else None
    test = skipping_test(context.sources.tree(place), place.line) if place is not None else None
    if place is None or test is None:
        return
    for of in optimizers(context.facts).values():
        since = {
            rank: context.facts[rank].backwards - optimizer.span[1]
            for rank, optimizer in of.items()
        }
        if all(_skips(optimizer.windows, since[rank]) for rank, optimizer in of.items()):
            at = in_brackets(replace(place, line=test.lineno, text=""))
            yield _left_by_skipped(of, since, f"if {ast.unparse(test)}", at)


def _left_by_skipped(of: _Of, since: Mapping[int, int], test: str, at: str) -> Finding:
    return Finding(
        Category.STALE_GRADIENTS,
        tuple(of),
        f"where a step of {next(iter(of.values())).type} is skipped ({test}), its gradients are "
        f"not cleared: the next step uses them as well{at}",
        "Call optimizer.zero_grad() where the step is skipped, too; or always before the backward.",
        evidence=by_ranks({rank: _words(e.windows, since[rank]) for rank, e in of.items()}),
    )


def _skips(windows: Sequence[tuple[int, int]], since: int) -> bool:
    """Most steps came after one backward, and some after several; or several came since the last.

    Where gradients add up, every later step may be skipped.
    """
    steps = dict(windows)
    after_one, more = steps.get(1, 0), sum(n for b, n in windows if b > 1)
    return (more > 0 or since > 1) and after_one >= _MOSTLY * sum(steps.values())


def _words(windows: Sequence[tuple[int, int]], since: int) -> str:
    parts = (f"{counted(steps, 'step')} after {backwards}" for backwards, steps in windows)
    return f"by backwards since the step before: {', '.join(parts)}; {since} since the last step"


def skipped_by_scaler(context: Context) -> Iterator[Finding]:
    """A GradScaler skips every step, as a loss or gradient is no number: no smaller scale helps.

    One that overflows is infinite, and the scale is halved until it fits: that is how it works.
    """
    facts = context.facts
    if not facts or min(run.skipped for run in facts.values()) < _FEWEST_SKIPPED:
        return
    what, ranks = "the loss", _with_nan_losses(facts)
    times = {rank: run.nan_losses for rank, run in facts.items()}
    if not ranks:
        what, ranks = "a gradient", _with_nan_gradients(facts)
        times = {rank: run.nan_gradients for rank, run in facts.items()}
    if not ranks:
        return
    each = facts[ranks[0]]
    yield Finding(
        Category.NAN_ON_ONE_RANK,
        ranks,
        f"{what} there is not a number (NaN){in_brackets(each.nan_place)}, in each of "
        f"the last {times[ranks[0]]} backwards, so GradScaler.step skips the optimizer's step on "
        f"every rank and nothing is trained{in_brackets(each.skipped_place)}",
        "Look at that rank's batch and at the forward: a division by zero, a root or a log of "
        "zero. A smaller scale does not help.",
        evidence=by_ranks(
            {
                r: f"{counted(e.skipped, 'step')} skipped one after the other up to the end, the "
                f"{what} was NaN in the last {counted(times[r], 'backward')}"
                for r, e in facts.items()
            }
        ),
    )


def _with_nan_losses(facts: Mapping[int, RunFacts]) -> Ranks:
    return tuple(r for r, run in sorted(facts.items()) if run.nan_losses >= _FEWEST_SKIPPED)


def _with_nan_gradients(facts: Mapping[int, RunFacts]) -> Ranks:
    """The ranks with such gradients in many backwards, where none of the others had a bad one.

    A scale that is too large makes infinities, and NaN of these: but not after so many halvings,
    and on the same ranks alone.
    """
    ranks = tuple(r for r, run in sorted(facts.items()) if run.nan_gradients)
    others = [run for r, run in facts.items() if r not in ranks]
    long = all(min(facts[r].nan_gradients, facts[r].skipped) >= _HALVINGS for r in ranks)
    return ranks if long and others and all(e.nan_backward is None for e in others) else ()


def _common_steps(of: _Of) -> Ranks:
    """The steps, from 0, of which all ranks know a factor."""
    steps = min(len(optimizer.factors) for optimizer in of.values())
    return tuple(i for i in range(steps) if all(optimizer.factors[i] for optimizer in of.values()))


def _factors_at(of: _Of, step: int) -> dict[int, float]:
    return {rank: optimizer.factors[step] or 0.0 for rank, optimizer in of.items()}


def _differ(factors: Mapping[int, float]) -> bool:
    low, high = min(factors.values()), max(factors.values())
    return high - low > _APART * max(abs(low), abs(high))


def _is(factor: float, wanted: float) -> bool:
    return abs(factor - wanted) <= _APART * wanted
