"""The exercises of notebook 8: your own script."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.model.collectives import Part
from ddp_notebook.workshop.answers import (
    AS_IT_IS,
    a_rank,
    by_rank,
    number,
    one_of,
    parts,
    shown,
    text,
    whole_number,
    with_passed,
)
from ddp_notebook.workshop.check import NOTEBOOK, WrongAnswer, exercise

_SEEN_BY_TWO = 2 * 32
"""Images in a step of two ranks with --batch 32."""
_ROUNDING = 1e-2
"""Weights that differ by less differ by rounding; another batch makes tens of it."""
_MOST_EPOCHS = 100
_KINDS = ("conditional-collective", "divergent-control-flow", "shape-mismatch", "uneven-inputs")
_REASONS = ("too few images", "too few epochs", "another model", "it crashed")


@exercise("8.1", with_passed(whole_number, number))
def batch_of_all_ranks(answer: tuple[int, float]) -> str:
    """Two ranks with a batch of 32 see 64 images a step, and so must all."""
    batch, difference = answer
    count = NOTEBOOK.world_size
    if batch not in (_SEEN_BY_TWO // count, math.ceil(_SEEN_BY_TWO / count)):
        raise WrongAnswer(
            f"with --batch {batch} a step of {count} ranks sees {batch * count} images. How many "
            "did a step of two ranks with --batch 32 see?"
        )
    if _SEEN_BY_TWO % count:
        return f"right, as near as {count} ranks can come: 64 images are no whole number for each."
    if not abs(difference) < _ROUNDING:
        raise WrongAnswer(
            f"--batch {batch} is right, but the weights differ by {difference:.2g}: they are of "
            "another run. Run all three cells of the exercise, in their order."
        )
    return (
        f"right. The weights differ by {difference:.1g}, which is rounding. What counts is the "
        "number of images that all ranks together see in a step; double the ranks, and each "
        "takes half."
    )


def _line_and_kind(answer: Any) -> tuple[str, str]:
    """A line with the script's spaces, without a colon at its end; and a kind."""
    line, kind = parts(answer)
    line = re.sub(r"\s*([<>=]+)\s*", r" \1 ", " ".join(text(line).split())).rstrip(" :;")
    return line, one_of(*_KINDS)(kind)


@exercise("8.2", _line_and_kind)
def where_they_part(answer: tuple[str, str]) -> str:
    """Each rank leaves the loop when its own loss is small."""
    line, kind = answer
    if line.removeprefix("if ") not in ("loss < 0.25", "loss < 0.25: break", "break"):
        raise WrongAnswer(_not_that_line(line))
    if kind != "divergent-control-flow":
        raise WrongAnswer(f"the line is right. But {_NOT_THAT_KIND[kind]}")
    return (
        "right. Each rank compares a loss of its own, so one leaves the loop while the others go "
        "on to a backward that needs all of them."
    )


def _not_that_line(line: str) -> str:
    if line.startswith(("loss.backward", "dist.all_gather_object")):
        return (
            f"{shown(line)} is where ranks will wait. They diverge before: which line sends some "
            "of them here and others elsewhere?"
        )
    if line.startswith(("torch.manual_seed", "inputs", "targets")):
        return (
            "that every rank has other data is no mistake: it is what data parallel means. Which "
            "line makes a decision of it?"
        )
    if line.startswith(("if rank == 0", "with open", "json.dump")):
        return "only rank 0 writes the file, and that is as it should be: no collective is in it."
    return (
        f"not {shown(line)}. Look for a line after which ranks can be at different places. Write "
        "it as it stands in the script."
    )


_NOT_THAT_KIND = {
    "conditional-collective": (
        "the condition is not on the rank, and no collective stands under it: it decides how the "
        "program goes on."
    ),
    "shape-mismatch": "all gradients have the same shapes. What differs is when a rank stops.",
    "uneven-inputs": "every rank has 200 rows, all in one batch. What differs is when it stops.",
}


def _epochs(answer: Any) -> list[int]:
    if isinstance(answer, str):
        raise WrongAnswer(
            "the script wrote no epochs: it has not come to its end. Read the finding above, type "
            "%ddp_abort into a cell, change the script and run the exercise again."
        )
    if not isinstance(answer, (list, tuple)) or len(answer) != NOTEBOOK.world_size:
        raise WrongAnswer("the script must tell the epochs of all ranks, at its end as before.")
    return [whole_number(each) for each in answer]


@exercise("8.3", _epochs)
def all_stop_together(epochs: list[int]) -> str:
    """All leave the loop after the same epoch, and before the last."""
    if len(set(epochs)) > 1:
        raise WrongAnswer(f"they trained {epochs} epochs: not all stopped after the same one.")
    if epochs[0] >= _MOST_EPOCHS:
        raise WrongAnswer(
            f"all trained {epochs[0]} epochs, so no rank stopped early. Was the condition left "
            "out, or is a sum over the ranks compared with what was meant for one?"
        )
    if epochs[0] < 2:
        raise WrongAnswer(
            f"all stopped after epoch {epochs[0]}, when no loss was small: is the condition "
            "always true?"
        )
    return (
        f"right: {epochs[0]} epochs on every rank. They decide by a number that is the same on "
        "all of them, so they decide the same."
    )


def _steps(answer: Any) -> tuple[Mapping[int, int], SavedRun]:
    steps, saved = parts(answer)
    if not isinstance(saved, SavedRun):
        raise WrongAnswer(AS_IT_IS)
    return by_rank(whole_number)(steps), saved


@exercise("8.4", _steps)
def steps_that_were_begun(answer: tuple[Mapping[int, int], SavedRun]) -> str:
    """A gradient all_reduce of each step is in the record."""
    steps, saved = answer
    for rank, count in steps.items():
        issued = saved.collectives.of.get(rank, ())
        backward = [record for record in issued if record.part is Part.BACKWARD]
        if count == len(backward):
            continue
        if count == len(issued):
            raise WrongAnswer(
                f"rank {rank} issued {count} collectives in all. Leave out those of DDP's "
                "constructor and of evaluate."
            )
        if count == sum(record.over for record in backward):
            raise WrongAnswer(
                f"rank {rank} had ended {count} steps. One more was begun: its all_reduce waits."
            )
        raise WrongAnswer(f"not {count} on rank {rank}: its record has another number of them.")
    least = min(steps.values())
    return f"right. One rank had begun {least} steps, the others {max(steps.values())}."


def _blame(answer: Any) -> tuple[int, str, int, str]:
    rank, reason, truth = parts(answer, 3)
    culprit, drawn = parts(truth)
    said = one_of(*_REASONS)
    return a_rank(rank), said(reason), whole_number(culprit), said(drawn)


@exercise("8.5", _blame)
def who_left_and_why(answer: tuple[int, str, int, str]) -> str:
    """One rank had fewer images, or fewer epochs, and so fewer steps."""
    rank, reason, culprit, drawn = answer
    if rank != culprit:
        raise WrongAnswer(f"rank {rank} is as most of the others. Which one made fewer steps?")
    if reason == "it crashed":
        raise WrongAnswer(
            "the right rank, but it raised no error of its own, and its process lives."
        )
    if reason == "another model":
        raise WrongAnswer(
            "the right rank, but its gradients were reduced with those of the others, step after "
            "step: the models are equal."
        )
    if reason != drawn:
        raise WrongAnswer(
            "the right rank. How many steps has an epoch of the others, and did this rank leave "
            "after a whole number of epochs?"
        )
    return (
        "right. It left in the middle of an epoch: its sampler had fewer images to deal."
        if drawn == "too few images"
        else "right. It left after a whole epoch, and the others began another one."
    )
