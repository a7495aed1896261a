"""Ranks of a job with several groups: a mistake in one of them that shows in another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from collective_cases import found, lines_of, the_one
from traces import all_reduce, backward, barrier, op, places, play, raised

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import Case, Collective

Program = list[Collective]


def grid(tp: int, dp: int) -> dict[str, tuple[int, ...]]:
    """The groups of a mesh: tp neighbours, dp far away from each other."""
    rows = {f"t{row}": tuple(range(row * tp, row * tp + tp)) for row in range(dp)}
    return rows | {f"d{column}": tuple(range(column, tp * dp, tp)) for column in range(tp)}


def program(rank: int, tp: int, steps: int, skip: tuple[str, int] = ("", -1)) -> Program:
    """Each step reduces over tp, then over dp; `skip` is a group and a step left out."""
    issued = []
    for step in range(steps):
        for called, line, group in (("tp", 5, f"t{rank // tp}"), ("dp", 6, f"d{rank % tp}")):
            if (called, step) != skip:
                issued.append(all_reduce(line, group=group, called=called))
    return [*issued, barrier(9)]


def played(tp: int, dp: int, culprit: int, skip: tuple[str, int]) -> Case:
    programs = {
        rank: program(rank, tp, 6, skip if rank == culprit else ("", -1)) for rank in range(tp * dp)
    }
    return play(programs, groups=grid(tp, dp))


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (2, 4), (4, 2), (2, 3)])
@pytest.mark.parametrize("skip", [("tp", 4), ("dp", 2), ("tp", 0)])
def test_a_rank_that_left_out_a_call_in_one_group_is_named_wherever_ranks_wait(
    tp: int, dp: int, skip: tuple[str, int]
) -> None:
    for culprit in range(tp * dp):
        finding = the_one(played(tp, dp, culprit, skip))
        assert finding.ranks == (culprit,)
        assert f"over `{skip[0]}`" in finding.cause and lines_of(finding)


def test_groups_of_which_all_ranks_call_the_same_are_left_alone() -> None:
    assert found(played(2, 2, 0, ("", -1))) == []


def test_a_rank_that_raised_is_told_by_its_error_and_not_by_what_it_did_not_call() -> None:
    programs = {rank: program(rank, 2, 6) for rank in range(4)}
    programs[3] = programs[3][:7]
    case = play(programs, {3: raised("bad sample", "ValueError")}, grid(2, 2))
    assert found(case) == [("exception-on-one-rank", (3,))]


def blocks(own: int) -> Case:
    """Ranks in rows and columns: rank 3 uses its column in the third block, or once too often."""
    groups = {"r0": (0, 1), "r1": (2, 3), "c0": (0, 2), "c1": (1, 3)}
    programs = {}
    for rank in range(4):
        row, column = (
            all_reduce(n, group=g) for n, g in ((5, f"r{rank // 2}"), (9, f"c{rank % 2}"))
        )
        programs[rank] = [row, row, row, column]
        if rank == 3:
            other = all_reduce(7, group="c1")
            programs[rank] = [row, row, *[other] * own, *[row] * (own > 1), column]
    return play(programs, groups=groups)


def test_a_call_in_another_group_than_its_peers_wait_in_is_the_wrong_group() -> None:
    finding = the_one(blocks(1))
    assert (finding.category, finding.ranks) == ("subgroup-misuse", (3,))
    assert "`all_reduce` in group [1,3]; rank 2 waits for it in group [2" in finding.cause


def test_a_call_too_many_in_another_group_is_no_wrong_group() -> None:
    assert all(category != "subgroup-misuse" for category, _ in found(blocks(3)))


def test_the_name_of_another_group_is_another_group_and_no_order_of_names() -> None:
    groups = grid(2, 2)
    programs = {}
    for rank in range(4):
        tp, dp = (
            all_reduce((9, "<module>"), (5, "sync"), group=group, called=called, label=called)
            for called, group in (("tp", f"t{rank // 2}"), ("dp", f"d{rank % 2}"))
        )
        wide = replace(tp if rank == 2 else dp, path=places((10, "<module>"), (5, "sync")))
        programs[rank] = [tp, replace(dp, path=wide.path), tp, wide, tp, dp]
    finding = the_one(play(programs, groups=groups))
    assert (finding.category, finding.ranks) == ("subgroup-misuse", (2,))
    assert "Rank 2 called `all_reduce` in group `tp`" in finding.cause


SAVES = """\
def save():
    if mesh.get_local_rank("replicate") == 0:
        gather_state()
for step in range(9):
    backward()
    save()
"""


def test_a_call_of_some_over_another_group_is_told_by_its_condition_and_not_as_an_order() -> None:
    def step(rank: int) -> Collective:
        return all_reduce(5, group=f"replicate {rank % 2}", called="replicate")

    save = all_reduce((6, "<module>"), (3, "save"))
    programs = {r: [step(r), save, step(r)] if r < 2 else [step(r)] * 2 for r in range(4)}
    groups = {"replicate 0": (0, 2), "replicate 1": (1, 3)}
    finding = diagnose_run(play(programs, groups=groups), {"train.py": SAVES}).findings[0]
    assert (finding.category, finding.ranks) == ("conditional-collective", (0, 1)), finding
    assert 'move it out of `if mesh.get_local_rank("replicate") == 0`' in finding.remedy
    crossed = {0: [all_reduce(3, group="both"), save], 1: [save, all_reduce(5, group="both")]}
    first = diagnose_run(play(crossed, groups={"both": (0, 1)}), {"train.py": SAVES}).findings[0]
    assert first.category == "mismatched-order", "neither was where the other is"


@pytest.mark.parametrize(("turned", "culprits"), [((1, 3, 5), range(6)), ((1, 3), (1, 3))])
def test_rows_and_columns_in_opposite_order_are_counted_by_what_comes_first(
    turned: tuple[int, ...], culprits: Iterable[int]
) -> None:
    """Not by how many happen to wait in one row."""
    groups = {"r0": (0, 1, 2), "r1": (3, 4, 5)} | {f"c{i}": (i, i + 3) for i in range(3)}
    programs = {}
    for rank in range(6):
        row = all_reduce((9, "<module>"), (5, "over_row"), group=f"r{rank // 3}")
        column = all_reduce((9, "<module>"), (7, "over_column"), group=f"c{rank % 3}")
        programs[rank] = [column, row] if rank in turned else [row, column]
    assert found(play(programs, groups=groups)) == [("mismatched-order", tuple(culprits))]


METRICS = """\
class Hits:
    def compute(self):
        dist.all_reduce(self.hits)
class Texts:
    def compute(self):
        dist.all_gather(parts, self.texts)
for step in range(9):
    loss.backward()
    for metric in seen.values():
        metric.compute()
"""


@pytest.mark.parametrize("texts_first", [{2}, {0, 1, 3}])
def test_a_line_of_a_loop_that_calls_another_function_on_some_ranks(texts_first: set[int]) -> None:
    hits = all_reduce((10, "<module>"), (3, "compute"))
    texts = op("all_gather", (10, "<module>"), (6, "compute"))
    programs = {r: [texts, hits] if r in texts_first else [hits, texts] for r in range(4)}
    for program in (programs, {r: p[:1] for r, p in programs.items()}):  # or what comes is unknown
        finding = the_one(play(program), {"train.py": METRICS})
        assert (finding.category, finding.ranks) == ("mismatched-order", (2,))


def pushed(pulls: int) -> Case:
    """Ranks 0 and 1 train; rank 0 sends three tensors to rank 2, which has a loop of its own."""
    groups = {"train": (0, 1), "sync": (0, 2)}
    step = [replace(backward(20), group="train")]
    push = [op("broadcast", (40, "push"), group="sync", root=0, shape=(n,)) for n in (5, 6, 7)]
    pull = [op("broadcast", (50, "pull"), group="sync", root=0, shape=(n,)) for n in (5, 6, 7, 8)]
    rounds = {0: [*step, *push], 1: step, 2: pull[:pulls]}
    return play({rank: [*of, barrier(60)] * 2 for rank, of in rounds.items()}, groups=groups)


def test_a_rank_is_not_expected_in_a_group_of_others_that_has_as_many_members() -> None:
    finding = the_one(pushed(4))
    assert (finding.category, finding.ranks) == ("divergent-control-flow", (0, 2))
    title = "Rank 2 is waiting in `broadcast` for rank 0, which is one collective behind"
    assert finding.sentence == title
    assert [("push" in line, "`barrier`" in line) for line in finding.evidence[1:]] == [
        (True, False),
        (False, True),
    ]
    assert found(pushed(3)) == []


def test_one_mistake_in_all_groups_of_a_mesh_dimension_is_one_finding() -> None:
    def step(rank: int) -> Collective:
        return all_reduce(5, group=f"dp {rank % 2}", called="dp", shape=(4,))

    def log(rank: int) -> Collective:
        return all_reduce((6, "<module>"), (3, "save"), group=f"dp {rank % 2}", called="dp")

    programs = {r: [step(r), log(r), step(r)] if r < 2 else [step(r)] * 2 for r in range(4)}
    groups = {"dp 0": (0, 2), "dp 1": (1, 3)}
    (finding,) = diagnose_run(play(programs, groups=groups), {"train.py": SAVES}).findings
    assert (finding.category, finding.ranks) == ("conditional-collective", (0, 1))
    # In groups without a common name they stay two.
    plain = {r: [replace(each, called="") for each in records] for r, records in programs.items()}
    told = diagnose_run(play(plain, groups=groups), {"train.py": SAVES}).findings
    assert [each.ranks for each in told] == [(0,), (1,)]
