"""A model is wrapped stage by stage: what differs is found before any collective."""

from __future__ import annotations

import time

import pytest
from wrapping import NET, SOON_S, begin, has_line, run, states, still_works, train

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Category
from ddp_notebook.model.ddp import WrapStage
from ddp_notebook.session import Session
from ddp_notebook.session.tools.ddp_construction import WrapOptions

SAME_NET = NET.replace("manual_seed(rank)", "manual_seed(0)")


def kind_of(session: Session, name: str = "model") -> set[str]:
    run(session, f"kind = type({name}).__name__")
    return set(session.pull("kind").values())


# -- a healthy model -------------------------------------------------------------------


def test_a_model_is_wrapped_trains_and_its_replicas_stay_alike(ranks4: Session) -> None:
    run(ranks4, NET)
    made = begin(ranks4)
    assert (made.done, made.stage, made.diagnosis) == (True, None, None)
    assert kind_of(ranks4) == {"DistributedDataParallel"}
    (row,) = made.table.rows
    assert (row.ranks, row.passed, row.state) == ((0, 1, 2, 3), "reducer", "done")
    assert has_line(made, "6 parameters, 3 buffers, alike on ranks 0-3")
    assert has_line(made, "ranks 1-3 had other values in 4 of 6 parameters")
    assert has_line(made, "Now ranks 0-3 have the same values")
    train(ranks4, 3)
    first, *others = states(ranks4)
    parameters = slice(0, 2)  # those of the first layer; BatchNorm's buffers are each rank's own
    assert all(other[parameters] == first[parameters] for other in others)


def test_a_wrapped_model_trains_as_one_that_ddp_wrapped_alone(ranks2: Session) -> None:
    run(ranks2, NET)
    begin(ranks2)
    run(ranks2, "torch.manual_seed(5 + rank)")
    train(ranks2, 3)
    ours = states(ranks2)
    run(ranks2, NET + "model = DDP(model)\ntorch.manual_seed(5 + rank)")
    train(ranks2, 3)
    assert states(ranks2) == ours


def test_the_buffers_of_one_rank_are_told_apart(ranks4: Session) -> None:
    run(ranks4, SAME_NET + "if rank == 2: model[1].running_mean += 1")
    made = begin(ranks4)
    assert has_line(made, "ranks 1 and 3 had the values of rank 0 already")
    assert has_line(made, "rank 2 had other values in 1 of 3 buffers")
    run(ranks4, "mean = model.module[1].running_mean.sum().item()")
    assert set(ranks4.pull("mean").values()) == {0.0}


def test_the_result_can_have_another_name(ranks2: Session) -> None:
    run(ranks2, NET)
    made = begin(ranks2, target="net")
    assert made.table.title == "net is a DistributedDataParallel on ranks 0 and 1"
    assert kind_of(ranks2) == {"Sequential"}
    assert kind_of(ranks2, "net") == {"DistributedDataParallel"}


def test_parameters_that_ddp_is_told_to_ignore_may_differ(ranks2: Session) -> None:
    run(
        ranks2,
        NET + "model[3] = nn.Linear(16, 4 + rank)\n"
        "model._ddp_params_and_buffers_to_ignore = ['3.weight', '3.bias']",
    )
    made = begin(ranks2)
    assert made.done
    assert has_line(made, "4 parameters, 3 buffers, alike on ranks 0 and 1")


# -- models that differ ----------------------------------------------------------------

DIFFERENCES = {
    "number": ("model.append(nn.Linear(4, 4))", "`model` has 8 parameters on rank 1"),
    "shape": ("model[3] = nn.Linear(16, 5)", "`3.weight` of `model` has shape (5, 16) on rank 1"),
    "dtype": ("model[3].double()", "`3.weight` of `model` has dtype float64 on rank 1"),
    "order": (
        "a, b = model[0].weight, model[0].bias\n"
        "del model[0].weight, model[0].bias\n"
        "model[0].bias, model[0].weight = b, a",
        "the same names in another order",
    ),
    "name": (
        "model = nn.Sequential(model[0], model[1], model[3])",
        "Parameter 4 of `model` has the name `2.weight` on rank 1, the name `3.weight` on ranks 0",
    ),
    "requires_grad": (
        "model[0].weight.requires_grad_(False)",
        "`0.weight` of `model` has requires_grad=False on rank 1",
    ),
    "stride": (
        "model[0].weight.data = model[0].weight.data.t().contiguous().t()",
        "`0.weight` of `model` has stride (1, 16) on rank 1",
    ),
    "buffers": (
        "model[1].register_buffer('extra', torch.ones(2))",
        "(extra: `1.extra`)",
    ),
    "dtype of a buffer": (
        "model[1].running_mean = model[1].running_mean.double()",
        "`1.running_mean` of `model` has dtype float64 on rank 1",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_model_that_differs_is_found_before_any_collective(ranks4: Session, what: str) -> None:
    change, expected = DIFFERENCES[what]
    run(ranks4, NET)
    run(ranks4, change, (1,))
    began = time.monotonic()
    made = begin(ranks4)
    assert time.monotonic() - began < scaled_for_load(SOON_S)
    assert made.diagnosis is not None
    (finding,) = made.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.PARAM_MISMATCH, (1,))
    assert expected in finding.cause
    kept = ranks4.why()
    assert (kept.findings, kept.run.title) == ((finding,), "%ddp_wrap model")
    assert kind_of(ranks4) == {"Sequential"}
    assert still_works(ranks4)


def test_what_is_no_model_is_refused_with_its_ranks(ranks2: Session) -> None:
    run(ranks2, NET + "if rank == 1: model = 3")
    with pytest.raises(UsageMistake, match=r"\(rank 1: it is of type int, not a torch"):
        begin(ranks2)
    with pytest.raises(UsageMistake, match="ranks 0 and 1: there is no such variable"):
        begin(ranks2, "nobody_made_this")
    run(ranks2, "model = nn.Linear(2, 2).requires_grad_(False)")
    with pytest.raises(UsageMistake, match="no parameter requires a gradient"):
        begin(ranks2)
    run(ranks2, "model = nn.LazyLinear(2)")
    with pytest.raises(UsageMistake, match="weight has no shape yet"):
        begin(ranks2)
    run(ranks2, NET + "if rank == 1: model = DDP(model, init_sync=False)")
    with pytest.raises(UsageMistake, match="rank 1: it is a DistributedDataParallel already"):
        begin(ranks2)


# -- step by step ----------------------------------------------------------------------


def test_stages_are_passed_one_at_a_time(ranks2: Session) -> None:
    run(ranks2, NET)
    made = begin(ranks2, step=True)
    passed = []
    while made.stage is not None:
        assert kind_of(ranks2) == {"Sequential"}, "not replaced before the last stage"
        assert made.table.next_call == "%ddp_step"
        assert [row.state for row in made.table.rows] == ["paused"] * len(made.table.rows)
        stage = made.stage
        table = made.step()
        assert table is made.table
        assert table.about == stage.about
        assert table.link == stage.link
        passed.append(table.rows[0].passed)
    assert passed == [stage.value for stage in WrapStage]
    assert made.table.next_call == ""
    assert kind_of(ranks2) == {"DistributedDataParallel"}
    with pytest.raises(UsageMistake, match="nothing is left to step"):
        made.step()


def test_several_stages_can_be_passed_at_once(ranks2: Session) -> None:
    run(ranks2, NET)
    made = begin(ranks2, step=True)
    made.step(WrapStage.BUCKETS)
    assert made.stage is WrapStage.REDUCER
    assert has_line(made, "stage 2/4, broadcast")


def test_a_wrap_is_stepped_to_a_stage_by_the_verb_that_steps_set_up(ranks2: Session) -> None:
    run(ranks2, NET)
    ranks2.wrap("model", WrapOptions(step=True))
    with pytest.raises(UsageMistake, match=r"one of parameters-verified, broadcast, .*not 'store'"):
        ranks2.step(to="store")
    with pytest.raises(UsageMistake, match="takes every rank"):
        ranks2.step((0,), to="broadcast")
    assert ranks2.step(to="broadcast").title == "model: passed stage 2/4, broadcast"
    with pytest.raises(UsageMistake, match="has already passed"):
        ranks2.step(to="broadcast")
    assert ranks2.step(to="end").title == "model is a DistributedDataParallel on ranks 0 and 1"


def test_a_model_changed_between_two_steps_is_found(ranks2: Session) -> None:
    run(ranks2, NET)
    made = begin(ranks2, step=True)
    made.step()
    run(ranks2, "model[3] = nn.Linear(16, 5)", (1,))
    made.step()
    assert made.diagnosis is not None
    assert made.diagnosis.findings[0].category is Category.PARAM_MISMATCH
    run(ranks2, NET)
    made = begin(ranks2, step=True)
    made.step(WrapStage.BUCKETS)
    run(ranks2, "with torch.no_grad(): model[0].bias += 1", (1,))
    made.step()
    assert made.diagnosis is not None
    assert made.diagnosis.findings[0].ranks == (1,)
    assert "other values in `model` than rank 0" in made.diagnosis.findings[0].cause
    assert kind_of(ranks2) == {"Sequential"}


# -- when it goes wrong ----------------------------------------------------------------
