"""A wrap's stages, fingerprints, buckets and options as plain values."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import UsageError

from ddp_notebook.diagnosis.training.construction import (
    bucket_lines,
    plan_lines,
    reduction_lines,
    rows,
    stopped_rows,
    what_changed,
    why_not,
)
from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.parser import HelpShown
from ddp_notebook.magics.verbs.ddp import WRAP
from ddp_notebook.model import StepRow, StepTable, codec
from ddp_notebook.model.ddp import (
    Bucket,
    BucketPlan,
    Fingerprint,
    RankFailure,
    Reduction,
    Synced,
    TensorInfo,
    WrapStage,
)
from ddp_notebook.session.tools.ddp_construction import WrapOptions

MIB = 2**20

# -- values ----------------------------------------------------------------------------


def test_the_stages_are_those_of_ddps_constructor_in_order() -> None:
    assert [stage.value for stage in WrapStage] == [
        "parameters-verified",
        "broadcast",
        "buckets",
        "reducer",
    ]
    assert [stage.number for stage in WrapStage] == [1, 2, 3, 4]


@pytest.mark.parametrize("stage", WrapStage)
def test_every_stage_is_explained_in_a_line_and_linked(stage: WrapStage) -> None:
    assert stage.about.endswith(".")
    assert "\n" not in stage.about
    assert stage.link.startswith("https://docs.pytorch.org/docs/stable/")


def test_what_a_rank_sends_is_read_back_from_json() -> None:
    bucket = Bucket(("w",), 24)
    for value in (
        Fingerprint((TensorInfo("w", (2, 3), "float32", True, (3, 1), "cpu"),), ()),
        BucketPlan((bucket,), None, (1, 2)),
        Reduction(1, ("w",), (bucket,), rebuilt=True),
        Synced(("a", "b", ""), ("a", "c", ""), 12),
    ):
        # A rank's answer has more beside it.
        wire = json.loads(json.dumps({**codec.encode(value), "lacks": []}))
        assert codec.decode(type(value), wire) == value


def test_the_tensors_that_a_broadcast_changed_are_told_by_their_hashes() -> None:
    assert Synced(("a", "b", ""), ("a", "c", ""), 12).changed == (1,)


# -- lines -----------------------------------------------------------------------------

MODEL = Fingerprint(
    (TensorInfo("w", (2,), "float32"), TensorInfo("b", (1,), "float32")),
    (TensorInfo("mean", (1,), "float32"),),
)


def test_which_values_the_broadcast_changed_is_said_for_each_rank() -> None:
    synced = {
        0: Synced(("a", "b", "c"), ("a", "b", "c"), 16),
        1: Synced(("a", "b", "c"), ("a", "b", "c"), 16),
        2: Synced(("x", "b", "c"), ("a", "b", "c"), 16),
        3: Synced(("x", "x", "x"), ("a", "b", "c"), 16),
    }
    assert what_changed(synced, MODEL) == {
        0: "sent its values",
        1: "had the values of rank 0 already",
        2: "had other values in 1 of 2 parameters",
        3: "had other values in 2 of 2 parameters and 1 of 1 buffers",
    }


def test_buckets_are_a_table_with_aligned_columns() -> None:
    made = (
        Bucket(("b",), 4),
        Bucket(("one", "two", "three", "four", "five", "six", "seven"), 25 * MIB),
    )
    assert bucket_lines(made) == (
        "  bucket  size    parameters",
        "  1       4 B     b",
        "  2       25 MiB  one, two, three, four, …, seven (7 in all)",
    )


def test_both_the_first_buckets_and_the_expected_ones_are_shown() -> None:
    plan = BucketPlan((Bucket(("w", "b"), 12),), (Bucket(("b", "w"), 12),), (MIB, 25 * MIB))
    lines = plan_lines(plan)
    assert lines[0].startswith("In the first step")
    assert lines[3] == (
        "From the second step on, if gradients come in reverse order (a bucket is full at "
        "25 MiB, the first one at 1 MiB):"
    )
    kept = plan_lines(BucketPlan(plan.first, None, (5 * MIB, 5 * MIB)))
    assert kept[0] == "Buckets (a bucket is full at 5 MiB; DDP keeps them):"


BUCKETS = (Bucket(("b", "w"), 12),)


def test_without_a_step_it_is_said_that_none_was_made() -> None:
    lines = reduction_lines({0: Reduction(0, (), None, False)}, "net")
    assert lines[0].startswith("net has not run a step yet.")
    assert lines[1].endswith("%ddp_wrap net --buckets")
    assert reduction_lines({0: Reduction(1, (), None, False)})[0].startswith(
        "model has not run a backward yet"
    )


@pytest.mark.parametrize(
    ("known", "title"),
    [
        (Reduction(1, ("b", "w"), BUCKETS, False), "DDP will build these buckets from it when"),
        (Reduction(2, ("b", "w"), BUCKETS, True), "The buckets that DDP built from rank 0's first"),
        (Reduction(2, ("b", "w"), BUCKETS, False, keeps=True), "With find_unused_parameters DDP"),
        (Reduction(2, ("b", "w"), None, False), "This version of torch does not show"),
    ],
)
def test_after_a_step_the_order_and_the_buckets_are_shown(known: Reduction, title: str) -> None:
    lines = reduction_lines({0: known, 1: known})
    assert lines[:3] == (
        "Gradients became ready in this order (ranks 0 and 1 alike):",
        "  1     b",
        "  2     w",
    )
    assert lines[3].startswith(title)


def test_ranks_with_another_order_and_idle_parameters_are_named() -> None:
    known = {
        0: Reduction(1, ("b",), None, False, idle=("w",)),
        1: Reduction(1, ("b",), None, False, idle=("w",)),
        2: Reduction(1, ("w",), None, False),
    }
    lines = reduction_lines(known)
    assert "on rank 0, whose order all ranks use; a different one on rank 2" in lines[0]
    assert "No gradient for w on ranks 0 and 1." in lines


def test_ranks_in_the_same_place_share_a_row() -> None:
    same = ("broadcast", "paused", "")
    assert rows({0: same, 1: ("broadcast", "failed", "no"), 2: same}) == (
        StepRow((0, 2), "broadcast", "paused", ""),
        StepRow((1,), "broadcast", "failed", "no"),
    )


def test_a_rank_that_lost_its_connection_is_no_mystery() -> None:
    lost = {0: RankFailure("error", "RuntimeError: Connection closed by peer [127.0.0.1]")}
    shown = stopped_rows(WrapStage.BROADCAST, (0, 1, 2, 3), lost, (1,), (2,))
    assert [(row.ranks, row.state, row.text, row.waits_for) for row in shown] == [
        ((0,), "failed", "lost its connection: rank 1 died", ()),
        ((1,), "dead", "its process is gone", ()),
        ((2,), "waiting", "in stage broadcast", (0, 1)),
        ((3,), "paused", "has passed it", ()),
    ]


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (("module", "Net", ""), ""),
        (("module", "Net", "lazy"), "lazy"),
        (("absent", "", ""), "there is no such variable"),
        (("other", "int", ""), "it is of type int, not a torch.nn"),
        (("ddp", "X", ""), "it is a DistributedDataParallel already"),
    ],
)
def test_why_a_variable_cannot_be_wrapped(described: tuple[str, str, str], why: str) -> None:
    assert why_not(*described, "net").startswith(why)


# -- options ---------------------------------------------------------------------------


def test_options_are_read_from_the_line() -> None:
    args = WRAP.parser.read("net --step --bucket-cap-mb 0.5 --find-unused-parameters --as ddp")
    assert (args.name, args.step, args.buckets, args.target) == ("net", True, False, "ddp")
    assert (args.bucket_cap_mb, args.find_unused_parameters) == (0.5, True)
    assert WRAP.parser.read("--buckets").name == ""


def test_help_names_every_option() -> None:
    with pytest.raises(HelpShown) as shown:
        WRAP.parser.read("-h")
    for option in ("--step", "--buckets", "--bucket-cap-mb", "--find-unused-parameters", "--as"):
        assert option in str(shown.value)


@pytest.mark.parametrize("line", ["model --nope", "one two", "model --bucket-cap-mb many"])
def test_a_wrong_line_ends_with_one_that_works(line: str) -> None:
    with pytest.raises(UsageError, match="For example: %ddp_wrap model"):
        WRAP.parser.read(line)


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0.0}, {"bucket_cap_mb": -1.0}])
def test_a_size_of_buckets_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageMistake, match="more than 0, such as 25"):
        WrapOptions(**options)


def test_a_name_that_cannot_be_a_variable_is_refused() -> None:
    with pytest.raises(UsageMistake, match="not the name of a variable"):
        WrapOptions(target="a b")


def test_the_verb_hands_its_options_to_the_session_and_returns_the_table() -> None:
    asked: list[tuple[str, WrapOptions]] = []
    table = StepTable("done", ())

    class Session:
        def wrap(self, name: str, options: WrapOptions) -> Any:
            asked.append((name, options))
            return type("Wrapped", (), {"table": table})

    ui: Any = SimpleNamespace(session=Session())
    assert WRAP.run(ui, WRAP.parser.read("net --step --as wrapped")) is table
    assert asked == [("net", WrapOptions(step=True, target="wrapped"))]
