"""What `check` says of answers to the exercises of notebook 8."""

from __future__ import annotations

from typing import Any

import pytest
from answers import assert_right, assert_wrong

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.model import Case, Snapshot
from ddp_notebook.model.collectives import Collective, Collectives, Part, Phase


def record() -> SavedRun:
    """Rank 2 began two steps and left, the others began three; the last one waits."""
    of = {}
    for rank in range(4):
        steps = 2 if rank == 2 else 3
        made = [Collective(rank, 0, "broadcast", part=Part.CONSTRUCTOR, phase=Phase.DONE)]
        for number in range(1, steps + 1):
            phase = Phase.ISSUED if number == 3 else Phase.DONE
            made.append(
                Collective(rank, number, "all_reduce", part=Part.BACKWARD, phase=phase),
            )
        of[rank] = tuple(made)
    return SavedRun(Snapshot(), Snapshot(), 0, case=Case((), collectives=Collectives(of)))


RUN = record()
BEGUN = {0: 3, 1: 3, 2: 2, 3: 3}
LOT = (2, "too few images")


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("8.1", (16, 1e-6), "rounding"),
        ("8.2", ("if loss < 0.25:", "divergent-control-flow"), "a loss of its own"),
        ("8.2", (" break ", "divergent-control-flow"), "a loss of its own"),
        ("8.3", [9, 9, 9, 9], "9 epochs on every rank"),
        ("8.4", (BEGUN, RUN), "One rank had begun 2 steps, the others 3"),
        ("8.5", (2, "too few images", LOT), "in the middle of an epoch"),
        ("8.5", (1, "too few epochs", (1, "too few epochs")), "after a whole epoch"),
    ],
)
def test_right_answers_pass_and_say_why(name: str, answer: Any, says: str) -> None:
    assert_right(name, answer, says)


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("8.1", (32, 0.3), "with --batch 32 a step of 4 ranks sees 128 images"),
        ("8.1", (16, 0.3), "Run all three cells"),
        ("8.1", (16, float("nan")), "Run all three cells"),
        ("8.1", 16, "leave the cell that checks as it is"),
        ("8.2", ("loss.backward()", "divergent-control-flow"), "They diverge before"),
        (
            "8.2",
            ("dist.all_gather_object(epochs, epoch + 1)", "uneven-inputs"),
            "They diverge before",
        ),
        ("8.2", ("torch.manual_seed(rank)", "uneven-inputs"), "is no mistake"),
        ("8.2", ("if rank == 0:", "conditional-collective"), "no collective is in it"),
        ("8.2", ("optimizer.step()", "shape-mismatch"), "not 'optimizer.step()'"),
        ("8.2", ("break", "conditional-collective"), "the line is right. But the condition"),
        ("8.2", ("break", "shape-mismatch"), "the line is right. But all gradients"),
        ("8.2", ("break", "uneven-inputs"), "the line is right. But every rank has 200"),
        ("8.2", ("break", "a hang"), "not one of the choices"),
        ("8.3", [9, 9, 10, 9], "not all stopped after the same one"),
        ("8.3", [100] * 4, "no rank stopped early"),
        ("8.3", [1] * 4, "always true"),
        ("8.3", [9, 9], "all ranks"),
        ("8.4", ({rank: len(RUN.collectives.of[rank]) for rank in range(4)}, RUN), "Leave out"),
        ("8.4", ({0: 2, 1: 2, 2: 2, 3: 2}, RUN), "rank 0 had ended 2 steps. One more was begun"),
        ("8.4", ({0: 3, 1: 3, 2: 17, 3: 3}, RUN), "not 17 on rank 2"),
        ("8.4", ({0: 3}, RUN), "rank 1 is not among them"),
        ("8.4", (BEGUN, "run.json"), "it passes all that is needed"),
        ("8.5", (0, "too few images", LOT), "rank 0 is as most of the others"),
        ("8.5", (2, "it crashed", LOT), "its process lives"),
        ("8.5", (2, "another model", LOT), "the models are equal"),
        ("8.5", (2, "too few epochs", LOT), "after a whole number of epochs"),
    ],
)
def test_each_wrong_answer_is_told_what_is_wrong(name: str, answer: Any, says: str) -> None:
    assert_wrong(name, answer, says)
