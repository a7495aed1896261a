"""Models that are split over ranks: what these must have alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from collective_cases import found_in_training

from ddp_notebook.model import (
    Category,
    Claim,
    Collective,
    Collectives,
    Copy,
    Forwards,
    Input,
    LoaderFacts,
    OptimizerFacts,
    Part,
    Place,
    RunFacts,
    SplitFacts,
    TensorDigest,
    codec,
)

BOTH = (0, 1)
HERE = Place("train.py", 7, "main", "loss = model(x)")
Found = list[tuple[Category, tuple[int, ...]]]


def found(facts: list[RunFacts], records: tuple[Collective, ...] = ()) -> Found:
    of = dict.fromkeys(BOTH, records) if records else {}
    collectives = Collectives(of, {"default": BOTH} if of else {})
    return [(each.category, each.ranks) for each in found_in_training(facts, collectives)]


def ranks(*of: SplitFacts, **fields: Any) -> list[RunFacts]:
    return [RunFacts(rank, 1, split=each, **fields) for rank, each in enumerate(of)]


def digest(value: float, name: str = "") -> TensorDigest:
    return TensorDigest(name, 4, f"{value}", value, (value,) * 4)


def inputs(*hashes: str) -> tuple[Forwards, ...]:
    got = tuple(Input(number + 1, each) for number, each in enumerate(hashes))
    return (Forwards("Net 0", got, HERE),)


def claims(*values: float) -> tuple[Claim, ...]:
    return tuple(Claim(i + 1, BOTH, digest(each), HERE) for i, each in enumerate(values))


def copy(begin: float, end: float, *, declared: bool = False) -> tuple[Copy, ...]:
    return (Copy("norm.weight", BOTH, declared, digest(begin), digest(end)),)


def test_samples_of_its_own_on_each_rank_of_a_tensor_parallel_group() -> None:
    one = SplitFacts(claims=claims(1.0, 2.0), forwards=inputs("a", "b"))
    other = SplitFacts(claims=claims(3.0, 4.0), forwards=inputs("c", "d"))
    assert found(ranks(one, other)) == [(Category.REPLICA_INPUT_MISMATCH, BOTH)]
    assert not found(ranks(one, one))
    sequence = replace(other, claims=())  # parts of a sequence: nothing was said to be the same
    assert not found(ranks(replace(one, claims=()), sequence))
    unread = replace(other, forwards=inputs("", ""))
    assert not found(ranks(one, unread))


@pytest.mark.parametrize(
    ("begins", "drops", "seeds", "inputs_of", "category"),
    [
        ((1.0, 1.0), True, ("s", "t"), ("a", "a"), Category.RNG_MISMATCH),
        ((1.0, 1.0), True, ("s", "s"), ("a", "a"), None),
        ((1.0, 1.0), False, ("s", "t"), ("a", "a"), None),
        ((1.0, 1.0), True, ("s", "t"), ("a", "b"), None),
        ((1.0, 3.0), True, ("s", "t"), ("a", "a"), None),
    ],
)
def test_dropout_that_draws_other_numbers_within_a_tensor_parallel_group(
    begins: tuple[float, float],
    drops: bool,
    seeds: tuple[str, str],
    inputs_of: tuple[str, str],
    category: Category | None,
) -> None:
    def split(rank: int, end: float) -> SplitFacts:
        got = tuple(
            Input(step, f"{inputs_of[rank]}{step}", f"{seeds[rank]}{step}") for step in (1, 2)
        )
        return SplitFacts(
            copies=copy(begins[rank], end), forwards=(Forwards("Net 0", got, HERE, drops),)
        )

    told = [(category, BOTH)] if category else []
    assert found(ranks(split(0, 5.0), split(1, 6.0))) == told
    drawn = ranks(split(0, 5.0), split(1, 6.0))
    assert not found(drawn, (Collective(0, 0, "all_to_all_single", numel=64),)), "experts"
    assert not found(ranks(split(0, 5.0), split(1, 5.0))), "what is split may be dropped otherwise"


def by_hand(*losses: float, got: tuple[str, ...] = ("a", "b")) -> SplitFacts:
    return SplitFacts(forwards=inputs(*got), sums=(BOTH,), losses=losses)


@pytest.mark.parametrize(
    ("of", "category"),
    [
        ((by_hand(3.0, 2.0, 1.0), by_hand(3.3, 2.1, 1.2)), None),
        (
            (by_hand(3.0, 2.0, 1.0), by_hand(3.3, 2.1, 1.2, got=("c", "d"))),
            Category.REPLICA_INPUT_MISMATCH,
        ),
        ((by_hand(3.0, 2.0, 1.0), by_hand(3.0, 2.0, 1.00001)), None),
        ((by_hand(3.0, 2.0, 1.0), by_hand(3.0, 2.1, 1.2, got=("", ""))), None),
        ((by_hand(3.0, 2.0), by_hand(3.3, 2.1)), None),
    ],
)
def test_samples_of_its_own_on_each_rank_of_a_model_that_is_split_by_hand(
    of: tuple[SplitFacts, ...], category: Category | None
) -> None:
    assert found(ranks(*of)) == ([(category, BOTH)] if category else [])


@pytest.mark.parametrize(
    "record",
    [
        Collective(0, 0, "all_reduce", numel=20, path=(HERE,)),
        Collective(0, 0, "all_reduce", numel=64, part=Part.BACKWARD),
        Collective(0, 0, "all_gather", numel=64),
        Collective(0, 0, "send", numel=64),
    ],
)
def test_ranks_that_share_a_batch_have_losses_of_their_own(record: Collective) -> None:
    of = by_hand(3.0, 2.0, 1.0), by_hand(3.3, 2.1, 1.2, got=("c", "d"))
    optimizers = (OptimizerFacts("SGD 1", "SGD", steps=3, numels=(4, 16)),)
    facts = ranks(*of, optimizers=optimizers)
    assert found(facts)
    assert not found(facts, (record,))


def test_gradients_clipped_by_the_norm_of_a_part_of_a_model_that_is_split_by_hand() -> None:
    def told(*factors: float) -> Found:
        of = by_hand(3.0, 2.0, 1.0)
        return found(
            [
                RunFacts(
                    rank,
                    1,
                    split=of,
                    optimizers=(OptimizerFacts("SGD 1", "SGD", steps=3, factors=(factor,) * 3),),
                )
                for rank, factor in enumerate(factors)
            ]
        )

    assert told(0.5, 0.7) == [(Category.LOCAL_STATISTIC, BOTH)]
    assert not told(0.5, 0.5)


def test_a_sharded_model_that_every_rank_trains_on_the_same_batches() -> None:
    loaders = (LoaderFacts("0", 64, "RandomSampler", ("a", "b", "c"), HERE),)
    everywhere = SplitFacts(data_ranks=BOTH)
    facts = ranks(everywhere, everywhere, loaders=loaders)
    assert found(facts) == [(Category.SAMPLER_MISUSE, BOTH)]
    assert not found(ranks(SplitFacts(), SplitFacts(), loaders=loaders))  # tensor-parallel


def test_what_is_known_survives_the_wire() -> None:
    split = SplitFacts(
        claims(1.0),
        copy(1.0, 2.0),
        inputs("a"),
        (BOTH,),
        (1.0, 2.0),
        BOTH,
    )
    facts = RunFacts(0, 1, split=split)
    assert codec.decode(RunFacts, codec.encode(facts)) == facts
