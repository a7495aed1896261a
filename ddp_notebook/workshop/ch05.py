"""The exercises of notebook 5: why does it hang in the middle?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.model import Ranks, name_ranks
from ddp_notebook.workshop.answers import (
    a_line,
    a_rank,
    by_rank,
    image_numbers,
    number,
    one_of,
    ranks,
    two,
    whole_number,
    with_passed,
)
from ddp_notebook.workshop.check import NOTEBOOK, WrongAnswer, exercise

JOBS = {"A": "slow", "B": "stuck", "C": "stuck"}
"""Exercise 5.1."""
HINTS = {
    "A": "rank 1 waits for no other rank, and its variable grows.",
    "B": "each waits for the other, in another call. Which of them is to come first?",
    "C": "rank 1 has nothing more to do. Who is to bring what rank 0 waits for?",
}

SKIPS, TAKES_PART, CALLS = (11, 12), (4, 5, 6, 13), 17
"""Lines of exercise 5.4's cell: where the last rank leaves out a loss; where the others wait."""

IMAGES, BATCH = 1500, 36
"""The samples that exercise 5.5 shares out."""


def _jobs(answer: Any) -> Mapping[str, str]:
    jobs = (
        {str(job).upper(): it for job, it in answer.items()} if isinstance(answer, Mapping) else {}
    )
    if set(jobs) != set(JOBS):
        raise WrongAnswer('expected a dictionary with the keys "A", "B" and "C".')
    return {job: one_of("slow", "stuck")(jobs[job]) for job in JOBS}


@exercise("5.1", _jobs)
def slow_or_stuck(answer: Mapping[str, str]) -> str:
    """Who waits for one that works is not stuck."""
    for job, right in JOBS.items():
        if answer[job] != right:
            raise WrongAnswer(f"job {job} is the other case: {HINTS[job]}")
    return (
        "right. In B and C no rank is left that could free the others, however long you wait; in A "
        "one is at work."
    )


@exercise("5.2", by_rank(number))
def whose_block_came(came_from: Mapping[int, float]) -> str:
    """Each rank has the block of the one before it."""
    for rank, sender in came_from.items():
        previous = (rank - 1) % len(came_from)
        if sender == rank:
            raise WrongAnswer(f"rank {rank} has its own block: look into received, not into block.")
        if sender != previous:
            raise WrongAnswer(
                f"rank {rank} has {sender:g}, and the block of rank {previous} is full of "
                f"{previous}. Was received looked at before it was filled?"
            )
    return (
        "right, all around the ring. Some rank must be ready to receive: one that does so first, "
        "or every rank, because an isend does not wait."
    )


@exercise("5.3", ranks(4))
def who_would_be_named(answer: Ranks) -> str:
    """Rank 0 alone comes to the barrier."""
    if answer == (1, 2, 3):
        raise WrongAnswer(
            "they return early, and go on to the collective that comes next for everybody. Whose "
            "collective has no partner?"
        )
    if answer == (0, 1, 2, 3):
        raise WrongAnswer(
            "they do not all do the same: who makes a call that the others leave out?"
        )
    if answer != (0,):
        raise WrongAnswer(
            f"what has {name_ranks(answer) or 'no rank'} done that all others have not? Go through "
            "the cell once as rank 0, and once as rank 1."
        )
    return (
        "right: only rank 0 calls barrier. The early return hides the condition. Only the writing "
        "belongs under it; the barrier is everyone's."
    )


@exercise("5.4", two("(rank, line)", a_rank, a_line))
def where_their_ways_part(answer: tuple[int, int]) -> str:
    """The last rank leaves out a loss that is not a number, and with it an all_reduce."""
    rank, line = answer
    last = NOTEBOOK.world_size - 1
    if rank not in range(last + 1):
        raise WrongAnswer(f"the ranks are 0 to {last}.")
    if rank != last:
        raise WrongAnswer(f"rank {rank} waits in all_reduce, as others do. Who does not?")
    if line in TAKES_PART:
        raise WrongAnswer(
            f"line {line} is where the others wait. What has kept rank {last} from coming here "
            "as often as they did?"
        )
    if line == CALLS:
        raise WrongAnswer(
            "there it gets another loss, which is no mistake. What does it do with it?"
        )
    if line not in SKIPS:
        raise WrongAnswer(
            f"in line {line} all ranks do the same, with %%ddp as line 1. Go through the loop with "
            f"the losses of rank {last}."
        )
    return (
        "right: it skips the loss that is no number, and an all_reduce with it. Its next one met "
        "the others' third, so the hang came one iteration after the mistake."
    )


@exercise("5.5", with_passed(by_rank(whole_number), by_rank(image_numbers)))
def equal_shares(answer: tuple[Mapping[int, int], Mapping[int, Sequence[int]]]) -> str:
    """As many full batches as there are for every rank, no image twice."""
    steps, used = answer
    if len(set(steps.values())) > 1:
        count = ", ".join(f"{n} on rank {rank}" for rank, n in steps.items())
        raise WrongAnswer(f"the ranks have not done the same number of steps: {count}.")
    for rank, images in used.items():
        if len(images) != BATCH * steps[rank]:
            raise WrongAnswer(
                f"rank {rank} has used {len(images)} images in {steps[rank]} steps: a batch was "
                f"not of {BATCH}. Cut its share where a full batch ends."
            )
    every = [image for images in used.values() for image in images]
    if not set(every) <= set(range(IMAGES)):
        raise WrongAnswer("a share holds what is no image: take it from `numbers`.")
    if len(set(every)) < len(every):
        raise WrongAnswer("some images are on two ranks, or twice on one: the shares overlap.")
    best = IMAGES // (BATCH * len(steps))
    if steps[0] < best:
        raise WrongAnswer(
            f"no hang, but {IMAGES - len(every)} images are left out. {steps[0]} steps on each "
            f"rank can be more: how many full batches are there for each rank?"
        )
    return (
        f"right: {best} steps on every rank, and the {IMAGES - len(every)} images that do not fill "
        "a batch for everybody are left out, as drop_last does."
    )
