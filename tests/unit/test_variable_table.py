"""The variables of all ranks as one table: what is folded, what is marked, and by how much."""

from __future__ import annotations

import json
import math

import hypothesis.strategies as st
from hypothesis import given

from ddp_notebook.model import RankVariables, Scope, TensorFacts, Unread, Variable, VariableTable
from ddp_notebook.views import variables as view
from ddp_notebook.views.variable_table import fold, row, tensor_text


def table(*ranks: tuple[Variable, ...], **more: str) -> VariableTable:
    """Global variables, by rank."""
    answers = (RankVariables(rank, (Scope("", "", each),)) for rank, each in enumerate(ranks))
    return fold(answers, world_size=len(ranks))


def number(value: float, name: str = "x") -> Variable:
    return Variable(name, repr(value), None if math.isnan(value) else value)


def tensor(
    *values: float, device: str = "cpu", digest: str = "", read: int | None = None
) -> Variable:
    read = len(values) if read is None else read
    facts = TensorFacts((len(values),), "float32", device, read)
    if not read:
        return Variable("x", tensor=facts)
    mean = sum(values) / len(values)
    facts = TensorFacts(
        (len(values),), "float32", device, read, mean, min(values), max(values), 0, digest, values
    )
    return Variable("x", tensor=facts)


def test_what_is_equal_on_all_ranks_is_one_cell_without_a_mark() -> None:
    made = table(*[(number(0.1, "lr"), tensor(1.0, 2.0))] * 4)
    assert [(r.name, len(r.cells), r.differs) for r in made.sections[0].rows] == [
        ("lr", 1, False),
        ("x", 1, False),
    ]
    assert made.row("x").cells[0].text == "float32 [2] cpu: 1, 2"
    assert "≠" not in view.text(made)


def test_the_rank_with_another_learning_rate_is_marked_with_how_far_it_is() -> None:
    made = table(*[(number(lr),) for lr in (0.1, 0.1, 0.01, 0.1)]).row("x")
    assert made.differs
    assert [(c.ranks, c.odd, c.note) for c in made.cells] == [
        ((0, 1, 3), False, ""),
        ((2,), True, "difference 0.09"),
    ]
    assert made.summary == "min 0.01, mean 0.0775, max 0.1"


def test_with_two_ranks_nobody_is_odd() -> None:
    made = table((number(1.0),), (number(2.0),)).row("x")
    assert made.differs and not any(cell.odd for cell in made.cells)


def test_tensors_say_their_largest_difference_from_the_majority() -> None:
    made = row(
        "x", dict(enumerate([tensor(1.0, 2.0), tensor(1.0, 2.5), tensor(1.0, 2.0)])), (0, 1, 2)
    )
    assert [cell.note for cell in made.cells] == ["", "max difference 0.5"]


def test_a_tensor_of_which_a_part_was_compared_says_so() -> None:
    facts = [
        TensorFacts((900,), "float32", "cpu", 900, 1.0, 0.0, 2.0, 0, digest, (1.0, last))
        for digest, last in (("a", 1.0), ("a", 1.0), ("b", 3.0), ("c", 1.0))
    ]
    made = row("x", {r: Variable("x", tensor=each) for r, each in enumerate(facts)}, (0, 1, 2, 3))
    assert [cell.note for cell in made.cells] == [
        "",
        "max difference 2 or more" if not made.cells[1].odd else made.cells[1].note,
        made.cells[2].note,
    ]
    assert {cell.note for cell in made.cells} == {"", "max difference 2 or more", "other values"}


def test_each_rank_on_its_own_gpu_is_no_difference() -> None:
    made = table(*[(tensor(1.0, device=f"cuda:{rank}", read=0),) for rank in range(3)]).row("x")
    assert not made.differs
    assert made.cells[0].text == "float32 [1] cuda, values not read"


def test_what_was_not_read_on_a_busy_rank_is_not_called_different() -> None:
    made = table((tensor(1.0, 2.0),), (tensor(1.0, 2.0, read=0),), (tensor(1.0, 2.0),)).row("x")
    assert not made.differs
    assert [(c.ranks, c.unknown) for c in made.cells] == [((0, 2), False), ((1,), True)]


def test_other_shapes_and_missing_names_are_differences() -> None:
    made = table((tensor(1.0, 2.0),), (tensor(1.0),), ()).row("x")
    assert made.differs and [cell.absent for cell in made.cells] == [False, False, True]


def test_models_that_look_alike_and_have_other_parameters_are_told_apart() -> None:
    alike = [Variable("net", "Net, 12 parameters, train", digest=d) for d in "aab"]
    made = row("net", dict(enumerate(alike)), (0, 1, 2))
    assert [cell.note for cell in made.cells] == ["", "other parameter values"]
    unreadable = [Variable("net", "Net, 12 parameters, train", digest=d) for d in ("a", "", "b")]
    assert not row("net", dict(enumerate(unreadable)), (0, 1, 2)).differs


def test_not_a_number_is_counted_and_equal_to_itself() -> None:
    facts = TensorFacts((5,), "float32", "cpu", 5, None, None, None, 5, "a", (None,) * 5)
    made = row("x", {rank: Variable("x", tensor=facts) for rank in (0, 1)}, (0, 1))
    assert not made.differs
    assert tensor_text(facts) == "float32 [5] cpu, 5 NaN"
    assert not row("x", {0: number(math.nan), 1: number(math.nan)}, (0, 1)).differs


def test_functions_come_before_what_is_global_and_ranks_in_another_are_apart() -> None:
    here = Scope("step", "cell 5", (number(1.0, "loss"),))
    there = Scope("load", "cell 5", (number(2.0, "batch"),))
    glob = Scope("", "", (number(0.1, "lr"),))
    made = fold([RankVariables(1, (there, glob)), RankVariables(0, (here, glob))], (), 2)
    assert [(s.title, s.ranks) for s in made.sections] == [
        ("variables of step (cell 5)", (0,)),
        ("variables of load (cell 5)", (1,)),
        ("global variables", (0, 1)),
    ]


VALUES = st.one_of(
    st.none(),
    st.floats(width=32).map(number),
    st.sampled_from(["'a'", "[1]", "<Odd>"]).map(lambda text: Variable("x", text)),
    st.lists(st.floats(-9, 9), min_size=1, max_size=3).map(lambda values: tensor(*values)),
    st.lists(st.floats(-9, 9), min_size=1, max_size=3).map(lambda v: tensor(*v, read=0)),
)


@given(st.lists(VALUES, min_size=1, max_size=9))
def test_every_rank_is_in_one_cell_and_equal_values_in_the_same(
    values: list[Variable | None],
) -> None:
    ranks = tuple(range(len(values)))
    made = row("x", {r: v for r, v in enumerate(values) if v is not None}, ranks)
    assert sorted(rank for cell in made.cells for rank in cell.ranks) == list(ranks)
    for cell in made.cells:
        assert len({json.dumps(repr(values[rank])) for rank in cell.ranks}) == 1
        assert cell.absent == (values[cell.ranks[0]] is None)
        assert not (cell.odd and 2 * len(cell.ranks) >= len(ranks))
    shown = view.text(VariableTable((table().sections), (Unread((0,), "dead"),), 1))
    assert shown == "rank 0: dead"
