"""Gradients that ranks average without DDP: what they made of them, by a few values of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from collective_cases import found_in_training

from ddp_notebook.diagnosis import diagnose_training
from ddp_notebook.diagnosis.least_squares import solved
from ddp_notebook.model import (
    Category,
    Collective,
    Collectives,
    GradientSample,
    LossFacts,
    OptimizerFacts,
    Place,
    ReplicaFacts,
    RunFacts,
    TensorDigest,
)
from ddp_notebook.model.parallel.split import Forwards, Input, SplitFacts

HERE = Place("train.py", 7, "main", "opt.step()")
NAMES = tuple(f"param_groups[0]['params'][{i}]" for i in range(4))
NUMELS = (2, 4, 8, 16)
_Rows = tuple[tuple[float, ...], ...]


def own(rank: int, step: int) -> _Rows:
    """What this rank's backward left, of four parameters."""
    return tuple(
        tuple(((rank * 7 + step * 5 + p * 3 + k * k) % 11 - 5.5) / 10 for k in range(4))
        for p in range(4)
    )


def total(weights: Sequence[float], step: int) -> _Rows:
    rows = [own(rank, step) for rank in range(len(weights))]
    return tuple(
        tuple(sum(w * row[p][k] for w, row in zip(weights, rows, strict=True)) for k in range(4))
        for p in range(4)
    )


def trained(
    size: int, used: Callable[[int, int], _Rows], losses: tuple[LossFacts, ...] = (), **fields: Any
) -> list[RunFacts]:
    """Ranks whose optimizer used these gradients, by rank and step; `begins` by rank."""
    begins = fields.pop("begins", lambda _: 1.0)
    last = fields.pop("last", lambda rank: (1.0 + rank,))
    replicas = fields.pop("replicas", ())
    common: dict[str, Any] = {"span": (1, 8)}
    common |= {"steps": 8, "watched_steps": 8, "numels": NUMELS, "sampled": NAMES, "place": HERE}
    return [
        RunFacts(
            rank,
            1,
            backwards=8,
            losses=losses,
            replicas=replicas,
            optimizers=(
                OptimizerFacts(
                    "SGD () 1",
                    fields.get("type", "SGD"),
                    **{**common, **{k: v for k, v in fields.items() if k != "type"}},
                    samples=tuple(
                        GradientSample(own(rank, step), used(rank, step), ()) for step in range(3)
                    ),
                    begins=tuple(TensorDigest(n, 4, norm=begins(rank)) for n in NAMES),
                    last_weights=last(rank),
                ),
            ),
        )
        for rank in range(size)
    ]


def kinds(
    facts: list[RunFacts], records: tuple[Collective, ...] = (), source: str = ""
) -> list[Category]:
    sent = Collectives({each.rank: records for each in facts} if records else {})
    return [finding.category for finding in found_in_training(facts, sent, source)]


def even(weight: float, size: int) -> Callable[[int, int], _Rows]:
    return lambda _, step: total((weight,) * size, step)


MEANS = tuple(LossFacts(1.0, True, 8.0, HERE) for _ in range(4))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("weight", "losses", "fields", "source", "wrong"),
    [
        (1.0, MEANS, {}, "", True),
        (None, MEANS, {}, "", False),  # averaged
        (1.0, tuple(LossFacts(0.5, True, 8.0) for _ in range(4)), {}, "", False),  # loss / world
        (1.0, tuple(LossFacts(1.0, False) for _ in range(4)), {}, "", False),  # sums
        (1.0, (), {}, "", False),  # not known
        (1.0, MEANS, {"type": "AdamW"}, "", False),  # the size hardly matters
        (1.0, MEANS, {}, "opt = SGD(p, lr=0.1 / dist.get_world_size())", False),
        (1.0, MEANS, {"mesh": (0, 1)}, "", False),  # shards
    ],
)
def test_gradients_that_are_added_up_and_never_divided(
    size: int, weight: float | None, losses: Any, fields: Any, source: str, wrong: bool
) -> None:
    used = even(weight or 1 / size, size)
    facts = trained(size, used, losses, last=lambda _: (1.0,), **fields)
    assert kinds(facts, source=source) == [Category.LOSS_SCALING] * wrong


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("losses", "fields", "wrong"),
    [
        (MEANS, {}, True),
        (MEANS, {"windows": ((2, 7),)}, False),  # as many micro-batches as ranks
        (MEANS, {"type": "AdamW"}, False),
        (tuple(LossFacts(1.0, False) for _ in range(4)), {}, False),
        ((), {}, False),
    ],
)
def test_gradients_that_are_divided_by_the_number_of_ranks_twice(
    size: int, losses: Any, fields: Any, wrong: bool
) -> None:
    fields = {"windows": ((1, 7),), **fields}
    facts = trained(size, even(size**-2, size), losses, last=lambda _: (1.0,), **fields)
    assert kinds(facts) == [Category.LOSS_SCALING] * wrong
    once = trained(size, even(1 / size, size), losses, last=lambda _: (1.0,), **fields)
    assert kinds(once) == []


@pytest.mark.parametrize(
    ("weights", "wrong"),
    [
        ((0.5, 0.1), True),
        ((0.2, 0.05, 0.3), True),
        ((0.5, 0.5), False),
        ((0.1, 0.1), False),  # clipped after the average
        ((0.75, 0.25), False),  # by the number of samples
        ((0.6, 0.1), False),
        ((0.5, 0.0), False),
    ],
)
def test_gradients_that_each_rank_clips_before_they_are_averaged(
    weights: tuple[float, ...], wrong: bool
) -> None:
    facts = trained(len(weights), lambda _, step: total(weights, step), last=lambda _: (1.0,))
    assert kinds(facts) == [Category.LOCAL_STATISTIC] * wrong


def in_part(averaged: Sequence[int]) -> Callable[[int, int], _Rows]:
    def used(rank: int, step: int) -> _Rows:
        mean, mine = total((0.5, 0.5), step), own(rank, step)
        return tuple(mean[p] if p in averaged else mine[p] for p in range(4))

    return used


def sends(*numels: int, backwards: int = 2, operation: str = "all_reduce") -> Any:
    return tuple(
        Collective(0, i, operation, numel=n, backwards=backwards, root=0)
        for i, n in enumerate(numels)
    )


@pytest.mark.parametrize(
    ("averaged", "fields", "records", "wrong"),
    [
        ((0, 2), {}, sends(2, 8), True),
        ((0, 2, 3), {}, sends(2, 8, 16), True),
        ((0, 1), {}, sends(2, 4), False),  # a head of each rank's own
        ((2, 3), {}, sends(8, 16), False),  # an embedding
        ((0, 2), {"begins": float}, sends(2, 8), False),  # each began with its own
        ((0, 2), {}, (*sends(2, 8), Collective(0, 9, "all_to_all", numel=5)), False),  # experts
        ((0, 2), {}, (*sends(2, 8), Collective(0, 9, "scatter", numel=5)), False),
        ((0, 1, 2, 3), {}, sends(*NUMELS), False),
    ],
)
def test_gradients_of_some_parameters_only_that_are_averaged(
    averaged: tuple[int, ...], fields: Any, records: Any, wrong: bool
) -> None:
    facts = trained(2, in_part(averaged), **fields)
    assert kinds(facts, records) == [Category.REPLICA_DIVERGENCE] * wrong


@pytest.mark.parametrize(
    ("averaged", "router", "experts", "operation", "wrong"),
    [
        ((0,), (1.0, 2.0), "own", "all_to_all", True),
        ((0,), (1.0, 2.0), "own", "scatter", True),
        ((0,), (1.0, 2.0), "own", "all_reduce", False),  # layers of each rank's own, no experts
        ((0,), (1.0, 1.0), "own", "all_to_all", False),  # a norm or bias of an expert begins so
        ((0,), (1.0, 2.0), "same", "all_to_all", False),  # made from one seed, experts all the same
        ((0, 1), (1.0, 2.0), "own", "all_to_all", False),  # the router is averaged
        ((), (1.0, 2.0), "own", "all_to_all", False),  # nothing is
    ],
)
def test_a_router_that_is_left_out_of_the_averages_with_the_experts(
    averaged: tuple[int, ...], router: tuple[float, ...], experts: str, operation: str, wrong: bool
) -> None:
    """The second parameter is the router, the last two are an expert."""

    def begins(rank: int) -> tuple[TensorDigest, ...]:
        expert = (1.0 + rank, 5.0) if experts == "own" else (1.0, 5.0)
        values = ((1.0, 2.0), router, expert, expert)
        return tuple(
            TensorDigest(n, 2, f"{v}", sum(v), v) for n, v in zip(NAMES, values, strict=True)
        )

    facts = [
        replace(each, optimizers=(replace(each.optimizers[0], begins=begins(each.rank)),))
        for each in trained(2, in_part(averaged))
    ]
    exchange = Collective(0, 9, operation, numel=5)
    told = kinds(facts, (*sends(2, 8), exchange))
    assert told == [Category.REPLICA_DIVERGENCE] * wrong


@pytest.mark.parametrize(
    ("moved", "operation", "wrong"),
    [(0, "reduce", True), (3, "reduce", False), (0, "all_reduce", False)],
)
def test_gradients_that_are_reduced_to_one_rank_while_all_step(
    moved: int, operation: str, wrong: bool
) -> None:
    def used(rank: int, step: int) -> _Rows:
        return total((0.5, 0.5), step) if rank == 0 else total((0.0, 0.5), step)

    facts = trained(2, used, moved_steps=moved)
    found = kinds(facts, sends(*NUMELS, operation=operation))
    assert found == [Category.REPLICA_DIVERGENCE] * wrong


@pytest.mark.parametrize(
    ("fields", "records", "wrong"),
    [
        ({}, sends(*NUMELS), True),
        ({}, sends(sum(NUMELS)), True),
        ({}, sends(*NUMELS, backwards=0), False),  # the same values at first
        ({}, sends(*NUMELS, backwards=40), False),  # rarer than what is watched
        ({}, sends(4), False),  # a metric
        ({"moved_steps": 1}, sends(*NUMELS), False),  # local SGD that averages
        ({"begins": float}, sends(*NUMELS), False),
        ({"last": lambda _: (1.0,)}, sends(*NUMELS), False),
    ],
)
def test_averages_of_the_parameters_that_nobody_puts_back(
    fields: Any, records: Any, wrong: bool
) -> None:
    facts = trained(3, own, **fields)
    assert kinds(facts, records) == [Category.REPLICA_DIVERGENCE] * wrong


WRAPPED = ReplicaFacts("Net 1", "Net", "net", group_size=2, forwards=8, backwards=8, steps=8)


@pytest.mark.parametrize(
    ("fields", "records", "wrong"),
    [
        ({}, sends(3), True),
        ({"replicas": ()}, sends(3), False),  # ranks that train on their own
        ({"begins": float}, sends(3), False),  # a head of each rank's own
        ({"begins": lambda _: 0.0}, sends(3), False),  # what is sought for a sample: a shift
        ({"span": (5, 8)}, sends(3), False),  # made for a while
        ({"span": (0, 3)}, sends(3), False),
        ({}, sends(*NUMELS, backwards=30), False),  # averaged by hand
        ({"moved_steps": 2}, sends(3), False),
        ({}, (*sends(3), Collective(0, 9, "recv", numel=5)), False),  # a pipeline
        ({}, sends(sum(NUMELS) + 7, operation="all_gather"), False),  # joined with others' values
        ({}, sends(12), False),  # what each computed with its own: an ensemble
        ({}, (Collective(0, 0, "all_gather", dtype="uint8", numel=90, backwards=8),), False),
        ({}, (Collective(0, 0, "all_gather", dtype="uint8", numel=50, backwards=8),), True),
        ({}, sends(sum(NUMELS), backwards=0), True),  # before training
    ],
)
def test_a_second_model_that_was_not_wrapped(fields: Any, records: Any, wrong: bool) -> None:
    facts = trained(2, own, **{"replicas": (WRAPPED,), **fields})
    assert kinds(facts, records) == [Category.PARAMS_OUTSIDE_DDP] * wrong


def test_a_second_model_that_is_trained_on_the_same_samples_is_everyones_own() -> None:
    """Its gradients differ by as much as running statistics, or rounding, make."""

    def nearly(rank: int, step: int) -> _Rows:
        return tuple(tuple(v * (1 + rank / 50) for v in row) for row in own(0, step))

    facts = trained(2, nearly, replicas=(WRAPPED,))
    samples = {
        r: tuple(GradientSample(nearly(r, s), nearly(r, s), ()) for s in range(3)) for r in (0, 1)
    }
    facts = [
        replace(e, optimizers=(replace(e.optimizers[0], samples=samples[e.rank]),)) for e in facts
    ]
    assert not kinds(facts, sends(3))


@pytest.mark.parametrize(
    ("steps", "fields", "records", "wrong"),
    [
        ((8, 6), {}, sends(*NUMELS), True),
        ((8, 8), {}, sends(*NUMELS), False),
        ((8, 6), {"factors": (1.0, 1.0)}, sends(*NUMELS), False),  # local SGD
        ((8, 6), {"moved_steps": 2}, sends(*NUMELS), False),  # the parameters are averaged, too
        ((8, 6), {"first_weights": None}, sends(*NUMELS), False),  # each began with its own
        ((8, 6), {"last": lambda _: (1.0,)}, sends(*NUMELS), False),
        ((8, 6), {}, sends(3), False),  # a metric alone
    ],
)
def test_steps_that_one_rank_skips_by_itself(
    steps: tuple[int, int], fields: dict[str, Any], records: Any, wrong: bool
) -> None:
    facts = trained(2, even(0.5, 2), **{"factors": (None, None), **fields})
    weights = fields.get("first_weights", ())
    facts = [
        replace(
            each,
            optimizers=(
                replace(
                    each.optimizers[0],
                    steps=steps[r],
                    first_weights=(1.0 + r,) if weights is None else (1.0,),
                ),
            ),
        )
        for r, each in enumerate(facts)
    ]
    assert kinds(facts, records) == [Category.REPLICA_DIVERGENCE] * wrong


def sent_to_server(*operations: str, numel: int = sum(NUMELS)) -> Any:
    return tuple(
        Collective(1, i, operation, numel=numel, backwards=1 + i // len(operations), peer=0)
        for i, operation in enumerate(operations * 4)
    )


@pytest.mark.parametrize(
    ("records", "backwards", "wrong"),
    [
        (sent_to_server("send"), 4, True),
        ((Collective(1, 0, "recv", numel=30, peer=0), *sent_to_server("send")), 4, True),
        (sent_to_server("gather"), 4, True),
        (sent_to_server("send", "recv"), 4, False),
        (sent_to_server("send", "broadcast"), 4, False),
        (sent_to_server("send", numel=5), 4, False),  # other things than gradients
        (sent_to_server("send"), 2, False),
        (sent_to_server("all_reduce"), 4, False),
    ],
)
def test_workers_that_never_get_what_the_server_made_of_their_gradients(
    records: Any, backwards: int, wrong: bool
) -> None:
    server = trained(1, own)[0]
    facts = {0: server, 1: RunFacts(1, 1, backwards=backwards)}
    found = diagnose_training(facts, Collectives({0: (), 1: records})).findings
    assert [(e.category, e.ranks) for e in found] == [(Category.REPLICA_DIVERGENCE, (1,))] * wrong
    assert wrong or not diagnose_training(facts, Collectives({0: (), 1: records})).notes


@pytest.mark.parametrize(
    ("inputs", "records", "wrong"),
    [
        (("a", "b"), sends(5, operation="all_gather"), True),
        (("a", "a"), sends(5, operation="all_gather"), False),  # parts of layers, one batch
        (("a", ""), sends(5, operation="all_gather"), False),  # not known
        (("a", "b"), sends(5), False),  # summed in some way
        (("a", "b"), sends(5, operation="all_to_all"), False),  # experts
    ],
)
def test_parts_of_a_sequence_whose_gradients_nobody_sums(
    inputs: tuple[str, ...], records: Any, wrong: bool
) -> None:
    facts = [
        replace(each, split=SplitFacts(forwards=(Forwards("A 0", (Input(0, inputs[r]),)),)))
        for r, each in enumerate(trained(2, own))
    ]
    assert kinds(facts, records) == [Category.REPLICA_DIVERGENCE] * wrong


@pytest.mark.parametrize(
    ("rows", "wanted", "factors"),
    [
        ([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]], [2.0, 3.0, 7.0], (2.0, 3.0)),
        ([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]], [2.0, 3.0, 8.0], None),
        ([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]], [3.0, 6.0, 9.0], None),  # any of many
        ([[1.0, 0.0, 2.0], [0.0, float("nan"), 1.0]], [2.0, 3.0, 7.0], None),
    ],
)
def test_rows_that_add_up(rows: Any, wanted: Any, factors: tuple[float, ...] | None) -> None:
    found = solved(rows, wanted)
    assert found == (pytest.approx(factors) if factors else None)
