"""Models that no DDP object contains: trained as one by hand or sharded, and how they are used."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
from collective_cases import found_in_training

from ddp_notebook.diagnosis.source_code.skips import skipping_test
from ddp_notebook.model import (
    Category,
    Collective,
    Collectives,
    EvaluationFacts,
    Finding,
    GradientSample,
    LoaderFacts,
    LossFacts,
    OptimizerFacts,
    Part,
    Place,
    ReplicaFacts,
    RunFacts,
    StepStart,
    TensorDigest,
)
from ddp_notebook.model.parallel.split import SplitFacts

HERE = Place("train.py", 7, "main", "opt.step()")
BOTH = (0, 1)
NUMELS = (2, 4)
NAMES = ("param_groups[0]['params'][0]", "param_groups[0]['params'][1]")
MEAN, KEPT, FROZEN, ALIKE = "mean", "kept", "frozen", "alike"
_Row = tuple[float, ...]


def own(rank: int, step: int) -> _Row:
    return tuple(((rank * 7 + step * 5 + k * k) % 11 - 5.5) / 10 for k in range(4))


def used(kind: str, rank: int, step: int) -> tuple[_Row, _Row]:
    """What a backward left of one parameter, and what the step used."""
    mine = own(0 if kind == ALIKE else rank, step)
    mean = tuple((a + b) / 2 for a, b in zip(own(0, step), own(1, step), strict=True))
    return {MEAN: (mine, mean), KEPT: (mine, mine), FROZEN: ((), ()), ALIKE: (mine, mine)}[kind]


def sample(rank: int, step: int, kinds: tuple[str, ...]) -> GradientSample:
    pairs = [used(kind, rank, step) for kind in kinds]
    return GradientSample(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), ())


def optimizer(
    rank: int, kinds: tuple[str, ...] = (MEAN, MEAN), later: tuple[str, ...] = ()
) -> OptimizerFacts:
    return OptimizerFacts(
        "SGD () 1",
        "SGD",
        steps=20,
        place=HERE,
        numels=NUMELS,
        sampled=NAMES,
        span=(1, 20),
        watched_steps=8,
        samples=tuple(sample(rank, step, kinds) for step in range(3)),
        later=(sample(rank, 15, later),) if later else (),
        begins=tuple(TensorDigest(name, 4, norm=1.0) for name in NAMES),
        last_weights=(1.0,),
    )


def trained(
    kinds: tuple[str, ...] = (MEAN, MEAN), *, split: SplitFacts | None = None, **fields: Any
) -> list[RunFacts]:
    """Two ranks with one model that no DDP object contains, used as `fields` say, by rank."""
    return [
        RunFacts(
            rank,
            1,
            backwards=20,
            optimizers=() if split else (optimizer(rank, kinds),),
            split=split or SplitFacts(),
            plain=(ReplicaFacts("Net 1 0", "Net", steps=20, broadcast_buffers=False, **of),),
        )
        for rank in BOTH
        for of in [{name: value(rank) for name, value in fields.items()}]
    ]


AVERAGES = tuple(Collective(0, i, "all_reduce", numel=n) for i, n in enumerate(NUMELS))
SHARDED = SplitFacts(data_ranks=BOTH)


def found(
    facts: list[RunFacts], records: tuple[Collective, ...] = AVERAGES, source: str = ""
) -> tuple[Finding, ...]:
    return found_in_training(facts, Collectives(dict.fromkeys(BOTH, records)), source)


def categories(*args: Any, **named: Any) -> list[Category]:
    return [each.category for each in found(*args, **named)]


def evaluation(**fields: Any) -> EvaluationFacts:
    return EvaluationFacts(10, place=HERE, **fields)


@pytest.mark.parametrize(
    ("kinds", "records", "statistics", "wrong"),
    [
        ((MEAN, MEAN), AVERAGES, ("a", "b"), True),
        ((MEAN, MEAN), AVERAGES, ("a", "a"), False),  # averaged before
        ((MEAN, MEAN), AVERAGES, ("", ""), False),
        ((KEPT, KEPT), (), ("a", "b"), False),  # each trains a model of its own
        ((MEAN, KEPT), AVERAGES, ("a", "b"), False),  # a head of its own
    ],
)
def test_statistics_of_batches_where_gradients_are_averaged_by_hand(
    kinds: tuple[str, ...], records: Any, statistics: tuple[str, str], wrong: bool
) -> None:
    facts = trained(kinds, evaluations=lambda rank: (evaluation(statistics=statistics[rank]),))
    assert categories(facts, records) == [Category.BUFFER_SYNC] * wrong
    if wrong:
        assert "broadcast_buffers" not in found(facts)[0].cause


REPORTED = "\n" * 6 + "value = net(x).sum().item()\nprint(value)\n"
_GATHERS = Collective(0, 7, "all_gather_into_tensor", numel=300, backwards=12)
_OF_BACKWARD = Collective(0, 8, "reduce_scatter_tensor", numel=600, part=Part.BACKWARD)


@pytest.mark.parametrize(
    ("records", "wrong"),
    [
        ((_GATHERS, _OF_BACKWARD), True),  # FSDP2 alone
        ((replace(_GATHERS, numel=301), _OF_BACKWARD), False),  # a gather of the user's
        ((_GATHERS, _OF_BACKWARD, Collective(0, 9, "all_reduce", numel=1, backwards=12)), False),
    ],
)
def test_the_result_of_one_part_of_a_sharded_models_evaluation(records: Any, wrong: bool) -> None:
    facts = trained(
        split=SHARDED,
        evaluations=lambda rank: (
            evaluation(inputs=(f"{rank}",), wrote=rank == 0, samples=8, forwards=1),
        ),
    )
    assert categories(facts, records, source=REPORTED) == [Category.METRIC_MISAGGREGATION] * wrong


@pytest.mark.parametrize(
    ("kinds", "records", "wrong"),
    [
        ((ALIKE, ALIKE), AVERAGES, True),
        ((ALIKE, ALIKE), (), False),  # the same experiment on each rank
        ((KEPT, KEPT), (), False),
    ],
)
def test_the_same_batches_where_gradients_are_averaged_by_hand(
    kinds: tuple[str, ...], records: Any, wrong: bool
) -> None:
    loader = LoaderFacts("0", 64, "RandomSampler", ("a", "b", "c"), HERE)
    facts = [replace(each, loaders=(loader,)) for each in trained(kinds)]
    assert categories(facts, records) == [Category.SAMPLER_MISUSE] * wrong


def test_the_same_draws_for_each_sample_where_gradients_are_averaged_by_hand() -> None:
    source = "\n" * 5 + "for x in data:\n    loss = net(x + torch.randn_like(x))\n"

    fields = {"start_place": lambda _: HERE}
    facts = trained(starts=lambda r: tuple(StepStart(s, True, f"{r}{s}") for s in "abcd"), **fields)
    assert categories(facts, source=source) == [Category.RNG_MISMATCH]
    facts = trained(
        starts=lambda r: tuple(StepStart(f"{s}{r}", True, f"{r}{s}") for s in "abcd"), **fields
    )
    assert not categories(facts, source=source)


@pytest.mark.parametrize(
    ("first", "later", "wrong"),
    [
        ((FROZEN, MEAN), (KEPT, MEAN), True),  # unfrozen since, in no list
        ((FROZEN, MEAN), (MEAN, MEAN), False),
        ((MEAN, MEAN), (KEPT, KEPT), False),  # local SGD after a warm-up
        ((FROZEN, MEAN), (KEPT, KEPT), False),
        ((KEPT, MEAN), (KEPT, MEAN), False),  # of its own from the begin
        ((MEAN, MEAN), (KEPT, MEAN), False),
    ],
)
def test_what_is_unfrozen_and_is_in_no_list_of_what_is_averaged(
    first: tuple[str, ...], later: tuple[str, ...], wrong: bool
) -> None:
    facts = [
        RunFacts(rank, 1, backwards=20, optimizers=(optimizer(rank, first, later),))
        for rank in BOTH
    ]
    assert categories(facts) == [Category.REPLICA_DIVERGENCE] * wrong


# -- steps that are skipped --------------------------------------------------------------


SKIPS = """
for x in data:
    loss = net(x)
    loss.backward()
    if bad(loss):
        continue
    opt.step()
    opt.zero_grad()
"""

APPLY = "def apply():\n    clip()\n    opt.step()\n    opt.zero_grad()\n"
FRESH = "def fresh():\n    opt.zero_grad()\n"
IN_A_FUNCTION = """
def turn(x):
    loss = net(x)
    loss.backward()
    if bad(loss):
        return
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (SKIPS, "bad(loss)"),
        (SKIPS.replace("    continue", "    skipped += 1\n        continue"), "bad(loss)"),
        (SKIPS.replace("        continue", "        opt.zero_grad()\n        continue"), ""),
        (SKIPS.replace("    loss.back", "    opt.zero_grad()\n    loss.back"), ""),
        (SKIPS.replace("bad(loss)", "(i + 1) % 4 != 0"), ""),  # accumulates
        (
            SKIPS.replace("bad(loss)", "tokens < 100").replace(
                "    loss.b", "    tokens += 9\n    loss.b"
            ),
            "",
        ),
        (SKIPS.replace("bad(loss)", "dry_run"), ""),
        (SKIPS.replace("    opt.zero_grad()\n", ""), ""),  # is cleared elsewhere
        (SKIPS.replace("        continue", "        log(loss)"), ""),
        (
            "loss.backward()\nif torch.isfinite(norm):\n    opt.step()\n    opt.zero_grad()\n",
            "not torch.isfinite(norm)",
        ),
        ("loss.backward()\nif torch.isfinite(norm):\n    opt.step()\nopt.zero_grad()\n", ""),
        (
            "def f():\n    l.backward()\n    if bad(x):\n        return\n    o.step(o.zero_grad())",
            "bad(x)",
        ),
        # What a function does counts where it is called.
        (SKIPS.replace("opt.step()\n    opt.zero_grad()", "apply()") + APPLY, "bad(loss)"),
        (SKIPS.replace("    loss.b", "    fresh()\n    loss.b") + FRESH, ""),
        (SKIPS.replace("        continue", "        fresh()\n        continue") + FRESH, ""),
        (IN_A_FUNCTION + "for x in data:\n    turn(x)\n", "bad(loss)"),
        (IN_A_FUNCTION + "for x in data:\n    opt.zero_grad()\n    turn(x)\n", ""),
        (IN_A_FUNCTION + "opt.zero_grad()\nfor x in data:\n    turn(x)\n", "bad(loss)"),
    ],
)
def test_the_test_by_which_a_step_is_skipped(source: str, test: str) -> None:
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "backward" in text)
    found = skipping_test(ast.parse(source), line)
    assert (ast.unparse(found) if found is not None else "") == test


@pytest.mark.parametrize(
    ("windows", "since", "wrong"),
    [
        (((1, 18), (2, 2)), 0, True),
        (((1, 3),), 5, True),  # skipped from then on
        (((1, 20),), 0, False),
        (((1, 20),), 1, False),  # the last one was skipped: nothing came after it
        (((1, 2), (4, 8)), 0, False),  # accumulated
    ],
)
def test_gradients_of_a_skipped_step(
    windows: tuple[tuple[int, int], ...], since: int, wrong: bool
) -> None:
    loss = LossFacts(1.0, True, 8.0, Place("train.py", 4, "", "loss.backward()"))
    of = [replace(optimizer(rank), windows=windows, span=(1, 20 - since)) for rank in BOTH]
    facts = [
        RunFacts(rank, 1, backwards=20, losses=(loss,) * 4, optimizers=(of[rank],)) for rank in BOTH
    ]
    assert categories(facts, source=SKIPS) == [Category.STALE_GRADIENTS] * wrong
    other = [replace(e, losses=(loss, replace(loss, place=HERE))) for e in facts]
    assert not categories(other, source=SKIPS), "two losses, each with a backward"
