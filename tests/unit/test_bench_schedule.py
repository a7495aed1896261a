"""What is measured next."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.bench.plan import Item, Plan, Schedule

ITEMS = [Item(0, 4**n) for n in range(1, 9)]


def run_all(
    schedule: Schedule, spend_s: float, times: dict[Item, list[int]] | None = None
) -> list[Item]:
    """All visits, each of which takes `spend_s`."""
    made: list[Item] = []
    while (item := schedule.next(len(made) * spend_s)) is not None:
        made.append(item)
        schedule.times_ns[item].append((times or {}).get(item, [1000] * 20))
    return made


def test_every_size_is_measured_in_three_rounds_each_in_another_order() -> None:
    made = run_all(Schedule(Plan(), ITEMS), 0.001)
    assert Counter(made) == dict.fromkeys(ITEMS, 3)
    rounds = [made[n : n + len(ITEMS)] for n in range(0, len(made), len(ITEMS))]
    assert all(sorted(each) == ITEMS for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3


def test_the_smallest_size_is_first_so_that_something_is_seen_at_once() -> None:
    assert run_all(Schedule(Plan(seed=3), ITEMS), 0.001)[0] == ITEMS[0]


def test_a_size_that_is_not_known_well_is_measured_again_and_the_others_are_not() -> None:
    wild = ITEMS[3]
    times = {wild: [1000, 5000, 9000, 13000]}
    made = Counter(run_all(Schedule(Plan(), ITEMS), 0.001, times))
    assert made[wild] == Plan().max_rounds
    assert {made[item] for item in ITEMS if item != wild} == {3}


def test_it_ends_with_the_budget_but_not_before_everything_was_measured_once() -> None:
    made = run_all(Schedule(Plan(budget_s=1.0), ITEMS), 0.25)
    assert Counter(made) == dict.fromkeys(ITEMS, 1)
    made = run_all(Schedule(Plan(budget_s=3.0), ITEMS), 0.25)
    assert len(made) == 12


@given(st.integers(1, 10**10), st.floats(0.1, 100))
def test_iterations_stay_within_their_bounds(each_ns: int, budget_s: float) -> None:
    plan = Plan(budget_s=budget_s)
    count = Schedule(plan, ITEMS).iterations(ITEMS[0], [each_ns])
    assert plan.min_iterations <= count <= plan.max_iterations


def test_iterations_are_planned_by_the_mean_so_far() -> None:
    schedule = Schedule(Plan(budget_s=8.0), ITEMS)
    assert schedule.iterations(ITEMS[0], [1_000_000, 5_000_000]) == 20
    schedule.times_ns[ITEMS[0]].append([1_000_000, 3_000_000])
    assert schedule.iterations(ITEMS[0], [1_000_000]) == 50


def test_progress_goes_from_nothing_to_all() -> None:
    schedule = Schedule(Plan(budget_s=1.0), ITEMS)
    shares = [schedule.progress(0.0)]
    for n, item in enumerate(ITEMS):
        schedule.times_ns[item].append([1000])
        shares.append(schedule.progress(n / 4))
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] == 1
