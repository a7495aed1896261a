"""The exercises of notebook 10: ranks that are stopped at a line."""

from __future__ import annotations

from typing import Any

from ddp_notebook.workshop.answers import a_line, a_rank, shown, text, two, whole_number
from ddp_notebook.workshop.check import NOTEBOOK, WrongAnswer, exercise

STEPS = 100
"""Exercise 10.1 takes so many; each rank's batches are whole but one of one rank."""
FIRST, CAUSE = "epoch", "batches"
"""Exercise 10.2: what differs first in the function, and the global variable that it comes from."""
LATER = ("decay", "rate")
DIVIDES, OVERFLOWS = 11, (9, 10)
"""Lines of exercise 10.3's cell: infinity by infinity; where infinity comes from."""
IF, STEP = 8, 2
"""Exercise 10.4."""


@exercise("10.1", two("(rank, step)", a_rank, whole_number))
def where_the_condition_is_true(answer: tuple[int, int]) -> str:
    """One rank stops; the others wait for it, each in the step that it is in."""
    rank, step = answer
    right_step, right_rank = divmod(31 * NOTEBOOK.world_size + 6, NOTEBOOK.world_size)
    if (rank, step) == (right_step, right_rank):
        raise WrongAnswer("these are the two numbers, in the other order: the rank comes first.")
    if rank != right_rank:
        raise WrongAnswer(
            f"rank {rank} is not the one with the broken batch. Which row of the table says "
            "*paused*? The others wait for it."
        )
    if step == right_step + 1:
        raise WrongAnswer(
            "the rank is right, the step is not: as many collectives as were issued, counted from "
            "1. What is `step` on that rank? It begins with 0."
        )
    if step != right_step:
        raise WrongAnswer(
            f"the rank is right, and in step {step} its batch is whole. Ask it while it is paused: "
            "%ddp_print step"
        )
    return (
        f"right: after {step} steps in which no rank stopped. The others wait in the all_reduce of "
        "the same step, and they are not stuck: the rank that they wait for is paused by you."
    )


def _rank_and_name(answer: Any) -> tuple[int, str]:
    match answer:
        case (str(), int()):
            raise WrongAnswer("the rank comes first, and then the name.")
    return two("(rank, name)", a_rank, text)(answer)


@exercise("10.2", _rank_and_name)
def the_first_that_differs(answer: tuple[int, str]) -> str:
    """The epoch is another one where there are fewer batches."""
    rank, name = answer
    last = NOTEBOOK.world_size - 1
    if name in LATER:
        raise WrongAnswer(
            f"{name} differs, and it is computed from another variable that does. Begin at the "
            "first line of the function, and print what each line has made."
        )
    if name == CAUSE:
        raise WrongAnswer(
            "that is where it comes from, and it is a global variable. Which variable of the "
            "function is the first that is made with it?"
        )
    if name != FIRST:
        raise WrongAnswer(
            f"{shown(name)} is the same on all ranks, or no variable of the function. Step, and "
            "print what the line before has made: %ddp_print warm"
        )
    # Of two ranks each differs from the other.
    if rank != last and not (last == 1 and rank == 0):
        raise WrongAnswer(
            f"the variable is right. On rank {rank} it has the value that most ranks have."
        )
    return (
        "right: step // batches is 1 there and 0 elsewhere, for that rank has fewer batches. All "
        "that follows from the epoch follows."
    )


@exercise("10.3", two("(rank, line)", a_rank, a_line))
def the_first_that_is_no_number(answer: tuple[int, int]) -> str:
    """Infinity is still a number; infinity divided by infinity is not."""
    rank, line = answer
    last = NOTEBOOK.world_size - 1
    if (rank, line) == (DIVIDES, last):
        raise WrongAnswer("these are the two numbers, in the other order: the rank comes first.")
    if rank != last:
        raise WrongAnswer(
            f"rank {rank} has no nan anywhere in it. Print on all ranks: "
            "%ddp_print share.isnan().any()"
        )
    if line in OVERFLOWS:
        raise WrongAnswer(
            f"line {line} makes an infinity on that rank, which is the beginning, but not yet a "
            "nan. When does it become one?"
        )
    if line == DIVIDES + 1:
        raise WrongAnswer(
            "there it is seen, when that line is marked. But the marked line has not run yet."
        )
    if line != DIVIDES:
        raise WrongAnswer(
            f"the rank is right, line {line} is not, with %%ddp as line 1. Step, and after each "
            "line print what it has made."
        )
    return (
        "right: exp(300) is infinity, and infinity divided by infinity is not a number. Subtract "
        "the largest score first, as torch's softmax does."
    )


@exercise("10.4", two("(line, step)", a_line, whole_number))
def where_the_ranks_part(answer: tuple[int, int]) -> str:
    """All but rank 1 leave the loop in its third pass."""
    line, step = answer
    if (line, step) == (STEP, IF):
        raise WrongAnswer("these are the two numbers, in the other order: the line comes first.")
    if line in (IF + 1, IF + 2):
        raise WrongAnswer(
            f"line {line} is where ranks are after they have diverged. Which line sent them there?"
        )
    if line == IF - 1:
        raise WrongAnswer(
            "line 7 makes the value that differs, and all ranks run it. Which line decides by it?"
        )
    if line != IF:
        raise WrongAnswer(
            f"in line {line} they do not diverge, with %%ddp as line 1. The table of the step in "
            "which they do names the branch."
        )
    if step == STEP + 1:
        raise WrongAnswer("the line is right. `step` begins with 0: print it.")
    if step != STEP:
        raise WrongAnswer(
            f"the line is right, and in step {step} all ranks still take the same branch, or have "
            "diverged before. Ask them when the table names the branch: %ddp_print step"
        )
    return (
        "right: each rank decides by its own loss. The others leave the loop, and rank 1 comes to "
        "an all_reduce that they do not call."
    )
