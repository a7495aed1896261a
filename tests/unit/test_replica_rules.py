"""Rules on what ranks know of their training: what is found, whose it is, and what is not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import report, with_facts

from ddp_notebook.diagnosis import diagnose_training
from ddp_notebook.diagnosis.collectives import out_of_step
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import minority
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.training import replicas
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Collective,
    Collectives,
    Finding,
    LoaderFacts,
    OptimizerFacts,
    Part,
    Phase,
    Place,
    RankReport,
    ReplicaCounts,
    ReplicaFacts,
    RunFacts,
    SamplerFacts,
    TensorDigest,
    codec,
    name_ranks,
)

HERE = Place("train.py", 7, "main", "opt.step()")


def tensor(name: str = "w", value: float | None = 1.0, **fields: Any) -> TensorDigest:
    finite = value is not None
    made = TensorDigest(name, 4, f"{value}", abs(value) * 2 if finite else None, (value,), finite)  # type: ignore[arg-type]
    return replace(made, **fields)


def replica(size: int = 2, **fields: Any) -> ReplicaFacts:
    usual: dict[str, Any] = {
        "key": "Net 1",
        "type": "Net",
        "name": "net",
        "device": "cpu",
        "backend": "gloo",
        "group_size": size,
        "forwards": 4,
        "backwards": 4,
        "steps": 4,
        "parameters": (tensor(),),
    }
    return ReplicaFacts(**{**usual, **fields})


def facts(rank: int, *of: ReplicaFacts, **fields: Any) -> RunFacts:
    return RunFacts(rank=rank, run=1, host="h", backwards=4, replicas=of, **fields)


def both(mine: RunFacts, other: RunFacts, *records: Collective) -> tuple[Finding, ...]:
    collectives = Collectives({0: records, 1: records})
    return diagnose_training({0: mine, 1: replace(other, rank=1)}, collectives).findings


def test_counting_that_failed_is_said_as_its_checks_are_missing() -> None:
    broken = facts(0, replica(), broken="TypeError: no such thing")
    diagnosis = diagnose_training({0: broken, 1: replace(broken, rank=1)}, Collectives())
    (note,) = diagnosis.notes
    assert "recorded only in part: counting failed" in note
    assert "(ranks 0 and 1: TypeError: no such thing)" in note


@pytest.mark.parametrize(("collectives", "told"), [(9, 1), (0, 0)])
def test_where_a_ranks_collectives_are_not_known_nothing_is_concluded_from_that(
    collectives: int, told: int
) -> None:
    mine, other = pair()
    broken = replace(mine, broken="OSError: no such file", collectives=collectives)
    found = diagnose_training({0: broken, 1: replace(other, rank=1)}, Collectives())
    assert (len(found.findings), len(found.notes)) == (told, 1)


def only(found: tuple[Finding, ...]) -> tuple[Category, tuple[int, ...]]:
    assert len(found) == 1, found
    assert found[0].remedy and found[0].evidence and "\n" not in found[0].cause
    return found[0].category, found[0].ranks


APART = (tensor(value=3.0),)


def pair(**fields: Any) -> tuple[RunFacts, RunFacts]:
    """Two ranks alike but for the values of their parameters."""
    mine = replica(**fields)
    return facts(0, mine), facts(1, replace(mine, parameters=APART))


def test_replicas_that_are_equal_give_nothing() -> None:
    assert not both(facts(0, replica()), facts(1, replica()))
    assert not diagnose_training({0: facts(0, replica())}, Collectives()).findings


def grouped(*values: float, known: bool = True) -> Iterable[Finding]:
    """Four ranks that reduce in two groups, each with these values of the parameters."""
    of = {}
    for rank, value in enumerate(values):
        group = ((0, 1), (2, 3))[rank // 2] if known else ()
        of[rank] = facts(rank, replica(group=group, parameters=(tensor(value=value),)))
    return diagnose_training(of, Collectives()).findings


def test_replicas_are_compared_within_the_group_that_reduces_them() -> None:
    assert not grouped(1.0, 1.0, 2.0, 2.0), "each group trains a model of its own"
    (finding,) = grouped(1.0, 1.0, 2.0, 3.0)
    assert (finding.category, finding.ranks) == (Category.REPLICA_DIVERGENCE, (2, 3))
    assert not grouped(1.0, 1.0, 2.0, 3.0, known=False)


@pytest.mark.parametrize(
    ("fields", "category"),
    [
        ({"unready_steps": 1, "unready": ("b",)}, Category.UNUSED_PARAMS),
        ({"bypassed_steps": 4, "bypasses": 4, "forwards": 0}, Category.DDP_BYPASS),
        ({"local_steps": 2, "no_sync_forwards": 3, "bad_place": HERE}, Category.NO_SYNC_MISUSE),
        ({"outside": ("w",)}, Category.PARAMS_OUTSIDE_DDP),
        ({}, Category.REPLICA_DIVERGENCE),
    ],
)
def test_replicas_that_differ_have_one_cause(fields: dict[str, Any], category: Category) -> None:
    found = both(*pair(**fields))
    assert only(found) == (category, (0, 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"local_steps": 2, "no_sync_forwards": 3},
        {"bypassed_steps": 1, "bypasses": 1, "forwards": 3},
        {"outside": ("w",)},
    ],
)
def test_what_did_no_harm_is_no_finding(fields: dict[str, Any]) -> None:
    assert not both(facts(0, replica(**fields)), facts(1, replica(**fields)))


def test_training_around_the_wrapper_alone_is_found_with_the_same_data_too() -> None:
    fields: dict[str, Any] = {"bypassed_steps": 4, "bypasses": 4, "forwards": 0}
    same = facts(0, replica(**fields)), facts(1, replica(**fields))
    assert only(both(*same)) == (Category.DDP_BYPASS, (0, 1))
    bucket = Collective(0, 0, "all_reduce", part=Part.BACKWARD, numel=4)
    assert not both(*same, bucket), "something was reduced all the same"


@pytest.mark.parametrize("fields", [{"bypassed_steps": 4, "forwards": 0}, {"local_steps": 2}])
def test_what_ranks_average_by_hand_is_meant_so(fields: dict[str, Any]) -> None:
    averaged = Collective(0, 0, "all_reduce", numel=4)
    metric = Collective(0, 0, "all_reduce", numel=1)
    assert not both(*pair(**fields), averaged)
    assert both(*pair(**fields), metric), "a metric is no average of parameters"


def test_a_model_of_another_group_is_not_compared() -> None:
    assert not both(*pair(size=1)), "a group of each rank's own"
    assert not both(*pair(size=4)), "a group with ranks that are not here"


def test_parameters_of_no_model_are_found_when_they_differ() -> None:
    def of(rank: int, value: float) -> RunFacts:
        optimizer = OptimizerFacts("0", "SGD", 4, (0.1,), ("Net 1",), (tensor("c", value),))
        return facts(rank, replica(), optimizers=(optimizer,))

    assert only(both(of(0, 1.0), of(1, 2.0))) == (Category.PARAMS_OUTSIDE_DDP, (0, 1))
    assert not both(of(0, 1.0), of(1, 1.0))
    later = Collective(0, 0, "all_reduce", numel=16, backwards=3)
    assert not both(of(0, 1.0), of(1, 2.0), later), "joined with what else the ranks train"


@pytest.mark.parametrize(("ends", "wrong"), [((3.0, 3.1), False), ((3.0, 4.0), True)])
def test_parameters_of_no_model_that_hardly_differ_were_trained_on_the_same_samples(
    ends: tuple[float, float], wrong: bool
) -> None:
    def of(rank: int) -> RunFacts:
        own: dict[str, Any] = {
            "begins": (tensor("c", 1.0),),
            "unwrapped": (tensor("c", ends[rank]),),
        }
        made = OptimizerFacts("0", "SGD", 4, (0.1,), ("Net 1",), **own)
        return facts(rank, replica(), optimizers=(made,))

    assert [each.category for each in both(of(0), of(1))] == [Category.PARAMS_OUTSIDE_DDP] * wrong


def optimizer(lr: float, steps: int = 4) -> dict[str, Any]:
    return {"optimizers": (OptimizerFacts("0", "SGD", steps, (lr,), ("Net 1",)),)}


def test_another_learning_rate_is_that_ranks_doing() -> None:
    of = {r: facts(r, replica(3), **optimizer(0.5 if r == 1 else 0.1)) for r in range(3)}
    found = diagnose_training(of, Collectives()).findings
    assert only(found) == (Category.REPLICA_DIVERGENCE, (1,))
    assert "0.5" in found[0].cause and "0.1" in found[0].cause
    later = {r: facts(r, replica(3), **optimizer(0.1 / (r + 1), steps=r)) for r in range(3)}
    assert not diagnose_training(later, Collectives()).findings, (
        "after other numbers of steps it may be so"
    )


def test_the_rank_whose_value_was_bad_first_is_named() -> None:
    bad = replica(parameters=(tensor(value=None),))
    first = facts(0, bad, nan_backward=2, nan_what="a gradient", nan_place=HERE)
    later = facts(1, bad, nan_backward=3, nan_what="the loss")
    assert only(both(first, later)) == (Category.NAN_ON_ONE_RANK, (0,))
    assert not both(replace(first, nan_backward=3), later), "training diverges everywhere"
    well = facts(0, replica(), nan_backward=2), facts(1, replica())
    assert not both(*well), "the step was skipped"


def test_buffers_in_another_order_are_found() -> None:
    def of(rank: int, *names: str, **fields: Any) -> RunFacts:
        return facts(rank, replica(buffer_order=names, **fields))

    assert only(both(of(0, "a", "b"), of(1, "b", "a"))) == (Category.BUFFER_SYNC, (0, 1))
    assert not both(of(0, "a", "b"), of(1, "a", "b"))


def test_buffers_that_nobody_sends_are_found_but_for_statistics_of_batches() -> None:
    def of(rank: int, **fields: Any) -> RunFacts:
        buffers = (tensor("centre", 1.0 + rank),)
        return facts(rank, replica(buffers=buffers, buffer_order=("centre",), **fields))

    alone = {"broadcast_buffers": False}
    assert only(both(of(0, **alone), of(1, **alone))) == (Category.BUFFER_SYNC, (0, 1))
    assert not both(of(0), of(1)), "DDP sends them at the next forward"
    batch = {**alone, "batch_buffers": ("centre",)}
    assert not both(of(0, **batch), of(1, **batch))


def sampled(of: int, /, **fields: Any) -> RunFacts:
    usual: dict[str, Any] = {"key": "0", "length": 16, "num_replicas": 2, "rank": of}
    sampler = SamplerFacts(**{**usual, "epochs": (0,), "place": HERE, **fields})
    return facts(of, replica(), samplers=(sampler,))


@pytest.mark.parametrize(
    ("mine", "other", "ranks"),
    [
        ({"epochs": (0, 0)}, {"epochs": (0, 0)}, (0, 1)),
        ({"epochs": (0, 1), "epochs_set": 2}, {"epochs": (0, 0)}, (1,)),
        ({"epochs": (0, 1)}, {"epochs": (1, 2)}, (0, 1)),
        ({"seed": 0}, {"seed": 1}, (0, 1)),
        ({"seed": 0}, {"seed": 7}, (0, 1)),
        ({"rank": 0}, {"rank": 0}, (1,)),
        ({"num_replicas": 1, "rank": 0}, {"num_replicas": 1, "rank": 0}, (0, 1)),
    ],
)
def test_samplers_that_do_not_divide_the_data(
    mine: dict[str, Any], other: dict[str, Any], ranks: tuple[int, ...]
) -> None:
    found = both(sampled(0, **mine), sampled(1, **other))
    assert only(found) == (Category.SAMPLER_MISUSE, ranks)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 9),
)
def test_ranks_with_the_same_epochs_are_right_unless_they_shuffle_the_same_twice(
    epochs: list[int], shuffle: bool, seed: int
) -> None:
    fields = {"epochs": tuple(epochs), "shuffle": shuffle, "seed": seed}
    found = both(sampled(0, **fields), sampled(1, **fields))
    assert bool(found) == (shuffle and len(epochs) > 1 and len(set(epochs)) == 1)


def test_the_same_batches_on_every_rank_are_found() -> None:
    def of(rank: int, *inputs: str) -> RunFacts:
        loader = LoaderFacts("0", 16, "RandomSampler", inputs, HERE)
        return facts(rank, replica(), loaders=(loader,))

    assert only(both(of(0, "a", "b"), of(1, "a", "b"))) == (Category.SAMPLER_MISUSE, (0, 1))
    assert not both(of(0, "a", "b"), of(1, "c", "d"))
    weighted = LoaderFacts("0", 16, "WeightedRandomSampler", ("a", "b"), HERE)
    (finding,) = both(*(facts(rank, replica(), loaders=(weighted,)) for rank in (0, 1)))
    assert "`WeightedRandomSampler` draws the same samples on each rank" in finding.cause
    assert not both(of(0, "a", "a"), of(1, "a", "a")), "one batch, again and again"
    assert not both(of(0, "", ""), of(1, "", "")), "nothing is known of them"


def test_two_ranks_on_one_gpu_while_another_is_free() -> None:
    def of(rank: int, gpu: str, gpus: int, backend: str = "nccl") -> RunFacts:
        mine = replica(device="cuda:0", backend=backend)
        return facts(rank, mine, gpu=gpu, gpus=gpus)

    assert only(both(of(0, "A", 2), of(1, "A", 2))) == (Category.GPU_MAPPING, (1,))
    assert not both(of(0, "A", 1), of(1, "A", 1)), "there is but one"
    assert not both(of(0, "A", 2), of(1, "B", 2))
    gloo = both(of(0, "A", 2, "gloo"), of(1, "B", 2, "gloo"))
    assert only(gloo) == (Category.BACKEND_DEVICE_MISMATCH, (0, 1))
    assert not both(of(0, "A", 1, "gloo"), of(1, "A", 1, "gloo")), "NCCL could not"


def test_rounding_is_no_difference() -> None:
    one = tensor(value=1.0)
    assert not replicas.differ(one, replace(one, hash="other", sample=(1.0 + 1e-7,)))
    assert replicas.differ(one, replace(one, hash="other", sample=(1.0001,)))
    assert not replicas.differ(one, replace(one, sample=(9.0,))), "the same bytes are the same"
    assert replicas.differ(one, tensor(value=None))
    assert not replicas.differ(tensor(value=None), tensor(value=None))


@given(st.dictionaries(st.integers(0, 6), st.integers(0, 3), min_size=1))
def test_ranks_are_odd_only_where_values_differ(values: dict[int, int]) -> None:
    found = minority(values)
    assert set(found) <= set(values)
    assert bool(found) == (len(set(values.values())) > 1)
    assert found == tuple(sorted(found))


_NAMES = st.text("ab.", min_size=1, max_size=3)
_NUMBERS = st.none() | st.floats(-9, 9)
_DIGESTS = st.builds(
    TensorDigest,
    _NAMES,
    st.integers(0, 9),
    _NAMES,
    _NUMBERS,
    st.lists(_NUMBERS, max_size=2).map(tuple),
    st.booleans(),
)
_PLACES = st.none() | st.just(HERE)
_REPLICAS = st.builds(
    ReplicaFacts,
    key=_NAMES,
    forwards=st.integers(0, 2),
    broadcast_buffers=st.booleans(),
    bypass_place=_PLACES,
    unready=st.lists(_NAMES, max_size=2).map(tuple),
    parameters=st.lists(_DIGESTS, max_size=2).map(tuple),
)
_FACTS = st.builds(
    RunFacts,
    rank=st.integers(0, 3),
    nan_backward=st.none() | st.integers(0, 3),
    nan_place=_PLACES,
    replicas=st.lists(_REPLICAS, max_size=2).map(tuple),
    optimizers=st.lists(
        st.builds(
            OptimizerFacts,
            key=_NAMES,
            lrs=st.lists(_NUMBERS, max_size=2).map(tuple),
            replicas=st.lists(_NAMES, max_size=2).map(tuple),
            unwrapped=st.lists(_DIGESTS, max_size=1).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    samplers=st.lists(
        st.builds(SamplerFacts, key=_NAMES, shuffle=st.booleans(), seed=st.integers(0, 2)),
        max_size=1,
    ).map(tuple),
)


@given(_FACTS)
def test_facts_travel_as_json(known: RunFacts) -> None:
    assert codec.decode(RunFacts, json.loads(json.dumps(codec.encode(known)))) == known


@given(st.lists(_FACTS, min_size=2, max_size=3))
def test_whatever_ranks_tell_rules_give_findings_of_their_ranks(known: list[RunFacts]) -> None:
    of = {rank: replace(each, rank=rank) for rank, each in enumerate(known)}
    for finding in diagnose_training(of, Collectives()).findings:
        assert finding.ranks and set(finding.ranks) <= set(of)


# -- ranks that wait ---------------------------------------------------------------------


def hung(mine: ReplicaFacts, theirs: ReplicaFacts) -> Case:
    """Rank 0, with `theirs`, waits in a backward; rank 1, with `mine`, does nothing."""
    records = (Collective(0, 0, "all_reduce", part=Part.BACKWARD),)
    return Case(
        (
            report(0, Activity.WAITING, "collective", replicas=(theirs,)),
            report(1, Activity.IDLE, replicas=(mine,)),
        ),
        collectives=Collectives({0: records, 1: ()}),
    )


@pytest.mark.parametrize(
    ("fields", "category"),
    [
        ({"no_sync_forwards": 1, "local_steps": 1}, Category.NO_SYNC_MISUSE),
        ({"forwards": 0, "bypasses": 4}, Category.DDP_BYPASS),
        ({"unready_steps": 1, "unready": ("b",)}, Category.UNUSED_PARAMS),
    ],
)
def test_who_does_not_reduce_what_others_reduce(fields: dict[str, Any], category: Category) -> None:
    found = tuple(out_of_step.unreduced_gradients(Context(hung(replica(**fields), replica()))))
    assert only(found) == (category, (1,))
    assert found[0].waiting == (0,)


@pytest.mark.parametrize(
    ("source", "ranks"),
    [
        ("", (0, 1)),
        ("with net.no_sync() if rank == 1 and i == 2 else nullcontext():\n    step()", (1,)),
        ("if rank == 1:\n    with net.no_sync():\n        step()", (1,)),
        ("if i % every:\n    with net.no_sync():\n        step()", (0, 1)),
    ],
)
def test_of_two_ranks_of_which_one_is_under_no_sync_either_may_be_right(
    source: str, ranks: tuple[int, ...]
) -> None:
    context = Context(hung(replica(no_sync_forwards=1), replica()), Sources({"a.py": source}))
    (finding,) = out_of_step.unreduced_gradients(context)
    assert (finding.category, finding.ranks) == (Category.NO_SYNC_MISUSE, ranks)
    assert ("either side may be wrong" in finding.remedy) == (len(ranks) == 2)


def test_who_reduces_where_most_ranks_are_under_no_sync_is_the_culprit() -> None:
    mine = replica(forwards=8, no_sync_forwards=6, local_steps=1)
    two = hung(mine, replica(forwards=5, no_sync_forwards=2))
    assert only(tuple(out_of_step.unreduced_gradients(Context(two)))) == (
        Category.NO_SYNC_MISUSE,
        (1,),
    )
    most = replace(two, ranks=(*two.ranks, replace(two.ranks[1], rank=2)))
    found = tuple(out_of_step.unreduced_gradients(Context(most)))
    assert only(found) == (Category.NO_SYNC_MISUSE, (0,))
    assert f"that {name_ranks((1, 2))} ran under `no_sync()`" in found[0].cause


def test_ranks_that_were_refused_in_their_backward_tell_as_much_as_those_that_wait() -> None:
    two = hung(replica(no_sync_forwards=1, local_steps=1), replica())
    refused = replace(two.collectives.of[0][0], phase=Phase.REFUSED)
    ranks = (
        with_facts(two.ranks[0], activity=Activity.FAILED, inside="", error_type="Mismatch"),
        replace(two.ranks[1], activity=Activity.WAITING, inside="collective"),
    )
    own = Collective(1, 0, "barrier")
    there = Collectives({0: (refused,), 1: (own,)})
    found = tuple(out_of_step.unreduced_gradients(Context(Case(ranks, collectives=there))))
    assert only(found) == (Category.NO_SYNC_MISUSE, (1,))


def test_a_rank_that_only_made_fewer_steps_is_not_blamed_here() -> None:
    assert not list(out_of_step.unreduced_gradients(Context(hung(replica(forwards=3), replica()))))
    assert not list(out_of_step.unreduced_gradients(Context(hung(replica(), replica()))))


def test_a_rank_that_has_not_come_to_that_backward_is_not_blamed_for_a_look_at_its_module() -> None:
    looks = {"forwards": 3, "bypasses": 4, "backwards": 3}
    assert not list(
        out_of_step.unreduced_gradients(Context(hung(replica(**looks), replica(backwards=4))))
    )


def test_evidence_carries_what_was_counted() -> None:
    counts = ReplicaCounts("Net 1", "Net", "net", forwards=3, bypass_place=HERE)
    evidence = report(1, replicas=(counts,))
    assert codec.decode(RankReport, json.loads(json.dumps(codec.encode(evidence)))) == evidence


def test_a_layer_that_was_replaced_is_not_also_said_to_be_unused() -> None:
    def categories(unready: str) -> list[Category]:
        each = replica(unready_steps=2, unready=(unready,), outside=("1.w",))
        each = replace(each, gradients=(tensor("1.w"),))
        of = {rank: RunFacts(rank, replicas=(each,)) for rank in range(2)}
        return [finding.category for finding in diagnose_training(of, Collectives({})).findings]

    assert categories("1.w") == [Category.PARAMS_OUTSIDE_DDP]
    assert categories("0.w") == [Category.UNUSED_PARAMS, Category.PARAMS_OUTSIDE_DDP]


def test_of_two_ranks_that_differ_neither_is_named_alone() -> None:
    (found,) = both(*pair())
    assert found.category is Category.REPLICA_DIVERGENCE
    assert found.ranks == (0, 1) and "between ranks 0" in found.cause


@pytest.mark.parametrize(
    ("groups", "numel", "wrong"),
    [
        (((0, 1), (0, 1)), 1, True),
        (((0,), (1,)), 1, False),  # two experiments, side by side
        (((0,), (1,)), 4, True),  # whose gradients are averaged by hand
    ],
)
def test_groups_that_exchange_nothing_may_try_a_learning_rate_each(
    groups: tuple[tuple[int, ...], ...], numel: int, wrong: bool
) -> None:
    every = [
        facts(r, replica(len(own), group=own), **optimizer(0.1 + r)) for r, own in enumerate(groups)
    ]
    sent = Collective(0, 0, "all_reduce", numel=numel, backwards=1)
    found = both(every[0], every[1], sent)
    assert [each.category for each in found] == [Category.REPLICA_DIVERGENCE] * wrong
