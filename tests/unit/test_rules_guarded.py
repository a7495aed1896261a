"""A rule that fails is a note beside what the others find; and none fails, whatever it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import pytest
from broken_rules import CASES, FACTS
from collective_cases import same
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated import mutated
from traces import all_reduce, barrier, op, play

from ddp_notebook.diagnosis import diagnose, diagnose_run, diagnose_setup, diagnose_training
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.diagnose import Priority
from ddp_notebook.model import Category, Diagnosis, Finding, codec
from ddp_notebook.views import findings as views


def breaks(context: Context) -> Iterable[Finding]:
    """A rule that fails on any record."""
    yield from ()
    raise IndexError(f"of {len(context.case.ranks)}\nranks")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rule fails in whatever situation."""
    for name, priority in (
        ("SETUP", Priority.GIVEN),
        ("RUN", Priority.GONE),
        ("TRAINING", Priority.MADE),
    ):
        rules = getattr(diagnose, name)
        monkeypatch.setattr(
            diagnose, name, {**rules, priority: (breaks, *rules[priority])}, raising=True
        )


THREE = [all_reduce(5), op("all_gather", 8), op("broadcast", 9, root=0)]


@pytest.mark.usefixtures("broken")
def test_a_rule_that_fails_does_not_take_what_the_others_find_along() -> None:
    found = diagnose_run(play(same(4, THREE, r2=[THREE[0], THREE[2]])))
    assert [(f.category, f.ranks) for f in found.findings] == [
        (Category.CONDITIONAL_COLLECTIVE, (2,))
    ]
    (note,) = found.notes
    assert note.startswith("Rule breaks failed, so the problem that it looks for")
    assert "IndexError: of 4 ranks, test_rules_guarded.py:" in note and "report" in note
    assert note in " ".join(views.text(found).split()) and note in views.html(found)
    decoded = codec.decode(Diagnosis, found.to_json())
    assert decoded.findings[0].cause == found.findings[0].sentence
    assert replace(decoded, findings=()) == replace(found, findings=())


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    "judged",
    [
        lambda: diagnose_run(play(same(2, [barrier(3)]))),
        lambda: diagnose_setup(CASES[0]),
        lambda: diagnose_training(*FACTS),
    ],
    ids=["a run", "a setup", "its training"],
)
def test_it_is_never_said_that_nothing_is_wrong_where_a_rule_failed(
    judged: Callable[[], Diagnosis],
) -> None:
    calm = replace(judged(), findings=(), unsure="")
    assert calm.notes and "No problem found." not in calm.headline
    assert views.CALM not in views.text(calm)
    assert not calm.wrong, "a mistake of ours does not end a run"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 10))
def test_no_record_however_odd_has_a_rule_fail(seed: int, times: int) -> None:
    random = Random(seed)
    case = mutated(random.choice(CASES), random, times)
    facts, collectives = (mutated(each, random, times) for each in FACTS)
    for found in (
        diagnose_run(case),
        diagnose_setup(case),
        diagnose_training(facts, collectives),
    ):
        assert not [note for note in found.notes if note.startswith("The rule")]
        assert str(found)
