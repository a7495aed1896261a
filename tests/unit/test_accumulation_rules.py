"""Micro-batches that nothing is divided by, and steps that a GradScaler skips for ever."""

from __future__ import annotations

from typing import Any

import pytest
from collective_cases import found_in_training

from ddp_notebook.diagnosis import diagnose_training
from ddp_notebook.model import (
    Category,
    Collectives,
    LossFacts,
    OptimizerFacts,
    Place,
    Remark,
    RunFacts,
)

HERE = Place("train.py", 6, "train", "loss.backward()")

CODE = """
def train(model, batches, opt, steps=4):
    opt.zero_grad()
    for i, (x, y) in enumerate(batches):
        loss = criterion(model(x), y)
        loss.backward()
        if (i + 1) % steps == 0:
            opt.step()
            opt.zero_grad()
"""


def remarks(source: str, losses: Any = None, **fields: Any) -> tuple[Remark, ...]:
    usual: dict[str, Any] = {"steps": 4, "windows": ((4, 3),), "span": (4, 16), "lrs": (0.1,)}
    kind = fields.pop("kind", "SGD")
    of = OptimizerFacts(f"{kind} 1", kind, place=HERE, **{**usual, **fields})
    losses = losses or (LossFacts(1.0, True, 8.0, HERE),) * 8
    facts = [RunFacts(r, 1, backwards=16, losses=losses, optimizers=(of,)) for r in (0, 1)]
    diagnosis = diagnose_training(dict(enumerate(facts)), Collectives(), {"train.py": source})
    assert not diagnosis.findings, "the learning rate may have been chosen for it"
    return diagnosis.remarks


def test_gradients_of_micro_batches_that_are_added_up_and_never_divided() -> None:
    (remark,) = remarks(CODE)
    assert (remark.kind, remark.ranks) == ("undivided-micro-batches", (0, 1))
    assert "4 micro-batches" in remark.text and "train.py:6" in remark.text
    assert any("(i + 1) % steps == 0" in line for line in remark.evidence)


@pytest.mark.parametrize(
    "source",
    [
        CODE.replace("(i + 1) % steps == 0", "(i + 1) % 4 == 0"),
        CODE.replace(
            "        if (i + 1) % steps == 0:",
            "        last = (i + 1) % steps == 0\n        if last:",
        ).replace("criterion", "0 or criterion"),
        CODE.replace("steps=4", "args").replace("% steps", "% args.accumulate"),
    ],
)
def test_the_count_may_be_written_in_other_ways(source: str) -> None:
    assert [remark.kind for remark in remarks(source)] == ["undivided-micro-batches"]


@pytest.mark.parametrize(
    "source",
    [
        "",  # the code is not known
        CODE.replace("loss.backward()", "(loss / steps).backward()"),
        CODE + "    total = total / steps\n",  # whatever it is for: the number is used
        CODE + "train(model, data, SGD(p, lr=0.1 / accumulate), steps=accumulate)\n",
        CODE.replace("% steps", "% 4") + "lr = 0.1 / 4\n",
        CODE.replace("(i + 1) % steps == 0", "(i + 1) % 5 == 0"),  # another number
        CODE.replace("        if (i + 1) % steps == 0:", "    if True:"),  # parts of a sequence
        CODE.replace("            opt.zero_grad()\n", ""),
    ],
)
def test_where_the_number_is_used_or_nothing_counts_to_it_nothing_is_said(source: str) -> None:
    assert not remarks(source)


@pytest.mark.parametrize(
    "fields",
    [
        {"losses": (LossFacts(0.25, True, 8.0, HERE),) * 8},
        {"losses": (LossFacts(1.0, False, 0.0, HERE),) * 8},  # a sum
        {"losses": (LossFacts(1.0, True, 8.0, HERE), LossFacts(1.0, True, 8.0, None)) * 4},
        {"windows": ((1, 8),), "span": (1, 9)},
        {"windows": ((4, 2), (3, 1))},  # the number is not fixed
        {"windows": ((4, 1),)},  # once proves little
        {"factors": (None, 0.25, 0.25)},  # the gradients are divided
        {"factors": (None, 0.31, 0.12)},  # they are clipped
        {"kind": "AdamW"},  # its steps hardly depend on the scale of gradients
    ],
)
def test_losses_that_are_divided_or_no_means_are_no_mistake(fields: dict[str, Any]) -> None:
    assert not remarks(CODE, **fields)


# -- GradScaler ----------------------------------------------------------------------------


def skipping(*ranks: tuple[int, int]) -> list[tuple[Category, tuple[int, ...]]]:
    """Of each rank: the steps that were skipped at the end, and the last losses that were NaN."""
    facts = [
        RunFacts(r, 1, backwards=12, skipped=skipped, nan_losses=nan, nan_place=HERE)
        for r, (skipped, nan) in enumerate(ranks)
    ]
    told = found_in_training(facts, Collectives(dict.fromkeys(range(len(ranks)), ())), "")
    return [(each.category, each.ranks) for each in told]


def test_steps_that_are_all_skipped_since_one_ranks_loss_is_no_number() -> None:
    assert skipping((12, 0), (12, 12)) == [(Category.NAN_ON_ONE_RANK, (1,))]
    assert skipping((12, 5), (12, 5)) == [(Category.NAN_ON_ONE_RANK, (0, 1))]


@pytest.mark.parametrize(
    "ranks",
    [
        ((2, 0), (2, 2)),  # it may go on
        ((0, 0), (0, 12)),  # the steps were made
        ((12, 0), (12, 0)),  # infinite gradients: the scale is still too large
        ((12, 0), (12, 1)),
    ],
)
def test_a_scaler_that_looks_for_its_scale_is_no_mistake(ranks: Any) -> None:
    assert not skipping(*ranks)


@pytest.mark.parametrize(
    ("gradients", "skipped", "bad", "ranks"),
    [
        ((0, 9), 9, (None, 0), (1,)),
        ((9, 0, 9), 9, (0, None, 0), (0, 2)),
        ((0, 5), 5, (None, 0), ()),  # a scale that is too large makes NaN as well, for a while
        ((0, 9), 9, (3, 0), ()),  # infinite on the other at first
        ((9, 9), 9, (0, 0), ()),  # of all: the scale may be too large for the model
        ((0, 9), 5, (None, 0), ()),
    ],
)
def test_steps_that_are_skipped_since_gradients_of_some_ranks_are_no_numbers(
    gradients: tuple[int, ...], skipped: int, bad: tuple[int | None, ...], ranks: tuple[int, ...]
) -> None:
    facts = [
        RunFacts(r, 1, backwards=12, skipped=skipped, nan_gradients=n, nan_backward=bad[r])
        for r, n in enumerate(gradients)
    ]
    told = found_in_training(facts, Collectives(dict.fromkeys(range(len(facts)), ())), "")
    wanted = [(Category.NAN_ON_ONE_RANK, ranks)] if ranks else []
    assert [(each.category, each.ranks) for each in told] == wanted
    assert all("a gradient there is not a number" in each.cause for each in told)
