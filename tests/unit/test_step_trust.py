"""How far the times of training steps are trusted: never an efficiency that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_notebook.bench.result import Trust
from ddp_notebook.bench.steps import StepBenchResult, StepPoint, judge
from ddp_notebook.views.bench import steps_html as html
from ddp_notebook.views.bench import steps_text as text
from ddp_notebook.views.bench_figures import against_batch

STEADY = tuple(10_000.0 + 50 * (n % 5) for n in range(20))
UNSTEADY = tuple(10_000.0 * (1 + n % 3) for n in range(20))


def result(
    *, alone_us: float = 8_000, times_us: tuple[float, ...] = STEADY, **told: Any
) -> StepBenchResult:
    """A benchmark of two ranks on four cores with one point."""
    point = StepPoint(
        batch=8,
        bucket="default",
        steps=len(times_us),
        step_us=10_000,
        local_us=8_000,
        forward_us=3_000,
        backward_us=4_000,
        optimizer_us=1_000,
        exposed_us=2_000,
        exposed_interval_us=(1_900, 2_100),
        alone_us=alone_us,
        world_size=2,
        times_us=times_us,
    )
    about: dict[str, Any] = {"cores": 4, "threads": 1, "world_size": 2, "others_cpu": 0.1, **told}
    return StepBenchResult("cnn", 10, 40, "images", "gloo", "cpu", points=(point,), **about)


def test_steady_steps_on_a_quiet_machine_are_trusted() -> None:
    assert judge(result()) == (Trust.GOOD, ())
    assert "Reliability: good" in text(result())
    assert "80%" in text(result())


@pytest.mark.parametrize(
    ("told", "badge", "reason"),
    [
        ({"alone_us": 12_400}, Trust.NOISY, "which is impossible: something else slowed it down"),
        ({"others_cpu": 2.0}, Trust.NOISY, "other processes used 2.0 of 4 cores"),
        ({"others_cpu": 0.5}, Trust.FAIR, "other processes used 0.5 of 4 cores"),
        ({"times_us": UNSTEADY}, Trust.NOISY, "equal steps take unequally long"),
        ({"times_us": STEADY[:3]}, Trust.FAIR, "A larger --budget helps"),
        ({"cores": 2}, Trust.FAIR, "2 ranks on 2 cores"),
    ],
)
def test_what_disturbs_is_said_beside_the_badge(
    told: dict[str, Any], badge: Trust, reason: str
) -> None:
    disturbed = result(**told)
    assert judge(disturbed)[0] is badge
    assert f"Reliability: {badge.split(' to ')[0]}" in text(disturbed)
    assert reason in judge(disturbed)[1][0]
    assert reason in html(disturbed)


def test_an_efficiency_above_a_hundred_percent_is_no_figure() -> None:
    assert "124%" not in text(result(alone_us=12_400))
    assert "noise" in text(result(alone_us=12_400))


def test_the_plot_says_noise_in_place_of_such_an_efficiency() -> None:
    texts = [text.get_text() for text in against_batch(result(alone_us=12_400)).axes[1].texts]
    assert "noise" in texts
    assert not any("%" in text for text in texts)
