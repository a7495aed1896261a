"""The exercises of notebook 12: what features beyond plain DDP add to a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.model import Ranks
from ddp_notebook.workshop.answers import (
    by_rank,
    number,
    parts,
    ranks,
    shown,
    text,
    two,
    whole_number,
    with_passed,
)
from ddp_notebook.workshop.check import WrongAnswer, exercise

MICRO_BATCHES = 4
GATHERS = "get_model_state_dict"
SUMMED_OTHERWISE = 1e-4
"""Exercise 12.4: sums of the same numbers in another order are no further apart in all."""
SAVED_EVERY, DIES_AFTER = 3, 7
"""The script of exercise 12.5."""


def _of_rank_0(answer: Any) -> int:
    """A number that the notebook's cell has pulled from rank 0."""
    return whole_number(answer[0] if isinstance(answer, Mapping) else answer)


@exercise("12.1", with_passed(whole_number, _of_rank_0))
def reduced_without_the_forward(answer: tuple[int, int]) -> str:
    """DDP decides in the forward pass whether the backward pass will reduce."""
    guess, counted = answer
    if counted != MICRO_BATCHES:
        raise WrongAnswer(
            f"the cell above counted {counted}. Run the cells of this exercise as they are."
        )
    if guess == 1:
        raise WrongAnswer(
            "that would be so with the forward pass inside of the context. Here it is outside."
        )
    if guess != MICRO_BATCHES:
        raise WrongAnswer(f"not {guess}. How many backward passes reduce their gradients?")
    return (
        "right: whether gradients are reduced is decided in the forward pass, and that is outside "
        "of the context. The result is the same, at four times the communication."
    )


def _type_name(answer: Any) -> str:
    """A dtype, or its name with or without ``torch.``."""
    name = answer[0] if isinstance(answer, Mapping) else answer
    return text(name if isinstance(name, str) else str(name)).removeprefix("torch.").lower()


@exercise("12.2", with_passed(_type_name, _type_name))
def type_that_is_sent(answer: tuple[str, str]) -> str:
    """Gradients have their parameters' type, and autocast does not change that."""
    guess, seen = answer
    guess = {"float": "float32", "fp32": "float32", "bf16": "bfloat16"}.get(guess, guess)
    if guess == seen:
        return (
            "right: autocast casts inputs and weights inside the forward pass. The parameters stay "
            "float32, so do their gradients, and as many bytes are sent as without it."
        )
    if guess == "bfloat16":
        raise WrongAnswer(
            "that is the type of the forward pass. A gradient has the type of its parameter: "
            "%ddp_print next(watched.parameters()).dtype"
        )
    raise WrongAnswer(f"not {shown(guess)}. The hook has noted it: %ddp_print sent")


@exercise("12.3", two("(ranks, name of the function)", ranks(), text))
def what_all_ranks_must_call(answer: tuple[Ranks, str]) -> str:
    """Rank 0 waits in the all-gather of a function that only it called."""
    waiting, name = answer
    name = name.partition("(")[0].rpartition(".")[2].strip(" `")
    if waiting != (0,):
        raise WrongAnswer(
            "which rank called the function, and waits for the others? The finding's first line "
            "has it. (The others have finished the cell.)"
        )
    if "gather" in name.lower():
        raise WrongAnswer(
            "that is the collective in which it waits, deep in torch. Which function in the cell "
            "calls it?"
        )
    if name != GATHERS:
        raise WrongAnswer(f"the rank is right. {shown(name)} waits for no rank: see the line.")
    return (
        "right: to get whole parameters it gathers the parts of all ranks. All ranks call it; "
        "only the writing of the file belongs to one."
    )


@exercise("12.4", by_rank(number))
def state_to_continue_from(answer: Mapping[int, float]) -> str:
    """Parameters, the optimizer's momentum, and the number of the step."""
    if max(answer.values()) > SUMMED_OTHERWISE:
        raise WrongAnswer(
            "the resumed run is another one. Does it begin with step 4? And does the optimizer "
            "still have the momentum of the steps before?"
        )
    return (
        "right: parameters, the state of the optimizer, and the step. What is left is rounding: "
        "a new DDP sums its first step in another order."
    )


@exercise("12.5", lambda answer: parts(answer))
def steps_computed_twice(answer: tuple[Any, ...]) -> str:
    """From the last checkpoint to the death of a rank."""
    guess, printed = whole_number(answer[0]), answer[1]
    steps = [line.split()[-1] for line in printed if line.startswith("attempt ")]
    twice = len(steps) - len(set(steps))
    if not steps or not any(line.startswith("attempt 1 ") for line in printed):
        raise WrongAnswer("torchrun has printed no second attempt. Run the cell above again.")
    if guess == DIES_AFTER + 1:
        raise WrongAnswer(
            "that would be so without a checkpoint. The script saves after every third step."
        )
    if guess != twice:
        raise WrongAnswer(
            f"not {guess}. After which step was the last checkpoint written, and which steps had "
            "been computed since? Look at `printed`."
        )
    return (
        f"right: the last checkpoint was written after {DIES_AFTER // SAVED_EVERY * SAVED_EVERY} "
        f"steps, and {DIES_AFTER + 1} had been computed."
    )
