"""Infers the cause from the way in which a run diverges from the one on a single rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddp_notebook.diagnosis.against.batches import uneven
from ddp_notebook.model.against.trail import TrainingStep, distance, norm

_SAME = 1e-3
"""Two tensors differ by a factor if the relative residual is below this."""

Tensors = Sequence[Sequence[float]]


def cause_of(
    stage: str,
    ranks: Sequence[Tensors],
    one: Tensors,
    steps: Sequence[TrainingStep],
    alone: TrainingStep,
    *,
    first: bool = False,
) -> str:
    """The cause, if the numbers determine it; else "".

    `ranks` are the sketches of all parameters on each rank, `one` those of one rank, with the
    step that made them: `steps` and `alone`.
    """
    count = len(ranks)
    if stage == "start" and not first:
        return (
            "Something changed the parameters between two steps, in another way than on one rank."
        )
    if stage == "start":
        return (
            "The ranks do not begin with the same values: something changed the parameters of some "
            "after DistributedDataParallel had sent those of rank 0 to all (an initialisation, "
            "load_state_dict), or they are in no DistributedDataParallel."
        )
    if stage == "update":
        return (
            "The gradients are the same, the optimizer makes something else of them: its options "
            "or its state are not the same."
        )
    if any(_apart(rank, ranks[0]) > _SAME for rank in ranks[1:]):
        if stage == "gradient":
            return (
                "After backward all ranks have the gradients of one rank, and then each changes "
                "them by what it alone knows: clip or scale by the same number on every rank."
            )
        return (
            "The ranks have different gradients: they were not averaged (a forward through "
            ".module, no_sync() in the last micro-batch, parameters that DDP does not know)."
        )
    if uneven(steps):
        return (
            "The ranks have different numbers of samples, and DDP's average gives each rank the "
            "same weight: weight each rank's loss by its number of samples."
        )
    factor = _factor(ranks[0], one)
    if factor is None:
        return _of_losses(steps, alone)
    return _of_factor(factor, count)


def _of_losses(steps: Sequence[TrainingStep], alone: TrainingStep) -> str:
    """The ranks' gradients are averaged, and are of another loss than that of all samples."""
    losses = [step.loss for step in steps if step.loss is not None]
    if len(losses) < len(steps) or alone.loss is None:
        return ""
    mean = sum(losses) / len(losses)
    if math.isclose(mean, alone.loss, rel_tol=_SAME):
        return ""
    return (
        "All ranks have the same gradients, of another loss: the mean of the ranks' losses is not "
        "that of all samples together. Each rank's is a mean over another number of samples "
        "(tokens, a mask), or depends on what else is in its batch (in-batch negatives, statistics "
        "of the batch)."
    )


def _of_factor(factor: float, count: int) -> str:
    if math.isclose(factor, 1 / count, rel_tol=_SAME):
        return (
            f"Each gradient is 1/{count} of one rank's. DDP averages over the ranks: either the "
            "loss is a sum over the samples (use its mean, or multiply it by the world size), or "
            "the loss or the gradients are divided by the world size once more."
        )
    if math.isclose(factor, count, rel_tol=_SAME):
        return (
            f"Each gradient is {count} times that of one rank: loss or gradients are multiplied by "
            "the world size, or summed over the ranks where DDP has averaged already."
        )
    return f"Each gradient is {factor:.4g} times that of one rank: a factor depends on the ranks."


def evidence_of(
    ranks: Sequence[Tensors], one: Tensors, steps: Sequence[TrainingStep], alone: TrainingStep
) -> tuple[str, ...]:
    """Further facts, as sentences."""
    sentences = []
    losses = [step.loss for step in steps if step.loss is not None]
    if len(losses) == len(steps) and alone.loss is not None:
        mean = sum(losses) / len(losses)
        sentences.append(
            f"The loss is {mean:.6g} on average over the ranks, {alone.loss:.6g} on one."
        )
    counts = uneven(steps)
    if counts:
        sentences.append(f"Samples in this step: {counts}.")
    differ = [rank for rank, of in enumerate(ranks) if _apart(of, ranks[0]) > _SAME]
    if differ:
        sentences.append("The ranks differ from each other as well.")
    return tuple(sentences)


def _apart(some: Tensors, others: Tensors) -> float:
    """The difference of two ranks, relative to the second."""
    apart = math.sqrt(sum(distance(a, b) ** 2 for a, b in zip(some, others, strict=True)))
    whole = math.sqrt(sum(norm(b) ** 2 for b in others))
    return apart / whole if whole else (math.inf if apart else 0.0)


def _factor(some: Tensors, one: Tensors) -> float | None:
    """The factor by which `some` is a multiple of `one`; None if there is none."""
    product = sum(a * b for x, y in zip(some, one, strict=True) for a, b in zip(x, y, strict=True))
    square = sum(b * b for y in one for b in y)
    if not square or not math.isfinite(product):
        return None
    factor = product / square
    scaled = [[factor * b for b in y] for y in one]
    return factor if _apart(some, scaled) < _SAME else None
