"""Why setup does not get on: models and versions, which finding comes first, and all as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from setup_cases import (
    IN_SETUP,
    PORT,
    arguments,
    case,
    coming,
    failed,
    found,
    knocking,
    the_one,
    waiting,
)
from traces import report

from ddp_notebook.diagnosis import diagnose_setup
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.model import (
    Activity,
    Category,
    Diagnosis,
    Finding,
    InitArguments,
    Probe,
    RankReport,
    StoreFile,
    codec,
)
from ddp_notebook.model.ddp import Fingerprint, TensorInfo

# --------------------------------------------------------------------------- models, versions


LAYER = (TensorInfo("first.weight", (4, 8), "float32"), TensorInfo("first.bias", (4,), "float32"))


@pytest.mark.parametrize(
    "other",
    [
        (*LAYER, TensorInfo("third.weight", (2, 2), "float32")),
        LAYER[:1],
        (TensorInfo("first.weight", (5, 8), "float32"), LAYER[1]),
        (TensorInfo("first.weight", (4, 8), "float16"), LAYER[1]),
        LAYER[::-1],
    ],
    ids=["more", "fewer", "shape", "dtype", "order"],
)
def test_models_that_differ_are_said_with_where(other: tuple[TensorInfo, ...]) -> None:
    models = (LAYER, other, LAYER)
    finding = the_one(
        *(waiting(r, "ddp", model=Fingerprint(model)) for r, model in enumerate(models))
    )
    assert (finding.category, finding.ranks) == (Category.PARAM_MISMATCH, (1,))
    assert "rank 1" in finding.cause


def test_models_that_are_the_same_or_not_built_yet_are_no_finding() -> None:
    ranks = [
        waiting(0, "ddp", model=Fingerprint(LAYER)),
        coming(1),
        waiting(2, "ddp", model=Fingerprint(LAYER)),
    ]
    assert found(*ranks) == []


def test_another_torch_on_one_rank_is_found_but_a_patch_of_python_is_none() -> None:
    def with_versions(torch: str, python: str) -> list[RankReport]:
        other = {"torch": torch, "python": python}
        return [waiting(0), waiting(1, versions=other), waiting(2)]

    assert found(*with_versions("1.13.0", "3.12.1")) == [(Category.VERSION_MISMATCH, (1,))]
    assert found(*with_versions("2.9.0", "3.11.9")) == [(Category.VERSION_MISMATCH, (1,))]
    assert found(*with_versions("2.9.0", "3.12.4")) == []


# --------------------------------------------------------------------------- the whole


def test_what_does_not_pass_comes_first_and_what_explains_the_rest_alone() -> None:
    bad = knocking(1, arguments(1, master_port=PORT + 1))
    diagnosis = diagnose_setup(case(waiting(0), bad, coming(2)))
    assert [(f.category, f.ranks) for f in diagnosis.findings] == [
        (Category.ENV_MISMATCH, (1,)),
        (Category.STRAGGLER, (2,)),
    ]
    assert diagnosis.headline.startswith("Rank 1 has `MASTER_PORT=29501`")
    assert diagnosis.world_size == 3


def test_two_ranks_with_a_mistake_each_are_two_findings() -> None:
    ranks = [waiting(0), failed(1, "Unable to find address for: x0"), failed(2, "boom")]
    assert found(*ranks) == [
        (Category.WRONG_INTERFACE, (1,)),
        (Category.EXCEPTION_ON_ONE_RANK, (2,)),
    ]


@pytest.mark.parametrize("activity", list(Activity))
def test_every_rank_is_said_to_do_something(activity: Activity) -> None:
    for more in ({}, {"doing": "x", "inside": "store", "error_text": "\n", "error_type": "E"}):
        text = doing(report(0, activity, **more))
        assert text
        assert "\n" not in text


def test_a_long_error_is_seen_to_be_cut() -> None:
    assert doing(failed(0, "e" * 160)) == f"failed: {'e' * 160}"
    assert doing(failed(0, "e" * 161)) == f"failed: {'e' * 159}…"


# --------------------------------------------------------------------------- as JSON


RANK = st.integers(0, 7)

RANK_SETS = st.sets(RANK).map(lambda ranks: tuple(sorted(ranks)))

FINDINGS = st.builds(
    Finding,
    category=st.sampled_from(Category),
    ranks=RANK_SETS,
    cause=st.text(),
    remedy=st.text(),
    waiting=RANK_SETS,
    evidence=st.lists(st.text()).map(tuple),
    passing=st.booleans(),
)

DIAGNOSES = st.builds(
    Diagnosis,
    findings=st.lists(FINDINGS, max_size=3).map(tuple),
    doing=st.dictionaries(RANK, st.text()),
    world_size=RANK,
)

TENSORS = st.builds(
    TensorInfo, st.text(), st.lists(RANK, max_size=3).map(tuple), st.just("float32")
)

WORDS = st.dictionaries(st.text(), st.text(), max_size=3)

EVIDENCE = st.builds(
    report,
    rank=RANK,
    activity=st.sampled_from(Activity),
    inside=st.sampled_from(["", *IN_SETUP]),
    entered=RANK,
    arguments=st.builds(InitArguments, rank=st.none() | RANK, path=st.text(), raw=WORDS),
    probe=st.builds(Probe, state=st.sampled_from(["open", "refused"]), detail=st.text()),
    file=st.builds(StoreFile, exists=st.booleans(), claims=st.dictionaries(st.text(), RANK)),
    addresses=st.dictionaries(st.text(), st.lists(st.text(), max_size=2).map(tuple), max_size=2),
    exit_code=st.none() | st.integers(-64, 255),
    model=st.none() | st.builds(Fingerprint, st.lists(TENSORS, max_size=3).map(tuple)),
)


@given(DIAGNOSES)
def test_a_diagnosis_can_be_written_as_json_and_read_back(diagnosis: Diagnosis) -> None:
    wire = json.loads(json.dumps(diagnosis.to_json()))
    assert codec.decode(Diagnosis, wire) == diagnosis
    assert json.loads(str(diagnosis)) == wire
    assert wire["headline"] == diagnosis.headline


@given(EVIDENCE)
def test_evidence_can_be_written_as_json_and_read_back(evidence: RankReport) -> None:
    assert codec.decode(RankReport, json.loads(json.dumps(codec.encode(evidence)))) == evidence
