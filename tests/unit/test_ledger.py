"""The ledger compares what ranks recorded, and shows it: facts of values, no process."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from ddp_notebook.diagnosis.training.ledger import ledger
from ddp_notebook.model import (
    Ledger,
    LedgerRow,
    RankLedger,
    SteppedParameter,
    TensorDigest,
    codec,
)
from ddp_notebook.views import ledger as view

_RANDOM = random.Random(0)
OWN = [tuple(_RANDOM.gauss(0, 1) for _ in range(16)) for _ in range(3)]
MEAN = tuple(sum(values) / 3 for values in zip(*OWN, strict=True))
BEFORE, AFTER = TensorDigest("", 16, "b", 1.0), TensorDigest("", 16, "a", 1.0)


def digest(values: Any) -> TensorDigest:
    return TensorDigest("", 16, str(hash(values)), sum(abs(value or 0) for value in values))


def record(own: Any, used: Any, **changes: Any) -> SteppedParameter:
    made = SteppedParameter(
        "net.weight",
        (4, 4),
        own=own,
        backwards=1,
        used=used,
        used_digest=digest(used) if used is not None else None,
        optimizer="SGD",
        steps=4,
        lr=0.1,
        before=BEFORE,
        after=AFTER,
    )
    return replace(made, **changes)


def compared(*ranks: SteppedParameter, notes: tuple[str, ...] = ()) -> Ledger:
    of = {rank: RankLedger(rank, 1, (each,), notes) for rank, each in enumerate(ranks)}
    return ledger(codec.decode(dict[int, RankLedger], codec.encode(of)))  # as it comes


def row(*ranks: SteppedParameter) -> LedgerRow:
    (only,) = compared(*ranks).rows
    return only


def times(factor: float, values: Any) -> Any:
    return tuple(factor * value for value in values)


@pytest.mark.parametrize(
    ("used", "said", "marked"),
    [
        (MEAN, "mean of 3 ranks", False),
        (times(0.25, MEAN), "mean of 3 ranks x 0.25", False),
        (times(1.0005, MEAN), "mean of 3 ranks", False),
        (times(3, MEAN), "sum of 3 ranks", True),
        (tuple(value**2 for value in MEAN), "neither the ranks' own nor their mean", True),
        ((float("nan"),) * 16, "NaN or infinite on ranks 0-2", True),
        ((0.0,) * 16, "zeros", False),
    ],
)
def test_the_gradient_that_was_used_is_told_by_where_it_comes_from(
    used: Any, said: str, marked: bool
) -> None:
    finite = "nan" not in str(used)
    of = (record(own, used, used_digest=replace(digest(MEAN), finite=finite)) for own in OWN)
    shown = row(*of)
    assert shown.facts["optimizer_used"] == said
    assert shown.marked is marked


@pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 3])
def test_a_rank_that_uses_its_own_gradient_is_marked(factor: float) -> None:
    shown = row(*(record(own, times(factor, own)) for own in OWN))
    of = "" if factor == 1 else f" x {factor:.3g}"
    assert shown.facts["optimizer_used"] == f"own gradient{of}, not averaged"
    assert shown.marked


def test_partial_sums_of_a_tensor_that_a_plan_splits_are_not_marked() -> None:
    of = (record(own, times(3, MEAN), within="DTensor", sharded=True) for own in OWN)
    shown = row(*of)
    assert shown.facts["optimizer_used"] == "sum of 3 ranks"
    assert not shown.marked


def test_one_rank_that_uses_its_own_gradient_is_named() -> None:
    shown = row(record(OWN[0], MEAN), record(OWN[1], OWN[1]), record(OWN[2], MEAN))
    used = shown.facts["optimizer_used"]
    assert used == "ranks 0 and 2: mean of 3 ranks; rank 1: own gradient, not averaged"
    assert shown.marked


def test_few_values_are_only_told_by_factors_that_many_have() -> None:
    small = [own[:1] for own in OWN]
    clipped = times(0.3, MEAN)
    of = {
        rank: RankLedger(
            rank,
            1,
            (
                replace(record(small[rank], clipped[:1]), name="net.bias", shape=(1,)),
                record(OWN[rank], clipped),
            ),
        )
        for rank in range(3)
    }
    (shown,) = ledger(of).rows
    assert shown.parameters == ("net.bias", "net.weight")
    assert shown.facts["optimizer_used"] == "mean of 3 ranks x 0.3"
    alone = row(*(replace(record(small[r], clipped[:1]), shape=(1,)) for r in range(3)))
    assert alone.facts["optimizer_used"] == "neither the ranks' own nor their mean"


def test_shards_are_compared_with_the_mean_at_their_own_places() -> None:
    def shard(rank: int, factor: float = 1.0) -> SteppedParameter:
        mine = range(6 * rank, min(16, 6 * rank + 6))
        used = tuple(factor * MEAN[at] if at in mine else None for at in range(16))
        group, after = (0, 1, 2), TensorDigest("", 6, str(rank), 1.0)
        return record(OWN[rank], used, within="FSDP2", group=group, sharded=True, after=after)

    shown = row(shard(0), shard(1), shard(2))
    assert (shown.facts["optimizer_used"], shown.facts["across_ranks"]) == (
        "mean of 3 ranks",
        "sharded",
    )
    assert not shown.marked
    clipped = row(shard(0, 0.5), shard(1, 0.25), shard(2, 0.5))
    assert clipped.marked and "rank 1: mean of 3 ranks x 0.25" in clipped.facts["optimizer_used"]


def test_a_rank_that_did_not_use_the_parameter_brings_zeros_to_the_mean() -> None:
    mean = tuple((a + b) / 3 for a, b in zip(OWN[0], OWN[1], strict=True))
    shown = row(record(OWN[0], mean), record(OWN[1], mean), record(None, mean, backwards=0))
    assert shown.facts["own_gradients"] == "none on rank 2"
    assert shown.facts["optimizer_used"] == "mean of 3 ranks"
    assert not shown.marked


@pytest.mark.parametrize(
    ("changes", "column", "said"),
    [
        (
            {"after": TensorDigest("", 16, "else", 1.0)},
            "across_ranks",
            "differs: ranks 0 and 1 | rank 2",
        ),
        ({"steps": 3}, "optimizer_used", "ranks are at different steps"),
        ({"lr": 0.2}, "held_by", "ranks 0 and 1: SGD, step 4, lr 0.1; rank 2: SGD, step 4, lr 0.2"),
        ({"after": BEFORE}, "changed", "ranks 0 and 1: yes; rank 2: no"),
    ],
)
def test_a_rank_that_differs_is_named(changes: Any, column: str, said: str) -> None:
    shown = row(*(record(own, MEAN) for own in OWN[:2]), record(OWN[2], MEAN, **changes))
    assert shown.facts[column] == said
    assert shown.marked


@pytest.mark.parametrize(
    ("changes", "column", "said"),
    [
        ({"own": None, "used": None, "used_digest": None}, "own_gradients", "none"),
        ({"optimizer": "", "steps": 0, "used": None, "used_digest": None}, "held_by", "none"),
        ({"earlier": 3}, "own_gradients", "includes 3 backwards of earlier steps"),
    ],
)
def test_what_is_missing_on_all_ranks_is_marked(changes: Any, column: str, said: str) -> None:
    shown = row(*(replace(record(own, MEAN), **changes) for own in OWN))
    assert shown.facts[column] == said
    assert shown.marked


def test_the_worst_row_comes_first_and_alike_ones_are_one() -> None:
    good, bad = record(OWN[0], OWN[0]), record(None, None, backwards=0)
    of = {
        0: RankLedger(
            0,
            1,
            (
                replace(good, name="net.a"),
                replace(bad, name="net.b"),
                replace(good, name="net.c"),
            ),
        )
    }
    found = ledger(of)
    assert [each.parameters for each in found.rows] == [("net.b",), ("net.a", "net.c")]
    assert [each.marked for each in found.rows] == [True, False]
    assert found.title == "The last step of each optimizer on rank 0: 3 parameters, 1 worth a look"


def test_nothing_trained_is_said() -> None:
    assert ledger({0: RankLedger(0, 1), 1: RankLedger(1, 1)}).title.startswith(
        "No optimizer made a step on ranks 0 and 1: 0 parameters"
    )


def test_it_is_shown_as_text_html_and_json_with_what_was_not_seen() -> None:
    made = replace(record(OWN[0], OWN[0]), name="net.<b>weight</b>")
    found = compared(made, replace(made, own=OWN[1]), notes=("<i>FSDP1</i> is not looked into",))
    text, html = view.text(found), view.html(found)
    assert "note: ranks 0 and 1: <i>FSDP1</i> is not looked into" in text
    assert text.splitlines()[0].startswith(
        "The last step of each optimizer on ranks 0 and 1: 1 param"
    )
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "<b>" not in html and "&lt;b&gt;" in html and "<i>" not in html
    content = json.loads(json.dumps(found.to_json()))
    assert content["rows"][0]["facts"]["held_by"] == "SGD, step 4, lr 0.1"
    assert content["notes"] == ["ranks 0 and 1: <i>FSDP1</i> is not looked into"]
