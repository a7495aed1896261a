"""What `check` says of answers to the exercises of notebook 3."""

from __future__ import annotations

from typing import Any

import pytest
from answers import assert_right, assert_wrong

from ddp_notebook.model import Category, Diagnosis, Finding


def found(category: Category, ranks: tuple[int, ...], *, passing: bool = False) -> Diagnosis:
    """A diagnosis with one finding."""
    cause = "WORLD_SIZE is 1 on rank 1, but 4 on ranks 0, 2 and 3"
    return Diagnosis((Finding(category, ranks, cause, "", passing=passing),), {}, 4)


WRONG_PORT = Diagnosis(
    (),
    {
        0: "waiting in store: `init_process_group` (alone.py, line 13)",
        1: "waiting in store: `init_process_group` (alone.py, line 13)",
        2: "waiting in process-group: `init_process_group` (alone.py, line 13)",
        3: "waiting in process-group: `init_process_group` (alone.py, line 13)",
    },
    4,
)
HIDDEN = found(Category.ENV_MISMATCH, (1,))
DUPLICATE = Category.DUPLICATE_RANK


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("3.1", 0),
        ("3.2", ("0-1", WRONG_PORT)),
        ("3.2", ([1, 0], WRONG_PORT)),
        ("3.3", ((1, "env-mismatch"), HIDDEN)),
        ("3.4", found(DUPLICATE, (3,))),
        ("3.5", ["port-held", "address-unresolved"]),
        ("3.5", {"address-unresolved", "port-held"}),
    ],
)
def test_a_right_answer_passes(name: str, answer: Any) -> None:
    assert_right(name, answer)


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("3.1", 3, "rank 3 is the missing one"),
        ("3.1", 2, "has written its own key"),
        ("3.1", 1, "rank 1 has connected this time"),
        ("3.1", 7, "0 to 3"),
        ("3.2", "0-1", "leave the cell that checks as it is"),
        ("3.2", ("0-1", HIDDEN), "no rank waits in the store"),
        ("3.2", ("1,2", WRONG_PORT), "rank 2 got further"),
        ("3.2", ("all", WRONG_PORT), "ranks 2 and 3 got further"),
        ("3.2", ("1", WRONG_PORT), "not all of them"),
        ("3.3", (1, "env-mismatch"), "expected a rank and a kind"),
        ("3.3", ((1, "gremlins"), HIDDEN), "not one of the choices"),
        ("3.3", ((0, "env-mismatch"), HIDDEN), "rank 0 does the same"),
        ("3.3", ((1, "missing-rank"), HIDDEN), "as if it never came"),
        ("3.3", ((1, "duplicate-rank"), HIDDEN), "about another variable"),
        ("3.3", ((1, "straggler"), HIDDEN), "neither dead nor late"),
        ("3.3", ((1, "rank-died"), HIDDEN), "neither dead nor late"),
        ("3.3", ((1, "straggler"), Diagnosis()), "no finding"),
        ("3.4", Diagnosis(), "nothing is wrong with these ranks"),
        ("3.4", found(Category.STRAGGLER, (1,), passing=True), "still held"),
        ("3.4", HIDDEN, "found to be env-mismatch"),
        ("3.4", found(DUPLICATE, (2,)), "rank 2 is blamed"),
        ("3.5", "port-held", "something is missing"),
        ("3.5", 5, "a list of names"),
        ("3.5", ["port-held", "duplicate-rank"], "not duplicate-rank"),
        ("3.5", ["missing-rank"], "not missing-rank"),
        ("3.5", ["world-size-differs"], "not world-size-differs"),
        ("3.5", ["port-held"], "something is missing"),
        ("3.5", [], "some of them can"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong_with_it(name: str, answer: Any, said: str) -> None:
    assert_wrong(name, answer, said)
