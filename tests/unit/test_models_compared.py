"""Models compared across ranks: who is odd, and the first difference in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.diagnosis.majority import vote
from ddp_notebook.diagnosis.training.construction import compare, diverged, failures, other_buckets
from ddp_notebook.model import Category, Finding
from ddp_notebook.model.ddp import (
    Bucket,
    BucketPlan,
    Fingerprint,
    RankFailure,
    TensorInfo,
    WrapStage,
)

NET = Fingerprint(
    parameters=(
        TensorInfo("fc1.weight", (10, 8), "float32", True, (8, 1)),
        TensorInfo("fc1.bias", (10,), "float32", True, (1,)),
        TensorInfo("fc2.weight", (4, 10), "float32", True, (10, 1)),
        TensorInfo("fc2.bias", (4,), "float32", True, (1,)),
    ),
    buffers=(
        TensorInfo("norm.running_mean", (10,), "float32"),
        TensorInfo("norm.running_var", (10,), "float32"),
    ),
)


def parameter(place: int, **fields: object) -> Fingerprint:
    """NET with another parameter at `place`."""
    tensors = list(NET.parameters)
    tensors[place] = replace(tensors[place], **fields)  # type: ignore[arg-type]
    return replace(NET, parameters=tuple(tensors))


def one(*models: Fingerprint) -> Finding:
    """The one finding about ranks 0, 1, ... with these models."""
    (finding,) = compare(dict(enumerate(models)))
    assert finding.category is Category.PARAM_MISMATCH
    assert "\n" not in finding.cause + finding.remedy
    return finding


swapped = replace(NET, parameters=(NET.parameters[1], NET.parameters[0], *NET.parameters[2:]))
without_bias = replace(NET, parameters=NET.parameters[:-1])
with_more = replace(NET, parameters=(*NET.parameters, TensorInfo("fc3.bias", (2,), "float32")))
without_norm = replace(NET, buffers=())
other_buffer = replace(NET, buffers=(NET.buffers[0], replace(NET.buffers[1], dtype="int64")))


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        (
            parameter(2, shape=(5, 10)),
            "`fc2.weight` of `model` has shape (5, 10) on rank 1, shape (4, 10) on "
            "ranks 0, 2 and 3",
        ),
        (
            parameter(0, dtype="float64"),
            "`fc1.weight` of `model` has dtype float64 on rank 1, dtype float32 on "
            "ranks 0, 2 and 3",
        ),
        (
            parameter(1, requires_grad=False),
            "`fc1.bias` of `model` has requires_grad=False on rank 1, "
            "requires_grad=True on ranks 0, 2 and 3",
        ),
        (
            parameter(0, stride=(1, 10)),
            "`fc1.weight` of `model` has stride (1, 10) on rank 1, stride (8, 1) on "
            "ranks 0, 2 and 3",
        ),
        (
            parameter(0, device="cuda"),
            "`fc1.weight` of `model` has device cuda on rank 1, device cpu on ranks 0, 2 and 3",
        ),
        (
            parameter(3, name="head.bias"),
            "Parameter 3 of `model` has the name `head.bias` on rank 1, the name `fc2.bias` on "
            "ranks 0, 2 and 3",
        ),
        (
            swapped,
            "Parameter 0 of `model` has the name `fc1.bias` on rank 1, the name `fc1.weight` on "
            "ranks 0, 2 and 3 (the same names in another order)",
        ),
        (
            without_bias,
            "`model` has 3 parameters on rank 1, 4 parameters on ranks 0, 2 and 3 "
            "(missing: `fc2.bias`)",
        ),
        (
            with_more,
            "`model` has 5 parameters on rank 1, 4 parameters on ranks 0, 2 and 3 "
            "(extra: `fc3.bias`)",
        ),
        (
            without_norm,
            "`model` has 0 buffers on rank 1, 2 buffers on ranks 0, 2 and 3 "
            "(missing: `norm.running_mean`, 1 more)",
        ),
        (
            other_buffer,
            "`norm.running_var` of `model` has dtype int64 on rank 1, dtype float32 "
            "on ranks 0, 2 and 3",
        ),
    ],
)
def test_the_first_difference_is_said_in_words(odd: Fingerprint, cause: str) -> None:
    finding = one(NET, odd, NET, NET)
    assert (finding.ranks, finding.cause) == ((1,), cause)


def test_the_remedy_is_what_to_type() -> None:
    finding = one(NET, without_bias, NET)
    assert finding.remedy == (
        "Make `model` on rank 1 as it is on ranks 0 and 2 (in a cell with `%%ddp "
        "--ranks 1`), then: "
        "`%ddp_wrap model`."
    )


def test_the_evidence_says_how_much_differs() -> None:
    odd = replace(parameter(2, shape=(5, 10)), buffers=NET.buffers[:1])
    assert one(NET, NET, odd).evidence == (
        "rank 2: 1 of 4 parameters differ: fc2.weight; 1 buffer, not 2 (missing: norm.running_var)",
    )


def test_models_that_are_alike_are_no_finding() -> None:
    assert compare({0: NET, 1: NET}) == ()
    assert compare({0: NET}) == ()
    assert compare({}) == ()


def test_of_two_ranks_the_one_that_differs_from_rank_0_is_odd() -> None:
    assert one(NET, without_bias).ranks == (1,)


def test_without_a_majority_those_that_differ_from_rank_0_are_odd() -> None:
    assert one(NET, without_bias, NET, without_bias).ranks == (1, 3)
    assert one(NET, without_bias, with_more).ranks == (1, 2)


def test_rank_0_may_be_the_odd_one() -> None:
    finding = one(without_bias, NET, NET)
    assert finding.ranks == (0,)
    assert finding.cause == (
        "`model` has 3 parameters on rank 0, 4 parameters on ranks 1 and 2 (missing: `fc2.bias`)"
    )


def test_ranks_that_differ_each_in_its_own_way_are_named_together() -> None:
    finding = one(NET, parameter(2, shape=(5, 10)), NET, parameter(2, shape=(6, 10)), NET)
    assert finding.ranks == (1, 3)
    assert finding.cause == (
        "`fc2.weight` of `model` has shape (5, 10) on rank 1 and shape (6, 10) on rank 3, "
        "shape (4, 10) on ranks 0, 2 and 4"
    )
    assert len(finding.evidence) == 2


# -- properties ------------------------------------------------------------------------

names = st.lists(st.text("abc.", min_size=1, max_size=4), unique=True, min_size=1, max_size=5)


@st.composite
def models(draw: st.DrawFn) -> Fingerprint:
    def tensor(name: str) -> TensorInfo:
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        return TensorInfo(name, shape, draw(st.sampled_from(["float32", "int64"])))

    made = [tensor(name) for name in draw(names)]
    cut = draw(st.integers(1, len(made)))
    return Fingerprint(tuple(made[:cut]), tuple(made[cut:]))


CHANGES: tuple[Callable[[TensorInfo], TensorInfo], ...] = (
    lambda t: replace(t, name=f"{t.name}x"),
    lambda t: replace(t, shape=(*t.shape, 7)),
    lambda t: replace(t, dtype="bfloat16"),
    lambda t: replace(t, requires_grad=not t.requires_grad),
    lambda t: replace(t, stride=(9, 9)),
    lambda t: replace(t, device="cuda"),
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Fingerprint, Fingerprint]:
    """A model and one that differs from it in one way."""
    model = draw(models())
    kind = draw(st.sampled_from(["one less", "one more", "changed", "reordered", "buffer"]))
    tensors = list(model.parameters)
    place = draw(st.integers(0, len(tensors) - 1))
    if kind == "one less":
        del tensors[place]
    elif kind == "one more":
        tensors.insert(place, TensorInfo("new", (1,), "float32"))
    elif kind == "reordered" and len(tensors) > 1:
        tensors = [*tensors[1:], tensors[0]]
    elif kind == "buffer":
        extra = TensorInfo("new", (1,), "float32")
        return model, replace(model, buffers=(*model.buffers, extra))
    else:
        tensors[place] = draw(st.sampled_from(CHANGES))(tensors[place])
    return model, replace(model, parameters=tuple(tensors))


@given(models(), st.integers(1, 6))
def test_equal_ranks_are_never_blamed(model: Fingerprint, world_size: int) -> None:
    assert compare(dict.fromkeys(range(world_size), model)) == ()


@given(pairs(), st.integers(3, 6), st.data())
def test_one_odd_rank_of_three_or_more_is_named_and_no_other(
    pair: tuple[Fingerprint, Fingerprint], world_size: int, data: st.DataObject
) -> None:
    model, other = pair
    odd = data.draw(st.integers(0, world_size - 1))
    ranks = {rank: other if rank == odd else model for rank in range(world_size)}
    (finding,) = compare(ranks)
    assert finding.ranks == (odd,)
    assert f" on rank {odd}, " in finding.cause
    assert finding.evidence[0].removeprefix(f"rank {odd}: ")


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_every_rank_is_either_right_or_odd(values: list[int]) -> None:
    votes = vote(dict(enumerate(values)))
    right, odd = votes.majority, votes.others
    assert sorted((*right, *(rank for ranks in odd for rank in ranks))) == list(range(len(values)))
    largest = max(map(len, (right, *odd)))
    assert 0 in right or (len(right) == largest and all(len(ranks) < largest for ranks in odd))


# -- what must agree later on ----------------------------------------------------------


def test_values_that_differ_after_the_broadcast_are_a_finding() -> None:
    assert diverged({0: ("a", "b"), 1: ("a", "b")}) == ()
    (finding,) = diverged({0: ("a", "b"), 1: ("a", "c"), 2: ("a", "b")})
    assert (finding.category, finding.ranks) == (Category.UNDECIDED, (1,))


def test_other_buckets_on_one_rank_are_a_finding() -> None:
    plan = BucketPlan((Bucket(("a",), 4),), None)
    sparse = BucketPlan((Bucket(("a",), 4), Bucket(("b",), 4)), None)
    assert other_buckets({0: plan, 1: plan}) == ()
    (finding,) = other_buckets({0: plan, 1: plan, 2: sparse})
    assert (finding.category, finding.ranks) == (Category.PARAM_MISMATCH, (2,))


# -- failures --------------------------------------------------------------------------

CPU = "RuntimeError: can't allocate memory: you tried to allocate 67108864 bytes."
CUDA = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."


@pytest.mark.parametrize(("text", "asked"), [(CPU, "64 MiB"), (CUDA, "2.50 GiB")])
def test_a_rank_out_of_memory_is_to_blame_and_the_others_wait(text: str, asked: str) -> None:
    memory = RankFailure("memory", text)
    (finding,) = failures(WrapStage.BROADCAST, {0: memory}, {}, (1, 2))
    assert (finding.category, finding.ranks) == (Category.OOM_ON_ONE_RANK, (0,))
    assert finding.waiting == (1, 2)
    assert finding.cause == (
        f"Rank 0 ran out of memory in stage broadcast of `%ddp_wrap`, asking for {asked}"
    )
    assert "%ddp_restart --ranks 0" in finding.remedy


def test_where_nobody_waits_no_restart_is_needed_after_memory_ran_out() -> None:
    memory = RankFailure("memory", "MemoryError")
    (finding,) = failures(WrapStage.REDUCER, {1: memory}, {}, ())
    assert finding.remedy.startswith("Free memory on rank 1, or restart it")


def test_a_rank_that_died_goes_before_the_errors_of_those_it_left() -> None:
    lost = RankFailure("error", "RuntimeError: Connection closed by peer")
    (finding,) = failures(WrapStage.BROADCAST, {0: lost}, {1: -9}, (2,))
    assert (finding.category, finding.ranks) == (Category.RANK_DIED, (1,))
    assert finding.waiting == (0, 2)
    assert "killed by SIGKILL" in finding.cause


def test_an_error_on_all_ranks_is_one_finding() -> None:
    error = RankFailure("error", "ValueError: no")
    (finding,) = failures(WrapStage.REDUCER, {0: error, 1: error}, {}, ())
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (0, 1))
    assert finding.cause == "Ranks 0 and 1 failed in stage reducer of `%ddp_wrap`: ValueError: no"


def test_a_model_on_a_device_without_a_backend_is_said_to_be_that() -> None:
    text = "RuntimeError: No backend type associated with device type cpu"
    (finding,) = failures(WrapStage.BROADCAST, {0: RankFailure("error", text)}, {}, (1,))
    assert finding.category is Category.BACKEND_DEVICE_MISMATCH
    assert "model.to(device)" in finding.remedy


def test_a_stage_that_was_given_up_blames_nobody() -> None:
    (finding,) = failures(WrapStage.BROADCAST, {}, {}, (1, 3))
    assert (finding.category, finding.ranks, finding.waiting) == (Category.UNDECIDED, (), (1, 3))
