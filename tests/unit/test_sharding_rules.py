"""Models that FSDP2 shards: ranks that wrap them in another way, or reduce in other backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from collective_cases import found, same
from traces import op, play, with_facts

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import Case, Collective, Finding, ShardedUnit


def gather(shape: int) -> Collective:
    return op("all_gather_into_tensor", 20, api="backward", shape=(shape,))


def scatter(shape: int) -> Collective:
    return op("reduce_scatter_tensor", 20, api="backward", shape=(shape,), reduce_op="AVG")


def units(*names: str, reshards: bool = True) -> tuple[ShardedUnit, ...]:
    return tuple(ShardedUnit(0, name, 272, reshards, (0, 1, 2)) for name in names)


def sharded(case: Case, *of_ranks: Sequence[ShardedUnit]) -> Case:
    ranks = zip(case.ranks, of_ranks, strict=True)
    return replace(case, ranks=tuple(with_facts(e, sharded=tuple(u)) for e, u in ranks))


def first_of(case: Case) -> Finding:
    return diagnose_run(case).findings[0]


WHOLE = units("", "blocks.0", "blocks.1")


def stuck() -> Case:
    return play(same(3, [gather(8), scatter(4)], r2=[gather(8), gather(8), scatter(4)]))


def test_a_rank_that_wraps_fewer_modules_or_frees_none_is_told() -> None:
    finding = first_of(sharded(stuck(), WHOLE, units("", "blocks.0"), WHOLE))
    assert (finding.category, finding.ranks) == ("sharding-mismatch", (1,))
    assert "rank 1: no others; ranks 0 and 2: blocks.1 (272 parameters)" in finding.cause
    other = units("", "blocks.0", "blocks.1", reshards=False)
    finding = first_of(sharded(stuck(), WHOLE, WHOLE, other))
    assert (finding.category, finding.ranks) == ("sharding-mismatch", (2,))
    assert "reshard_after_forward" in finding.cause


def test_tensors_that_one_rank_places_in_another_way_are_told() -> None:
    def place(operation: str) -> Collective:
        return op(operation, 14, api="parallelize_module", root=0)

    up, down = [place("scatter"), place("scatter")], [place("scatter"), place("broadcast")]
    last = op("barrier", 30)
    finding = first_of(play(same(3, [*up, *down, last], r1=[*up, last])))
    assert (finding.category, finding.ranks) == ("sharding-mismatch", (1,))
    assert "same plan" in finding.remedy
    alone = play(same(3, [*up, *down, last], r1=[last]))
    assert "sharding-mismatch" not in [c for c, _ in found(alone)], "it does not call it at all"
    # Of two ranks either may have another plan than was meant.
    finding = first_of(play({0: [*up, *down, last], 1: [*up, last]}))
    assert (finding.category, finding.ranks) == ("sharding-mismatch", (0, 1))


def test_ranks_that_are_further_stages_of_a_pipeline_or_well_are_left_alone() -> None:
    step = [gather(8), scatter(4)]
    healthy = play(same(3, step * 2))
    assert found(sharded(healthy, WHOLE, WHOLE, WHOLE)) == []
    elsewhere = play(same(3, [*step, *step], r1=[*step, op("barrier", 40)]))
    first = tuple(replace(unit, mesh=(0, 1)) for unit in WHOLE)
    second = tuple(replace(unit, mesh=(2,)) for unit in units("", "head"))
    assert "sharding-mismatch" not in [
        c for c, _ in found(sharded(elsewhere, first, first, second))
    ]


def trained(*counts: int) -> tuple[ShardedUnit, ...]:
    return tuple(replace(u, trained=n) for u, n in zip(WHOLE, counts, strict=True))


def test_a_rank_that_froze_a_unit_is_told_and_not_by_a_missing_bucket() -> None:
    step = [gather(8), scatter(4), scatter(6)]
    behind = play(same(3, step * 2, r1=[gather(8), scatter(4), gather(8), scatter(4)]))
    finding = first_of(sharded(behind, trained(2, 2, 2), trained(2, 0, 2), trained(2, 2, 2)))
    assert (finding.category, finding.ranks) == ("param-mismatch", (1,))
    assert "rank 1: no parameters of blocks.0" in finding.cause
    whole = [trained(0, 0, 0), trained(2, 2, 2), trained(2, 2, 2)]
    categories = [category for category, _ in found(sharded(behind, *whole))]
    assert "param-mismatch" not in categories, "all of it is frozen: perhaps for a while"
