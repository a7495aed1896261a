"""The exercises of notebook 4: inside DDP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.workshop.answers import (
    AS_IT_IS,
    by_rank,
    number,
    parts,
    shown,
    text,
    whole_number,
    with_passed,
)
from ddp_notebook.workshop.check import WrongAnswer, exercise

_EQUAL = 1e-3
"""Gradients that differ by less than this part of their size are equal but for rounding."""

Distances = Mapping[str, float]
"""How far a gradient is from others, by their names, in parts of their size."""


def _distances(answer: Any) -> Distances:
    if answer is None:
        raise WrongAnswer(
            "no gradients came, only None. dist.all_reduce changes its tensor in place and "
            "returns None, as backward does: call gradients(...) when each .grad is as it must be."
        )
    if not isinstance(answer, Mapping):
        raise WrongAnswer(
            "expected all gradients in one long tensor, as gradients(module) returns them, "
            f"got {shown(answer)}."
        )
    names = ("ddp", "own", "total") if "total" in answer else ("ddp", "own", "fourfold")
    if any(name not in answer for name in names):
        raise WrongAnswer(AS_IT_IS)
    return {name: number(answer[name]) for name in names}


def _near(of: Distances, name: str) -> bool:
    return of.get(name, math.inf) < _EQUAL


@exercise("4.1", by_rank(_distances))
def averaged_by_hand(of: Mapping[int, Distances]) -> str:
    """Each rank has the mean of all ranks' gradients."""
    for rank, each in of.items():
        if _near(each, "ddp"):
            continue
        if _near(each, "total"):
            raise WrongAnswer(
                f"rank {rank} has the sum over the ranks, {len(of)} times the mean: all_reduce "
                "adds. What is left to do with a sum of world_size gradients?"
            )
        if _near(each, "own"):
            raise WrongAnswer(
                f"rank {rank} still has its own gradient. Was the mean put back into .grad, of "
                "every parameter?"
            )
        raise WrongAnswer(
            f"rank {rank} has neither the mean, nor the sum, nor its own gradient. Was the cell "
            "run twice? Then .grad was changed twice: make a new `plain` first. Or is only a part "
            "of the parameters averaged?"
        )
    return (
        "right, up to rounding. This is all that DDP does to gradients. It does it in buckets, "
        "and while backward still runs."
    )


# -- buckets ---------------------------------------------------------------------------

Sent = Sequence[Sequence[str]]
"""The names of the parameters of each bucket, in the order in which they were sent."""


def _names(answer: Any) -> tuple[str, ...]:
    names = answer.split(",") if isinstance(answer, str) else answer
    if not isinstance(names, (list, tuple, set, frozenset)) or not names:
        raise WrongAnswer(
            f"expected a list of names, such as ['0.weight', '0.bias'], got {shown(answer)}."
        )
    return tuple(text(name).removeprefix("module.") for name in names)


def _first_bucket(answer: Any) -> tuple[tuple[str, ...], Sent]:
    guess, sent = parts(answer)
    if not isinstance(sent, (list, tuple)) or not sent:
        raise WrongAnswer(f"no bucket was seen: {AS_IT_IS}")
    buckets = []
    for bucket in sent:
        if not isinstance(bucket, (list, tuple)) or not bucket:
            raise WrongAnswer(AS_IT_IS)
        buckets.append(_names(bucket[0]))
    return _names(guess), buckets


@exercise("4.2", _first_bucket)
def parameters_of_the_first_bucket(answer: tuple[tuple[str, ...], Sent]) -> str:
    """The guess is what was sent first in the second step."""
    guess, sent = answer
    first, everything = set(sent[0]), {name for bucket in sent for name in bucket}
    strangers = [name for name in guess if name not in everything]
    if strangers:
        raise WrongAnswer(
            f"{shown(strangers[0])} is not a parameter of the model. Their names are "
            f"{', '.join(sorted(everything))}."
        )
    wrong, missing = set(guess) - first, first - set(guess)
    if set(guess) == everything:
        raise WrongAnswer(
            "that is all of them, as in the first step. From the second on it is less."
        )
    if wrong and not first & set(guess):
        raise WrongAnswer("these come last. In which order does backward go through the layers?")
    if wrong and missing:
        raise WrongAnswer(
            "some of those are in it, some are not. Write the parameters down in the order in "
            "which their gradients come, last layer first, each with its size, and add up."
        )
    if wrong:
        raise WrongAnswer(
            "too many: the bucket has reached 1 MiB before the last of those, and was closed."
        )
    if missing:
        raise WrongAnswer(
            "these are in it, and they do not make 1 MiB yet, so the bucket stays open. It is "
            "closed *by* the parameter with which it gets there, and that one is in it too."
        )
    return (
        f"right: {len(first)} parameters. It is larger than 1 MiB: the size says when a bucket "
        "is closed, and not how large it may be."
    )


def _counts(answer: Any) -> tuple[int, int, int, int]:
    first, later, counts = parts(answer, 3)
    if not isinstance(counts, (list, tuple)) or len(counts) < 2:
        raise WrongAnswer(AS_IT_IS)
    return (
        whole_number(first),
        whole_number(later),
        whole_number(counts[0]),
        whole_number(counts[-1]),
    )


_PARAMETERS, _LAYERS, _PIECES = 8, 4, 6
"""Sizes in the model of exercise 4.3; the last: quarters of a MiB, if parameters could be cut."""
_WHY_NOT = {
    _PARAMETERS: "a bias is far smaller than a quarter of a MiB, so it shares its bucket.",
    _LAYERS: "look at the last layer alone. Has it a quarter of a MiB?",
    _PIECES: "a parameter is never cut, however large it is.",
    1: "a quarter of a MiB is reached long before the last gradient.",
}
_COUNT_AGAIN = (
    "go through the parameters in the order of backward, and start a new bucket after the one with "
    "which a quarter of a MiB is reached."
)


@exercise("4.3", _counts)
def all_reduces_of_a_step(answer: tuple[int, int, int, int]) -> str:
    """As many as the ranks counted, in the first step and later."""
    first, later, counted_first, counted_later = answer
    if first != counted_first:
        if first == counted_later:
            raise WrongAnswer(
                "in the first step it is not that many: the order of gradients is not known yet, "
                "so there is nothing to make small buckets of."
            )
        raise WrongAnswer(
            f"in the first step it is not {first}. Look at what `model` did in step 1."
        )
    if later != counted_later:
        why = _WHY_NOT.get(later, _COUNT_AGAIN)
        raise WrongAnswer(f"the first step is right. Later it is not {later}: {why}")
    return (
        f"right: {counted_first}, then {counted_later} in each step, as the ranks counted. Layers "
        "that are too small go together, and one that is too large is not cut."
    )


# -- no_sync ---------------------------------------------------------------------------

_MICRO_BATCHES = 4


@exercise("4.4", with_passed(by_rank(_distances), by_rank(whole_number)))
def one_communication_for_four_parts(
    answer: tuple[Mapping[int, Distances], Mapping[int, int]],
) -> str:
    """One all_reduce, and the gradient of the whole quarter, averaged over ranks."""
    of, synchronised = answer
    for rank, times in synchronised.items():
        if times == 0:
            raise WrongAnswer(
                f"rank {rank} never communicated, so its gradient is its own. The last "
                "micro-batch must be outside of no_sync."
            )
        if times >= _MICRO_BATCHES:
            raise WrongAnswer(
                f"rank {rank} communicated {times} times. The *forward* of the first three must "
                "be within model.no_sync() as well: it decides whether its backward communicates."
            )
        if times > 1:
            raise WrongAnswer(f"rank {rank} communicated {times} times. Once is enough.")
    for rank, each in of.items():
        if _near(each, "ddp"):
            continue
        if _near(each, "fourfold"):
            raise WrongAnswer(
                f"communicated once, but rank {rank} has a gradient that is four times too "
                "large: four losses were added, each a mean over a quarter of the samples."
            )
        raise WrongAnswer(
            f"communicated once, but rank {rank} has another gradient than a backward with all "
            "its images gives. Is each of the four parts in it, exactly once, and weighted "
            "alike?"
        )
    return (
        "right: one all_reduce instead of four, and the same gradient up to rounding. Without "
        "no_sync it would be the same too: only the time is saved."
    )


# -- unused parameters -------------------------------------------------------------------


@exercise("4.5", by_rank(text))
def trains_although_parameters_are_unused(became: Mapping[int, str]) -> str:
    """Three steps, averaged, on every rank."""
    for rank, said in became.items():
        if said == "averaged":
            continue
        if said.startswith("no DDP object"):
            raise WrongAnswer(f"on rank {rank} wrap returns {said}. Return DDP(module, ...).")
        if "finished reduction" in said:
            raise WrongAnswer(
                f"rank {rank}: {said.partition(':')[0]}: gradients of the step before were still "
                "missing. DDP waits for those of the other head. What tells it to look which "
                "parameters a forward has used?"
            )
        if said == "not averaged":
            raise WrongAnswer(f"on rank {rank} the steps ran, but gradients differ between ranks.")
        raise WrongAnswer(f"rank {rank}: {shown(said)}")
    return (
        "right. On each rank other parameters are unused, and the buckets leave all the same, with "
        "zeros for what has no gradient there."
    )


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise WrongAnswer(AS_IT_IS)
    return number(value[0]), number(value[1])


@exercise("4.6", with_passed(number, by_rank(_pair)))
def gradient_of_a_head_that_one_rank_uses(
    answer: tuple[float, Mapping[int, tuple[float, float]]],
) -> str:
    """Return what was measured: the gradient of one rank, divided by the number of all."""
    guess, norms = answer
    last = len(norms) - 1
    own, after = norms[last][0], norms[0][1]
    if not own > 0:
        raise WrongAnswer(
            f"rank {last} has no gradient for head b: run the cell that measures again."
        )
    measured = after / own
    if abs(guess - measured) < 0.01:
        return (
            f"right: the ranks measured {measured:.2f}. Ranks without a gradient count as zeros, "
            f"and the sum is divided by {len(norms)}. A head that few ranks use learns slowly."
        )
    if guess == 1:
        raise WrongAnswer(
            "that would be the sum, or the mean over the ranks that *have* a gradient. DDP does "
            "not count who has one."
        )
    if guess == 0:
        raise WrongAnswer(
            "rank 0 did not use the head, but it takes part in the mean, as every rank."
        )
    raise WrongAnswer(f"not {guess:g}. What do the other ranks put into the sum?")
