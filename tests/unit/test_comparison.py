"""What is told where a run on two ranks is compared with the same on one, from what both kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ddp_notebook.diagnosis.against import compare
from ddp_notebook.diagnosis.against.causes import cause_of
from ddp_notebook.model import Place
from ddp_notebook.model.against.comparison import Comparison
from ddp_notebook.model.against.trail import (
    STAGES,
    WIDTH,
    Parameter,
    Sketches,
    Trail,
    TrainingStep,
)
from ddp_notebook.views.training.comparison import comparison_text

Change = Callable[[int, str, float], float]
"""Of a value in a step and a stage."""
PARAMETERS = (Parameter("0.weight", 16, 1.2e-7), Parameter("0.bias", 16, 1.2e-7))
BACKWARD, STEP = (Place("train.py", line, "", text) for line, text in ((7, "b()"), (9, "s()")))


def kept(
    change: Change = lambda step, stage, value: value,
    samples: Sequence[float] = (1, 2),
    steps: int = 3,
) -> compare.Kept:
    """A side that computes what all others do, but for `change`, in the second parameter."""
    numbers: list[float] = []
    for k in range(steps):
        for stage in STAGES:
            plain = [1.0 + k + n for n in range(WIDTH)]
            numbers += [*plain, *(change(k, stage, value) for value in plain)]
    made = TrainingStep(0, tuple(samples), (0.1,), 0.5, STEP, BACKWARD)
    trail = Trail((PARAMETERS,), (made,) * steps, ())
    return trail, Sketches(trail, numbers)


def rounded(_step: int, _stage: str, value: float) -> float:
    return value * (1 + 1e-7)


def compared(*ranks: compare.Kept, turned: compare.Kept | None = None) -> Comparison:
    one = kept(samples=(1, 2, 3, 4))
    return compare.compare(ranks, one, turned or kept(rounded, samples=(3, 4, 1, 2)))


def both(change: Change) -> Comparison:
    return compared(kept(change), kept(change, (3, 4)))


def test_what_differs_by_rounding_is_equal() -> None:
    result = both(lambda _, stage, value: value * (1 - 3e-7 * (stage != "start")))
    assert result.parting is None and result.steps == 3 and not result.refused
    assert "EQUAL. 2 ranks compute what one rank does in all 3" in comparison_text(result)


@pytest.mark.parametrize(
    ("stages", "told", "place", "until"),
    [
        (("backward", "gradient", "update"), "backward", BACKWARD, None),
        (("gradient", "update"), "gradient", BACKWARD, STEP),
        (("update",), "update", STEP, None),
        (("start",), "start", STEP, STEP),
    ],
)
def test_where_they_part_is_the_first_thing_that_does(
    stages: Sequence[str], told: str, place: Place, until: Place | None
) -> None:
    result = both(lambda k, stage, value: value * (1.3 if k == 1 and stage in stages else 1))
    parting = result.parting
    assert parting is not None
    assert (parting.step, parting.parameter, parting.stage) == (2, "0.bias", told)
    assert (parting.place, parting.until, parting.ranks) == (place, until, (0, 1))
    assert parting.relative == pytest.approx(0.3)
    text = comparison_text(result)
    assert "PARTED in step 2, at 0.bias" in text and "train.py" in text


def test_other_values_before_the_first_step_are_of_no_step_before() -> None:
    changed = kept(lambda k, stage, value: value * (1 + (k == 0 and stage == "start")), (3, 4))
    parting = compared(kept(), changed).parting
    assert parting is not None and (parting.step, parting.ranks) == (1, (1,))
    assert (parting.place, parting.until) == (None, STEP)
    assert "do not begin with the same values" in parting.cause
    assert "after train.py" not in comparison_text(compared(kept(), changed))


@pytest.mark.parametrize(("loss", "told"), [(2.0, True), (1.0, False), (None, False)])
def test_a_loss_that_is_not_the_mean_of_all_samples(loss: float | None, told: bool) -> None:
    step = TrainingStep(0, (), (0.1,), 1.0, None, None)
    ranks = [[[1.0, 2.0], [3.0, 4.0]]] * 2
    alone = replace(step, loss=loss)
    cause = cause_of("backward", ranks, [[2.0, 1.0], [3.0, 5.0]], [step, step], alone)
    assert ("of another loss" in cause) is told and bool(cause) is told


def test_a_single_rank_that_parts_is_named() -> None:
    result = compared(
        kept(), kept(lambda _, stage, value: value * (1 + (stage == "gradient")), (3, 4))
    )
    assert result.parting is not None and result.parting.ranks == (1,)
    assert "by what it alone knows" in result.parting.cause


@pytest.mark.parametrize(
    ("factor", "cause"),
    [(0.5, "is 1/2 of one rank's"), (2, "multiplied by the world size"), (0.7, "0.7 times")],
)
def test_a_factor_that_all_gradients_share_is_told(factor: float, cause: str) -> None:
    def scaled(side: compare.Kept) -> compare.Kept:
        trail, sketches = side
        numbers: list[float] = []
        for k in range(len(trail.steps)):
            for stage, name in enumerate(STAGES):
                times = factor if name in ("backward", "gradient") else 1
                for p in range(len(PARAMETERS)):
                    numbers += [times * value for value in sketches.of(k, stage, p)]
        return trail, Sketches(trail, numbers)

    parting = compared(scaled(kept()), scaled(kept(samples=(3, 4)))).parting
    assert parting is not None and cause in parting.cause and parting.parameter == "0.weight"


def test_ranks_with_different_numbers_of_samples_weigh_the_same() -> None:
    def change(_k: int, stage: str, value: float) -> float:
        return value + (value % 3 if stage in ("backward", "gradient") else 0)

    parting = compared(kept(change, (1,)), kept(change, (2, 3, 4))).parting
    assert parting is not None and "different numbers of samples" in parting.cause
    assert "Samples in this step: rank 0: 1, rank 1: 3." in parting.evidence


def test_other_samples_are_not_compared() -> None:
    result = compared(kept(), kept(samples=(3, 5)))
    assert not result.steps and result.parting is None
    assert "got 4 samples on 2 ranks together and 4 on one rank, and 3 of" in result.refused
    assert "CANNOT COMPARE" in comparison_text(result)


def test_samples_that_another_model_computed_may_differ_by_rounding() -> None:
    one = kept(samples=(4, 3 + 1e-7, 2, 1))
    assert compare.compare((kept(), kept(samples=(3, 4))), one, one).steps == 3


def test_random_numbers_for_each_sample_are_not_compared() -> None:
    turned = kept(lambda _, stage, value: value * (1 + (stage == "gradient")), (1, 2, 3, 4))
    result = compared(kept(), kept(samples=(3, 4)), turned=turned)
    assert "draws random numbers" in result.refused


def test_rounding_that_has_grown_ends_the_comparison() -> None:
    turned = kept(lambda k, _, value: value * (1 + 0.1 * (k == 2)), (1, 2, 3, 4))
    result = compared(kept(), kept(samples=(3, 4)), turned=turned)
    assert result.steps == 2 and "tell nothing any more" in result.refused
    text = comparison_text(result)
    assert "in the first 2 training steps" in text and "Not compared further" in text


def test_other_parameters_at_the_start_are_not_compared() -> None:
    result = both(lambda k, _, value: value + (k == 0))
    assert "not the same before the first step" in result.refused


def test_fewer_steps_on_one_rank_are_told() -> None:
    one = kept(samples=(1, 2, 3, 4), steps=2)
    result = compare.compare((kept(), kept(samples=(3, 4))), one, one)
    assert result.steps == 2 and "made 3 steps on 2 ranks and 2 on one" in result.refused


def test_not_finite_values_are_not_compared() -> None:
    turned = kept(lambda k, _, value: value if k < 1 else float("nan"), (1, 2, 3, 4))
    result = compared(kept(), kept(samples=(3, 4)), turned=turned)
    assert result.steps == 1 and "not finite" in result.refused


def test_the_same_samples_on_every_rank_are_told() -> None:
    twice = kept(samples=(1, 1, 2, 2))
    result = compare.compare((kept(), kept()), twice, twice)
    assert result.parting is None
    assert any("3 of 3 steps every rank got the same" in each for each in result.assumed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dropout": ("Dropout 2",)}, "dropout (Dropout 2)"),
        ({"batch_norm": ("BatchNorm1d 1",)}, "batch norm (BatchNorm1d 1)"),
        ({"sharded": True}, "sharded"),
        ({"steps": ()}, "no optimizer made a step"),
        ({"problem": "ValueError: x"}, "ValueError: x"),
    ],
)
def test_what_cannot_be_known_is_refused_before_one_rank_runs(
    change: dict[str, object], why: str
) -> None:
    trail, _ = kept()
    assert not compare.why_not([trail, trail])
    assert why in compare.why_not([replace(trail, **change), trail])  # type: ignore[arg-type]
