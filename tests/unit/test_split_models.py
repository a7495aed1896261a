"""Models that are split over ranks: what these must have alike, and checkpoints of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from collective_cases import found_in_training

from ddp_notebook.model import (
    Category,
    Collective,
    Collectives,
    LoaderFacts,
    OptimizerFacts,
    Part,
    Place,
    RunFacts,
    SaveFacts,
    Shards,
    TensorDigest,
    codec,
)
from ddp_notebook.model.parallel.split import (
    CheckpointCall,
    Claim,
    Copy,
    Forwards,
    Input,
    PartialSum,
    ShardSum,
    SplitFacts,
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
    return (Copy("norm.weight", BOTH, declared, digest(begin), digest(end), "tp"),)


def test_samples_of_its_own_on_each_rank_of_a_tensor_parallel_group() -> None:
    one = SplitFacts(claims=claims(1.0, 2.0), forwards=inputs("a", "b"))
    other = SplitFacts(claims=claims(3.0, 4.0), forwards=inputs("c", "d"))
    assert found(ranks(one, other)) == [(Category.REPLICA_INPUT_MISMATCH, BOTH)]
    assert not found(ranks(one, one))
    sequence = replace(other, claims=())  # parts of a sequence: nothing was said to be the same
    assert not found(ranks(replace(one, claims=()), sequence))
    unread = replace(other, forwards=inputs("", ""))
    assert not found(ranks(one, unread))


def test_what_is_not_sharded_must_be_the_same_along_the_mesh() -> None:
    def told(*of: tuple[Copy, ...]) -> Found:
        return found(ranks(*(SplitFacts(copies=each) for each in of)))

    assert told(copy(1.0, 2.0), copy(3.0, 4.0)) == [(Category.REPLICA_DIVERGENCE, BOTH)]
    assert told(copy(1.0, 2.0), copy(1.0, 4.0)) == [(Category.REPLICA_DIVERGENCE, BOTH)]
    assert not told(copy(1.0, 2.0), copy(1.0, 2.0))
    assert not told(copy(1.0, 2.0), copy(1.0, 2.0 + 1e-7))


@pytest.mark.parametrize(
    ("begins", "drops", "seeds", "inputs_of", "category"),
    [
        ((1.0, 1.0), True, ("s", "t"), ("a", "a"), Category.RNG_MISMATCH),
        ((1.0, 1.0), True, ("s", "s"), ("a", "a"), Category.REPLICA_DIVERGENCE),
        ((1.0, 1.0), False, ("s", "t"), ("a", "a"), Category.REPLICA_DIVERGENCE),
        ((1.0, 1.0), True, ("s", "t"), ("a", "b"), Category.REPLICA_DIVERGENCE),
        ((1.0, 3.0), True, ("s", "t"), ("a", "a"), Category.REPLICA_DIVERGENCE),
    ],
)
def test_dropout_that_draws_other_numbers_within_a_tensor_parallel_group(
    begins: tuple[float, float],
    drops: bool,
    seeds: tuple[str, str],
    inputs_of: tuple[str, str],
    category: Category,
) -> None:
    def split(rank: int, end: float) -> SplitFacts:
        got = tuple(
            Input(step, f"{inputs_of[rank]}{step}", f"{seeds[rank]}{step}") for step in (1, 2)
        )
        return SplitFacts(
            copies=copy(begins[rank], end), forwards=(Forwards("Net 0", got, HERE, drops),)
        )

    assert found(ranks(split(0, 5.0), split(1, 6.0))) == [(category, BOTH)]
    assert not found(ranks(split(0, 5.0), split(1, 5.0))), "what is split may be dropped otherwise"


def test_a_parameter_that_fsdp2_leaves_out_must_be_averaged_by_the_user() -> None:
    def told(*of: tuple[Copy, ...], exchange: str = "all_gather_into_tensor") -> Found:
        facts = ranks(*(SplitFacts(copies=each, data_ranks=BOTH) for each in of))
        return found(facts, (Collective(0, 0, exchange, numel=64),))

    wrong = [(Category.PARAMS_OUTSIDE_DDP, BOTH)]
    assert told(copy(1.0, 2.0), copy(1.0, 4.0)) == wrong
    assert not told(copy(1.0, 2.0), copy(1.0, 2.0 + 1e-7)), "the user averages it"
    assert not told(copy(1.0, 2.0), copy(3.0, 4.0)), "each rank was given its own"
    assert not told(copy(1.0, 2.0), copy(1.0, 4.0), exchange="all_to_all_single"), "experts"
    assert not told(copy(1.0, 2.0), copy(1.0, 4.0), exchange="scatter"), "experts, on gloo"


def test_experts_of_each_rank_are_no_copies() -> None:
    exchange = (Collective(0, 0, "all_to_all_single", numel=64),)
    facts = ranks(SplitFacts(copies=copy(1.0, 2.0)), SplitFacts(copies=copy(3.0, 4.0)))
    assert found(facts)
    assert not found(facts, exchange)
    declared = [
        SplitFacts(copies=copy(begin, end, declared=True))
        for begin, end in ((1.0, 2.0), (3.0, 4.0))
    ]
    assert found(ranks(*declared), exchange)


def by_hand(*losses: float, got: tuple[str, ...] = ("a", "b"), back: bool = True) -> SplitFacts:
    sums = (PartialSum(BOTH, place=HERE), PartialSum(BOTH, backward=True, place=HERE))
    return SplitFacts(forwards=inputs(*got), sums=sums[: 1 + back], losses=losses)


@pytest.mark.parametrize(
    ("of", "category"),
    [
        ((by_hand(3.0, 2.0, 1.0), by_hand(3.0, 2.1, 1.2)), Category.REPLICA_DIVERGENCE),
        ((by_hand(3.0, 2.0, 1.0), by_hand(3.3, 2.1, 1.2)), Category.REPLICA_DIVERGENCE),
        (
            (by_hand(3.0, 2.0, 1.0), by_hand(3.3, 2.1, 1.2, got=("c", "d"))),
            Category.REPLICA_INPUT_MISMATCH,
        ),
        ((by_hand(3.0, 2.0, 1.0), by_hand(3.0, 2.0, 1.00001)), None),
        ((by_hand(3.0, 2.0, 1.0), by_hand(3.0, 2.1, 1.2, got=("", ""))), None),
        ((by_hand(3.0, 2.0), by_hand(3.3, 2.1)), None),
    ],
)
def test_a_model_that_is_split_by_hand_has_one_loss(
    of: tuple[SplitFacts, ...], category: Category | None
) -> None:
    assert found(ranks(*of)) == ([(category, BOTH)] if category else [])


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ((("s", "t"), ("u", "v")), True),
        ((("s", "s"), ("u", "u")), False),  # nothing draws any
        ((("s", "t"), ("s", "t")), False),
        ((("s", "t"), ("", "")), False),
    ],
)
def test_that_random_numbers_may_be_why_losses_differ(
    states: tuple[tuple[str, str], ...], told: bool
) -> None:
    def of(rank: int, *losses: float) -> SplitFacts:
        got = tuple(Input(i + 1, f"{i}", state) for i, state in enumerate(states[rank]))
        return replace(by_hand(*losses), forwards=(Forwards("Net 0", got, HERE),))

    split = dict(enumerate((of(0, 3.0, 2.0, 1.0), of(1, 3.3, 2.1, 1.2))))
    (finding,) = found_in_training(
        [RunFacts(r, 1, split=e) for r, e in split.items()], Collectives()
    )
    assert ("or random numbers (dropout)" in finding.cause) is told


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


def test_gradients_of_shards_that_are_added_up() -> None:
    wrong = SplitFacts(shard_sums=(ShardSum("up.weight", BOTH, "tp", HERE),))
    assert found(ranks(wrong, wrong)) == [(Category.MESH_MISMATCH, BOTH)]
    assert not found(ranks(SplitFacts(), SplitFacts()))


def save(path: str, part: int, moment: int = 3) -> SaveFacts:
    return SaveFacts(path, (moment,), HERE, Shards("weight", 6, BOTH, part, 2))


@pytest.mark.parametrize(
    ("saves", "culprits"),
    [
        (((save("a.pt", 0),), ()), (0,)),
        (((save("a.pt", 0), save("b.pt", 0)), ()), (0,)),
        (((save("a.pt", 0, 3),), (save("a.pt", 1, 5),)), BOTH),
        (((save("a.pt", 0),), (save("a.pt", 1),)), BOTH),
        (((save("a-0.pt", 0),), (save("a-1.pt", 1),)), ()),
        (((SaveFacts("a.pt", (3,), HERE),), ()), ()),
    ],
)
def test_parts_of_a_sharded_model_that_no_file_has(saves: Any, culprits: tuple[int, ...]) -> None:
    facts = [RunFacts(rank, 1, saves=each, collectives=9) for rank, each in enumerate(saves)]
    assert found(facts) == ([(Category.CHECKPOINT_MISUSE, culprits)] if culprits else [])


def test_one_checkpoint_that_ranks_write_to_folders_of_their_own() -> None:
    def told(*paths: str) -> Found:
        calls = [(CheckpointCall(path, BOTH, HERE),) for path in paths]
        return found(ranks(*(SplitFacts(checkpoints=each) for each in calls)))

    assert told("ckpt-0", "ckpt-1") == [(Category.CHECKPOINT_MISUSE, BOTH)]
    assert not told("ckpt", "ckpt")


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
        (PartialSum(BOTH, place=HERE),),
        (ShardSum("w", BOTH, "tp", HERE),),
        (CheckpointCall("p", BOTH, HERE),),
        (1.0, 2.0),
        BOTH,
    )
    facts = RunFacts(0, 1, split=split, saves=(save("a.pt", 1),))
    assert codec.decode(RunFacts, codec.encode(facts)) == facts
