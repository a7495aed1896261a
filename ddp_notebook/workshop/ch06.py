"""The exercises of notebook 6: runs that end well and are wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.model import name_ranks
from ddp_notebook.workshop.answers import (
    a_rank,
    by_rank,
    image_numbers,
    number,
    one_of,
    text,
    two,
    with_passed,
    yes_or_no,
)
from ddp_notebook.workshop.check import NOTEBOOK, WrongAnswer, exercise

MICRO_BATCHES, BATCH = 2, 36
"""Exercise 6.1: what one step is made of."""
IMAGES, EPOCHS = 1440, 2
UNTRAINED = "untrained"
"""Exercise 6.3."""


@exercise("6.1", two("(images, factor)", number, number))
def what_a_step_is_made_of(answer: tuple[float, float]) -> str:
    """A sum over the ranks is as many times their mean as there are ranks."""
    images, factor = answer
    world_size = NOTEBOOK.world_size
    if images != world_size * MICRO_BATCHES * BATCH:
        forgotten = {
            BATCH: "that is one micro-batch on one rank.",
            BATCH * MICRO_BATCHES: "that is what one rank brings. How many ranks are there?",
            BATCH
            * world_size: "that is one micro-batch on all ranks. How many come before a step?",
        }
        raise WrongAnswer(
            f"{images:g} images: "
            + forgotten.get(int(images) if images == images and abs(images) < 1e9 else 0, "")
            + " Multiply the images of a batch, the batches before a step, and the ranks."
        )
    if factor == world_size:
        raise WrongAnswer(
            "the images are right; the factor is upside down. A sum is larger than a mean, so the "
            "learning rate has to be smaller."
        )
    if not math.isclose(factor, 1 / world_size, rel_tol=0.05):
        raise WrongAnswer(
            f"the images are right, the factor {factor:g} is not. The mean over the ranks is their "
            "sum divided by what? Micro-batches are added up in either case."
        )
    return (
        "right. DDP averages over ranks and nothing else: the micro-batches of a rank are added "
        "up, so many people divide the loss by their number."
    )


def _alike(answer: Any) -> Mapping[str, bool]:
    if not isinstance(answer, Mapping) or set(answer) != {"one", "two"}:
        raise WrongAnswer('expected a dictionary with the keys "one" and "two".')
    return {name: yes_or_no(value) for name, value in answer.items()}


@exercise("6.2", with_passed(by_rank(_alike), by_rank(a_rank)))
def who_has_another_model(
    answer: tuple[Mapping[int, Mapping[str, bool]], Mapping[int, int]],
) -> str:
    """Model one is the same everywhere; of two, the last rank but one has another."""
    alike, odd = answer
    for rank, of in alike.items():
        if of["two"]:
            raise WrongAnswer(
                f"rank {rank} takes model two for the same everywhere. Does your check see the "
                "order of the numbers, and do the ranks compare?"
            )
        if not of["one"]:
            raise WrongAnswer(
                f"rank {rank} takes model one for different, and it is the same bit for bit. Is "
                "there anything of the rank itself in what you compare?"
            )
    # Of two ranks each differs from the other.
    right = {len(odd) - 2} if len(odd) > 2 else {min(odd.values())} & {0, 1}
    wrong = tuple(rank for rank, named in odd.items() if named not in right)
    if wrong:
        raise WrongAnswer(
            f"{name_ranks(wrong)} says that the odd one is rank {odd[wrong[0]]}. All ranks have "
            "the same list: which entry occurs once?"
        )
    return "right, and every rank knows it: after an all_gather all decide from the same list."


@exercise("6.3", with_passed(by_rank(text), by_rank(image_numbers)))
def one_model_and_every_image(
    answer: tuple[Mapping[int, str], Mapping[int, Sequence[int]]],
) -> str:
    """The same fingerprint on all ranks; each epoch a new order of all images."""
    marks, seen = answer
    if UNTRAINED in marks.values():
        raise WrongAnswer(
            "`model` is as it was before the loop. Is the loss made with the model whose "
            "parameters the optimizer has?"
        )
    if len(set(marks.values())) > 1:
        models = len(set(marks.values()))
        raise WrongAnswer(f"there are {models} different models. Which forward does DDP know of?")
    share = math.ceil(IMAGES / len(seen))
    for rank, images in seen.items():
        if len(images) != EPOCHS * share:
            raise WrongAnswer(
                f"rank {rank} has used {len(images)} images in {EPOCHS} epochs, and its share are "
                f"{share} in each. Does the sampler divide the data among all ranks?"
            )
    for epoch in range(EPOCHS):
        part = slice(epoch * share, (epoch + 1) * share)
        different = {image for images in seen.values() for image in images[part]}
        if different != set(range(IMAGES)):
            raise WrongAnswer(
                f"in epoch {epoch} the ranks have used {len(different)} different images of "
                f"{IMAGES}: some twice, others never. What must be the same on all ranks for "
                "their shares to fit together?"
            )
    if all(list(images[:share]) == list(images[share:]) for images in seen.values()):
        raise WrongAnswer("one model and every image, but both epochs have the same order.")
    return "right: one model, every image once an epoch, and a new order each time."


@exercise("6.4", one_of("A", "B", "C"))
def the_loop_that_is_right(answer: str) -> str:
    """A gives set_epoch the rank; B takes its learning rate from its own batch."""
    if answer == "A":
        raise WrongAnswer(
            "look at what each rank gives to set_epoch. What does the sampler do with it?"
        )
    if answer == "B":
        raise WrongAnswer("does every rank step with the same learning rate?")
    return (
        "right: its learning rate changes, but by the epoch, which is the same everywhere. In A "
        "the shares overlap, and in B the models drift apart."
    )
