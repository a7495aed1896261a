"""The exercises of notebook 1: first light."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddp_notebook.workshop.answers import (
    a_rank,
    by_rank,
    number,
    shown,
    whole_number,
    with_passed,
)
from ddp_notebook.workshop.check import NOTEBOOK, WrongAnswer, exercise


@exercise("1.1", by_rank(number))
def mean_of_the_ranks(means: Mapping[int, float]) -> str:
    """The mean of 0 to 3, on every rank."""
    mean = sum(means) / len(means)
    for rank, value in means.items():
        if math.isclose(value, mean, rel_tol=1e-4):
            continue
        if value == sum(means):
            raise WrongAnswer(
                f"rank {rank} has {value:g}, which is the sum: all_reduce adds. What makes a mean "
                "of a sum?"
            )
        if value == rank or value == rank / len(means):
            raise WrongAnswer(
                f"rank {rank} has {value:g}, which it made of its own number alone. The tensor "
                "that all_reduce has filled is the one to use."
            )
        raise WrongAnswer(
            f"rank {rank} has {value:g}. Its own number goes into a tensor of floats; all_reduce "
            "replaces that by the sum over the ranks, once."
        )
    return f"right: {mean:g} on every rank. This is just what DDP does with gradients."


_PER_RANK = 4
_IMAGES = 1440


@exercise("1.2", whole_number)
def images_of_one_step(images: int) -> str:
    """As many as all ranks draw together."""
    together = _PER_RANK * NOTEBOOK.world_size
    if images == together:
        return (
            "right. The batch of DDP is that of all ranks together: with more ranks it grows, "
            "and an epoch has fewer steps."
        )
    if images == _PER_RANK:
        raise WrongAnswer("that is the number per rank. How many images does the whole step use?")
    if images == math.ceil(_IMAGES / together):
        raise WrongAnswer("that is how many steps a rank makes in an epoch.")
    raise WrongAnswer(
        f"not {images}. How many ranks are there, and how many images does each bring?"
    )


def _first(losses: Any) -> float:
    if not isinstance(losses, (list, tuple)) or not losses:
        raise WrongAnswer(f"expected a list of losses, got {shown(losses)}.")
    return number(losses[0])


@exercise("1.3", with_passed(a_rank, by_rank(_first)))
def rank_with_the_greatest_first_loss(answer: tuple[int, Mapping[int, float]]) -> str:
    """The rank whose list begins with the greatest number."""
    rank, first = answer
    if rank not in first:
        raise WrongAnswer(f"there is no rank {rank}. They are {', '.join(map(str, first))}.")
    if first[rank] < max(first.values()):
        greater = sum(value > first[rank] for value in first.values())
        raise WrongAnswer(
            f"rank {rank} began with {first[rank]:.3f}, and {greater} of the others began with "
            "more. losses[rank][0] is the first loss of a rank."
        )
    return (
        f"right: {first[rank]:.3f}. All ranks began with the same weights, so it is the images "
        "that make the difference."
    )
