"""What ranks know of works, gradients, evaluations, random numbers: what is a mistake, what not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from collective_cases import found_in_training

from ddp_notebook.diagnosis.diagnose import diagnose_training
from ddp_notebook.diagnosis.source_code.divisions import chooses_rate_by_world
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.model import (
    Category,
    Collective,
    Collectives,
    CopyFacts,
    EvaluationFacts,
    Finding,
    FunctionalFacts,
    GradientSample,
    LoaderFacts,
    LossFacts,
    OptimizerFacts,
    Part,
    Place,
    ReplicaFacts,
    RunFacts,
    SamplerFacts,
    SaveFacts,
    StepStart,
    TensorDigest,
    WorkFacts,
    codec,
)

HERE = Place("train.py", 7, "main", "opt.step()")
KEY = "Net 1"


def model(size: int = 2, **fields: Any) -> ReplicaFacts:
    usual: dict[str, Any] = {"forwards": 8, "backwards": 8, "steps": 8}
    return ReplicaFacts(KEY, "Net", "net", group_size=size, **{**usual, **fields})


def optimizer(**fields: Any) -> OptimizerFacts:
    usual: dict[str, Any] = {"steps": 8, "lrs": (0.1,), "replicas": (KEY,), "place": HERE}
    return OptimizerFacts("SGD 1", "SGD", **{**usual, **fields})


def run(rank: int, **fields: Any) -> RunFacts:
    return RunFacts(rank, 1, backwards=8, **fields)


def found(
    *facts: RunFacts, records: tuple[Collective, ...] = (), source: str = ""
) -> tuple[Finding, ...]:
    return found_in_training(facts, Collectives({each.rank: records for each in facts}), source)


def kinds(*facts: RunFacts, **named: Any) -> list[tuple[Category, tuple[int, ...]]]:
    return [(each.category, each.ranks) for each in found(*facts, **named)]


# -- handles -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "wrong", "words"),
    [
        (WorkFacts("all_reduce", 4, 4, 4, 0, HERE), True, "is changed that it works on"),
        (WorkFacts("all_reduce", 4, 0, 0, 4, HERE), True, "the optimizer uses the gradients"),
        (WorkFacts("isend", 1, 0, 1, 0, HERE), True, "the tensor that it sends is changed"),
        (WorkFacts("all_reduce", 4, 4, 0, 0, HERE), False, ""),
    ],
)
def test_a_tensor_used_before_its_handle_was_waited_for(
    work: WorkFacts, wrong: bool, words: str
) -> None:
    findings = found(run(0, works=(work,)), run(1, works=(work,)))
    assert bool(findings) is wrong
    if wrong:
        assert findings[0].category is Category.ASYNC_MISUSE and findings[0].ranks == (0, 1)
        assert words in findings[0].cause and "train.py:7" in findings[0].cause
    assert len(found(run(0, works=(work,)), run(1))) == wrong, "on one rank alone"


@pytest.mark.parametrize(
    ("then", "read"),
    [
        ("mean = loss / world", True),
        ("log(x)\nprint(loss.item())", True),
        ("if loss > 3: stop()", True),
        ("print(loss.shape, loss.numel())\nhistory.append(loss)", False),
        ("dist.barrier()\nmean = loss / world", False),
        ("for each in handles:\n    each.wait()\nmean = loss / world", False),
        ("loss = fresh()\nmean = loss / world", False),
        ("other = lost / world", False),
    ],
)
def test_a_result_that_the_next_lines_read_before_it_was_waited_for(then: str, read: bool) -> None:
    code = "\n" * 6 + f"work = dist.all_reduce(loss, async_op=True)\n{then}\n"
    never = WorkFacts("all_reduce", 4, 1, place=HERE, met=3)
    every = [run(rank, works=(never,)) for rank in (0, 1)]
    assert kinds(*every, source=code) == [(Category.ASYNC_MISUSE, (0, 1))] * read
    waited = replace(never, met=2)  # one was asked
    assert not kinds(*[run(rank, works=(waited,)) for rank in (0, 1)], source=code)
    assert not found(*every), "the code is not known"


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        (FunctionalFacts(4, 0, 4), True),
        (FunctionalFacts(4, 2, 3), True),
        (FunctionalFacts(4, 2, 2), False),  # those of torch, that nobody read
        (FunctionalFacts(4, 0, 0), False),
        (FunctionalFacts(0, 5, 5), False),
    ],
)
def test_results_of_functional_collectives_that_nobody_waited_for(
    facts: FunctionalFacts, wrong: bool
) -> None:
    told = kinds(run(0, functional=facts), run(1, functional=facts))
    assert told == [(Category.ASYNC_MISUSE, (0, 1))] * wrong


# -- gradients ---------------------------------------------------------------------------


def test_a_sharded_model_that_steps_before_its_gradients_are_reduced() -> None:
    of = optimizer(replicas=(), mesh=(0, 1), pending_steps=4, pending_place=HERE)
    every = [run(rank, optimizers=(of,)) for rank in (0, 1)]
    assert kinds(*every) == [(Category.NO_SYNC_MISUSE, (0, 1))]


@pytest.mark.parametrize(
    ("mesh", "factors", "wrong"),
    [
        ((0, 1), ((None, 0.5, 0.4), (None, 0.3, 0.2)), True),
        ((0, 1), ((None, 0.5, 0.4), (None, 0.5, 0.4)), False),  # clipped by the norm of all
        ((0, 1), ((None, 0.5, None), (None, 0.3, 0.2)), False),  # once proves nothing
        ((), ((None, 0.5, 0.4), (None, 0.3, 0.2)), False),  # a model for each rank
        ((0, 1, 2), ((None, 0.5, 0.4), (None, 0.3, 0.2)), False),  # a rank is not there
        ((0, 1), ((), ()), False),
    ],
)
def test_a_factor_of_each_rank_for_gradients_of_one_sharded_model(
    mesh: tuple[int, ...], factors: tuple[tuple[float | None, ...], ...], wrong: bool
) -> None:
    every = [
        run(rank, optimizers=(optimizer(replicas=(), mesh=mesh, factors=own),))
        for rank, own in enumerate(factors)
    ]
    assert kinds(*every) == [(Category.LOCAL_STATISTIC, (0, 1))] * wrong


_CLIPS = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)"
_SCALE = 2.0**-10


@pytest.mark.parametrize(
    ("before", "after", "source", "wrong"),
    [
        ((0.3, 0.4, 0.2), _SCALE, _CLIPS, True),
        ((0.3, 0.4, 0.2), 1.0, _CLIPS, False),  # unscaled before
        ((0.3, 0.3, 0.3), _SCALE, _CLIPS, False),  # divided by one number each time
        ((3.0, 0.4, 0.2), _SCALE, _CLIPS, False),  # weighted
        ((0.3, 0.4, 0.2), _SCALE, "p.grad /= tokens", False),
        ((None, None, None), _SCALE, _CLIPS, False),
        ((0.3, 0.4), _SCALE, _CLIPS, False),  # too few to say
    ],
)
def test_gradients_that_are_clipped_before_they_are_unscaled(
    before: tuple[float | None, ...], after: float, source: str, wrong: bool
) -> None:
    factors = tuple(b and b * after for b in before)
    facts = optimizer(factors=factors, before_scaler=before)
    every = [run(r, replicas=(model(),), optimizers=(facts,)) for r in (0, 1)]
    assert kinds(*every, source=source) == [(Category.LOSS_SCALING, (0, 1))] * wrong


@pytest.mark.parametrize(
    ("size", "factors", "fields", "wrong"),
    [
        (2, (None, 0.5, 0.5, 0.5), {}, True),
        (4, (None, 0.25, 0.25, 0.25), {}, True),
        (2, (None, 1.0, 1.0, 1.0), {}, False),
        (2, (None, 0.5, 0.31, 0.5, 0.5), {}, False),  # a clip that hits it by chance
        (2, (None, 0.5, 0.5, 0.5), {"backwards": 16}, False),  # two micro-batches
        (2, (None, 2.0, 2.0, 2.0), {}, False),  # the sum is wanted
    ],
)
def test_gradients_divided_by_the_world_size_again(
    size: int, factors: tuple[float | None, ...], fields: dict[str, Any], wrong: bool
) -> None:
    every = [
        run(r, replicas=(model(size, **fields),), optimizers=(optimizer(factors=factors),))
        for r in range(size)
    ]
    assert kinds(*every) == [(Category.LOSS_SCALING, tuple(range(size)))] * wrong


@pytest.mark.parametrize(
    ("watched", "left", "wrong"),
    [(8, 7, True), (4, 3, True), (8, 4, False), (3, 2, False), (8, 0, False)],
)
def test_gradients_that_are_never_cleared(watched: int, left: int, wrong: bool) -> None:
    of = optimizer(watched_steps=watched, leftover_steps=left)
    every = [run(rank, replicas=(model(),), optimizers=(of,)) for rank in (0, 1)]
    assert kinds(*every) == [(Category.STALE_GRADIENTS, (0, 1))] * wrong


ALIKE = (0.5, -0.25, 0.125, 0.5)


@pytest.mark.parametrize(
    ("gradients", "weights", "fields", "numel", "ranks"),
    [
        ((ALIKE, ALIKE), ((1.0, 2.0), (3.0, 2.0)), {}, 4, (0, 1)),
        ((ALIKE,) * 3, ((1.0, 2.0), (3.0, 2.0), (1.0, 2.0)), {}, 4, (1,)),
        ((ALIKE, ALIKE), ((1.0, 2.0), (1.0, 2.0)), {}, 4, ()),
        ((ALIKE, (0.5, 0.5, 0.5, 0.5)), ((1.0, 2.0), (3.0, 2.0)), {}, 4, ()),  # a model of its own
        (((0.0,) * 4,) * 2, ((1.0, 2.0), (3.0, 2.0)), {}, 4, ()),  # nothing is trained yet
        ((ALIKE, ALIKE), ((1.0, 2.0), (3.0, 2.0)), {}, 3, ()),  # nobody sent them
        ((ALIKE, ALIKE), ((1.0, 2.0), (3.0, 2.0)), {"mesh": (0, 1)}, 4, ()),  # shards
        ((ALIKE, ALIKE), ((1.0, 2.0), (3.0, 2.0)), {"replicas": (KEY,)}, 4, ()),  # DDP's affair
        (((), ()), ((), ()), {}, 4, ()),  # on a device, not read
        # Parts of a layer have no gradient: what is told of the others tells nothing of them.
        ((ALIKE, ALIKE), ((1.0,) * 5, (3.0,) * 5), {}, 4, ()),
    ],
)
def test_models_that_begin_apart_and_step_with_the_same_gradients(
    gradients: tuple[tuple[float, ...], ...],
    weights: tuple[tuple[float, ...], ...],
    fields: dict[str, Any],
    numel: int,
    ranks: tuple[int, ...],
) -> None:
    every = [
        run(
            rank,
            optimizers=(
                optimizer(
                    **{"replicas": (), "numels": (2, 4), **fields},
                    first_gradients=own,
                    first_weights=weights[rank],
                ),
            ),
        )
        for rank, own in enumerate(gradients)
    ]
    sent = (Collective(0, 0, "all_reduce", numel=numel),)
    assert kinds(*every, records=sent) == ([(Category.REPLICA_DIVERGENCE, ranks)] if ranks else [])


@pytest.mark.parametrize(
    ("metrics", "ranks"),
    [
        ([(0.3, 0.2), (0.5, 0.4), (0.1, 0.2)], (0, 1, 2)),
        ([(0.3, 0.2), (0.3, 0.2), (0.1, 0.2)], (2,)),
        ([(0.3, 0.2), (0.3, 0.2), (0.3, 0.2)], (2,)),  # the scheduler reads the same
        ([(), (), ()], (2,)),
        ([(), (), (0.3, 0.2)], (2,)),
    ],
)
def test_rates_that_follow_a_metric_of_each_rank_are_the_doing_of_all(
    metrics: list[tuple[float, ...]], ranks: tuple[int, ...]
) -> None:
    every = [
        run(rank, replicas=(model(3),), optimizers=(optimizer(lrs=(rate,), metrics=own),))
        for rank, (rate, own) in enumerate(zip((0.1, 0.1, 0.01), metrics, strict=True))
    ]
    (finding,) = found(*every)
    assert (finding.category, finding.ranks) == (Category.REPLICA_DIVERGENCE, ranks)
    differ = len(set(metrics)) > 1 and () not in metrics
    assert ("ReduceLROnPlateau" in finding.cause) == differ


def test_a_script_beside_the_one_that_runs_has_names_of_its_own() -> None:
    """Both have a function `norm`, and the other one divides by the number of ranks."""
    source = "\n" * 6 + "(norm(out) / 2).backward()\n"
    other = "def norm(x):\n    return x / dist.get_world_size()\n"
    losses = (LossFacts(0.5, True, 8.0, HERE),) * 8
    every = {rank: run(rank, losses=losses, replicas=(model(),)) for rank in (0, 1)}
    texts = {"train.py": source, "other.py": other}
    assert not diagnose_training(every, Collectives(), texts).findings
    texts["train.py"] = source.replace("\n", "from other import norm\n", 1)
    assert diagnose_training(every, Collectives(), texts).findings


@pytest.mark.parametrize(
    ("source", "ranks"),
    [
        ("opt = SGD(net.parameters(), lr=0.2 if rank == 1 else 0.1)", (1,)),
        ("opt = SGD(net.parameters(), lr=0.1 if rank == 0 else 0.2)", (0, 1)),
        ("if dist.get_rank() == 0:\n    for g in opt.param_groups:\n        g['lr'] *= 2", (0,)),
        ("if rank == 1 and epoch > 3:\n    lr = 0.2", (1,)),
        ("if rank == 1:\n    lr = 0.2\nelse:\n    lr = 0.1", (0, 1)),
        ("if rank == 0:\n    print(opt.param_groups[0]['lr'])", (0, 1)),  # it sets nothing
        ("if host == 'b':\n    lr = 0.2", (0, 1)),
        ("if rank == 1:\n    lr = 0.2\nif rank == 0:\n    lr = 0.1", (0, 1)),
        ("if rank == 1:\n    momentum = 0.2", (0, 1)),
        ("", (0, 1)),
    ],
)
def test_of_two_learning_rates_the_one_is_named_that_the_code_singles_out(
    source: str, ranks: tuple[int, ...]
) -> None:
    every = [
        run(rank, replicas=(model(),), optimizers=(optimizer(lrs=(rate,)),))
        for rank, rate in enumerate((0.1, 0.2))
    ]
    (finding,) = found(*every, source=source)
    assert (finding.category, finding.ranks) == (Category.REPLICA_DIVERGENCE, ranks)
    either = "0.1 on rank 0, and 0.2 on rank 1, which of them is meant cannot be told"
    assert (either in finding.cause) == (len(ranks) == 2)


@pytest.mark.parametrize(
    ("source", "ranks"),
    [
        ("torch.set_float32_matmul_precision('high' if rank == 1 else 'highest')", (1,)),
        ("if rank == 0:\n    torch.set_float32_matmul_precision('highest')", (0,)),
        ("torch.set_float32_matmul_precision(config.precision)", (0, 1)),
    ],
)
def test_of_two_settings_the_one_is_named_that_the_code_singles_out(
    source: str, ranks: tuple[int, ...]
) -> None:
    name = "torch.get_float32_matmul_precision()"
    every = [
        run(rank, replicas=(model(),), precision=(f"{name}={own}",))
        for rank, own in enumerate(("highest", "high"))
    ]
    assert kinds(*every, source=source) == [(Category.NUMERICS_MISMATCH, ranks)]


@pytest.mark.parametrize(
    ("own", "weights", "numel", "wrong"),
    [
        (tuple(0.25 * g for g in ALIKE), (1.0, 2.0), 4, True),
        (ALIKE, (1.0, 2.0), 4, False),
        ((ALIKE[0], *(0.5 * g for g in ALIKE[1:])), (1.0, 2.0), 4, False),  # no one factor
        (tuple(0.25 * g for g in ALIKE), (1.5, 2.0), 4, False),  # another model
        (tuple(0.25 * g for g in ALIKE), (1.0, 2.0), 3, False),  # nobody sent them
    ],
)
def test_averaged_gradients_that_one_rank_alone_scales(
    own: tuple[float, ...], weights: tuple[float, ...], numel: int, wrong: bool
) -> None:
    def of(gradients: tuple[float, ...], begin: tuple[float, ...]) -> OptimizerFacts:
        fields: dict[str, Any] = {"replicas": (), "numels": (2, 4)}
        return optimizer(**fields, first_gradients=gradients, first_weights=begin)

    every = [run(rank, optimizers=(of(ALIKE, (1.0, 2.0)),)) for rank in (0, 1)]
    every.append(run(2, optimizers=(of(own, weights),)))
    sent = (Collective(0, 0, "all_reduce", numel=numel),)
    assert kinds(*every, records=sent) == [(Category.REPLICA_DIVERGENCE, (2,))] * wrong


@pytest.mark.parametrize(
    ("sharded", "steps", "wrong"),
    [((2, 6), 8, True), ((2, 5), 8, False), ((), 8, False), ((2, 6), 1, False)],
)
def test_an_optimizer_that_was_made_before_fully_shard(
    sharded: tuple[int, ...], steps: int, wrong: bool
) -> None:
    idle = optimizer(replicas=(), steps=steps, idle_steps=steps, numels=(2, 6))
    facts = [run(r, optimizers=(idle,), sharded_without_optimizer=sharded) for r in range(2)]
    findings = found(*facts)
    assert [f.category for f in findings] == [Category.OPTIMIZER_DETACHED] * wrong
    if wrong:
        assert "made before fully_shard" in findings[0].cause and findings[0].ranks == (0, 1)


def test_a_layer_that_was_replaced_after_the_optimizer_was_made() -> None:
    lacks = optimizer(unheld=("head.weight", "head.bias"), idle_tensors=2)
    every = [run(rank, replicas=(model(),), optimizers=(lacks,)) for rank in (0, 1)]
    (finding,) = found(*every)
    assert (finding.category, finding.ranks) == (Category.OPTIMIZER_DETACHED, (0, 1))
    assert "no optimizer holds head.weight and head.bias, which get gradients" in finding.cause
    one = [every[0], run(1, replicas=(model(),), optimizers=(optimizer(),))]
    assert not found(*one), "only where every rank has it"


@pytest.mark.parametrize(
    ("fields", "records", "wrong"),
    [
        ({"forwards": 0, "backwards": 0}, (), True),
        ({"forwards": 3}, (), False),
        ({"forwards": 0, "bypasses": 2}, (), False),  # another rule knows more of that
        ({"forwards": 0}, (Collective(0, 0, "all_reduce", numel=4),), False),  # by hand
        ({"forwards": 0}, (Collective(0, 0, "all_reduce", part=Part.BACKWARD, numel=9),), False),
    ],
)
def test_training_through_a_method_of_the_module_inside(
    fields: dict[str, Any], records: tuple[Collective, ...], wrong: bool
) -> None:
    every = [
        run(
            rank,
            replicas=(model(parameters=(TensorDigest("w", 4, str(rank)),), **fields),),
            optimizers=(optimizer(),),
        )
        for rank in (0, 1)
    ]
    findings = found(*every, records=records)
    assert [each.category for each in findings] == [
        Category.DDP_BYPASS if wrong else Category.REPLICA_DIVERGENCE
    ]
    assert wrong or "every gradient was reduced" in findings[0].cause or not fields["forwards"]


# -- evaluations -------------------------------------------------------------------------


def evaluation(**fields: Any) -> EvaluationFacts:
    usual: dict[str, Any] = {"backwards": 8, "forwards": 2, "place": HERE}
    return EvaluationFacts(**{**usual, **fields})


@pytest.mark.parametrize(
    ("fields", "statistics", "wrong"),
    [
        ({}, ("a", "b"), True),
        ({}, ("a", "a"), False),  # averaged before
        ({}, ("", ""), False),
        ({"training": True}, ("a", "b"), False),  # in training mode they are not used
        ({"backwards": 0}, ("a", "b"), False),
    ],
)
def test_every_rank_evaluates_with_statistics_of_its_own(
    fields: dict[str, Any], statistics: tuple[str, ...], wrong: bool
) -> None:
    def every(sends: bool, ranks: tuple[int, ...] = (0, 1)) -> list[RunFacts]:
        return [
            run(
                rank,
                replicas=(
                    model(
                        broadcast_buffers=sends,
                        evaluations=(evaluation(statistics=own, **fields),) * (rank in ranks),
                    ),
                ),
            )
            for rank, own in enumerate(statistics)
        ]

    assert kinds(*every(False)) == [(Category.BUFFER_SYNC, (0, 1))] * wrong
    assert not kinds(*every(True)), "torch's default"
    assert not kinds(*every(False, (0,))), "rank 0 evaluates alone"


REPORTS = "\n" * (HERE.line - 1) + "value = net(x).sum().item()\nprint(value)\n"
JOINED = Collective(0, 9, "all_reduce", numel=2, backwards=8)


@pytest.mark.parametrize(
    ("inputs", "wrote", "fields", "record", "wrong"),
    [
        (("a", "b"), (True, False), {"loader": True, "training": True}, None, True),
        (("a", "b"), (True, False), {}, None, True),
        (("a", "b"), (True, False), {}, replace(JOINED, operation="barrier"), True),
        (("a", "b"), (True, False), {}, replace(JOINED, part=Part.BACKWARD), True),
        (("a", "b"), (True, False), {}, JOINED, False),
        (("a", "b"), (True, False), {}, replace(JOINED, backwards=3), True),
        (("a", "a"), (True, False), {}, None, False),  # all of it on every rank
        (("a", "b"), (True, True), {}, None, False),  # each rank says its own
        (("a", "b"), (None, None), {}, None, False),
        (("a", "b"), (True, False), {"training": True}, None, False),  # a teacher's forward
        (("", ""), (True, False), {}, None, False),
    ],
)
def test_one_rank_reports_its_own_part_as_the_whole(
    inputs: tuple[str, str],
    wrote: tuple[bool | None, bool | None],
    fields: dict[str, Any],
    record: Collective | None,
    wrong: bool,
) -> None:
    every = [
        run(
            rank,
            replicas=(
                model(
                    evaluations=(
                        evaluation(inputs=(inputs[rank],), wrote=wrote[rank], **fields),
                        evaluation(backwards=16, inputs=(inputs[rank],), wrote=True, **fields),
                    )
                ),
            ),
        )
        for rank in (0, 1)
    ]
    records = (record,) if record is not None else ()
    told = kinds(*every, records=records, source=REPORTS)
    assert told == [(Category.METRIC_MISAGGREGATION, (0, 1))] * wrong


# -- random numbers, settings, streams ---------------------------------------------------

NOISE = """def noisy(x):
    return x + torch.randn_like(x)
def main():
    for x in batches:
        y = noisy(x)
        z = 1
        loss = net(y)
"""


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (NOISE, True),
        (NOISE.replace("torch.randn_like(x)", "torch.rand(len(x), 1)"), True),
        (NOISE.replace("torch.randn_like(x)", "torch.randint(0, 9, (x.shape[0],))"), True),
        (NOISE.replace("torch.randn_like(x)", "torch.empty(3).normal_()"), True),
        (NOISE.replace("torch.randn_like(x)", "torch.randperm(8)[rank::2]"), False),
        ("class D:\n    def __getitem__(self, i):\n        return x[i] + torch.randn(3)\n", True),
        ("class D:\n    def __getitem__(self, i):\n        return x[i] + rng.rand(3)\n", False),
        (NOISE.replace("torch.randn_like(x)", "torch.randn(64, 4)[rank::2]"), False),
        (NOISE.replace("randn_like(x)", "rand(len(x), 1, generator=own)"), False),
        ("", False),
    ],
)
def test_numbers_drawn_for_each_sample_are_the_same_on_every_rank(source: str, wrong: bool) -> None:
    def starts(rank: int, random: str = "{}", drew: bool = True) -> tuple[StepStart, ...]:
        return tuple(StepStart(random.format(i), drew, f"{rank} {i}") for i in range(4))

    def told(of: list[tuple[StepStart, ...]]) -> list[Any]:
        every = [
            run(rank, replicas=(model(starts=own, start_place=HERE),))
            for rank, own in enumerate(of)
        ]
        return kinds(*every, source=source)

    assert told([starts(0), starts(1)]) == [(Category.RNG_MISMATCH, (0, 1))] * wrong
    assert not told([starts(0), starts(1, "other {}")]), "a seed for each rank"
    assert not told([starts(0), starts(0)]), "the same samples: a replica in parts"
    assert not told([starts(0, drew=False), starts(1, drew=False)])


def test_ranks_that_compute_with_another_precision() -> None:
    def every(*settings: str, autocast: tuple[str, ...] = ("", "", "")) -> list[RunFacts]:
        return [
            run(rank, replicas=(model(3, autocast=autocast[rank]),), precision=(f"x()={own}",))
            for rank, own in enumerate(settings)
        ]

    assert not kinds(*every("high", "high", "high"))
    assert kinds(*every("high", "low", "high")) == [(Category.NUMERICS_MISMATCH, (1,))]
    one = every("high", "high", "high", autocast=("bfloat16", "bfloat16", ""))
    assert kinds(*one) == [(Category.NUMERICS_MISMATCH, (2,))]


def test_a_stream_that_gives_every_rank_the_same_batches() -> None:
    def every(*inputs: tuple[str, ...]) -> list[RunFacts]:
        return [
            run(
                rank,
                replicas=(model(),),
                loaders=(LoaderFacts("0", inputs=own, place=HERE, stream="Lines"),),
            )
            for rank, own in enumerate(inputs)
        ]

    (finding,) = found(*every(("a", "b"), ("a", "b")))
    assert finding.category is Category.SAMPLER_MISUSE and "Lines" in finding.cause
    assert not kinds(*every(("a", "b"), ("c", "d")))
    assert not kinds(*every(("a", "a"), ("a", "a")))


def test_a_stream_of_which_each_worker_reads_all() -> None:
    def every(inputs: str, numbers: str = "", workers: int = 2) -> list[RunFacts]:
        batches = tuple(map(int, numbers)) or tuple(range(1, len(inputs) + 1))
        loaders = [
            LoaderFacts("0", "", "", of, HERE, "Lines", workers, batches)
            for of in (tuple(inputs), tuple(inputs.upper()))
        ]
        return [run(r, replicas=(model(),), loaders=(of,)) for r, of in enumerate(loaders)]

    (finding,) = found(*every("aabbccdd"))
    assert finding.category is Category.SAMPLER_MISUSE and finding.ranks == (0, 1)
    assert "every batch comes 2 times" in finding.cause
    assert "the first 8 batches of rank 0 are 4 different ones" in finding.evidence[0]
    assert len(found(*every("aaabbbc", workers=3))) == 1
    assert not kinds(*every("aabbccdd", "11223344")), "two forwards for each batch"
    assert len(found(*every("aaaabbbb", "11223344"))) == 1, "two forwards, and two of each batch"
    assert not kinds(*every("aabbccdd", workers=0)) and not kinds(*every("aabb", workers=3))
    assert not kinds(*every("aaaa")) and not kinds(*every("aabbccde")) and not kinds(*every("aa"))


def test_what_is_known_survives_the_wire() -> None:
    facts = run(
        0,
        replicas=(model(evaluations=(evaluation(wrote=None),), starts=(StepStart("a"),)),),
        optimizers=(optimizer(factors=(None, 0.5)),),
        works=(WorkFacts("all_reduce", 1, 1, place=HERE),),
        functional=FunctionalFacts(1, 2, 3, "all_reduce", HERE),
    )
    assert codec.decode(RunFacts, codec.encode(facts)) == facts


# -- weights that were one tensor ----------------------------------------------------------

TIES = "class Net:\n    def tie(self):\n        self.head.weight = self.emb.weight\n"
TWINS = (("emb.weight", "head.weight"),)


def weights(*values: float) -> tuple[TensorDigest, ...]:
    names = ("emb.weight", "head.weight")
    pairs = zip(names, values, strict=False)
    return tuple(TensorDigest(name, 6, f"{value}", value, (value,)) for name, value in pairs)


def lms(values: tuple[float, ...] = (1.0, 2.0), **fields: Any) -> list[RunFacts]:
    usual: dict[str, Any] = {"twins": TWINS, "parameters": weights(*values)}
    return [
        run(rank, replicas=(model(**{**usual, **fields}),), optimizers=(optimizer(),))
        for rank in (0, 1)
    ]


def test_weights_that_the_code_ties_and_that_are_trained_apart_are_told() -> None:
    (finding,) = found(*lms(), source=TIES)
    assert (finding.category, finding.ranks) == (Category.WEIGHT_TYING_LOST, (0, 1))
    assert "train.py:3" in finding.cause


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({}, ""),  # a copy that is meant to go its own way
        ({}, "self.head.weight = nn.Parameter(self.emb.weight.clone())\n"),
        ({}, "self.head.weight.data = self.emb.weight.data\n"),
        ({"twins": ()}, TIES),  # tying is off, or another class ties
        ({"values": (1.0, 1.0)}, TIES),  # they share their memory, or are frozen
        ({"values": (1.0,)}, TIES),  # one tensor
        ({"steps": 0}, TIES),
    ],
)
def test_weights_that_are_two_by_intention_are_left_alone(
    fields: dict[str, Any], source: str
) -> None:
    assert not found(*lms(**fields), source=source)


# -- samples that are counted twice --------------------------------------------------------


DIVIDES = """
def joined(values):
    t = torch.tensor(values)
    dist.all_reduce(t)
    return t
right, total = joined([right, total])
print(right / total)
"""
COUNTED = (Place("train.py", 6), Place("train.py", 4, "joined"))


def evaluated(
    *padded: tuple[int, int] | None, size: int = 3, source: str = DIVIDES
) -> tuple[Finding, ...]:
    """Each rank's first evaluation, as it counted."""
    facts = EvaluationFacts(4, loader=True, counted=COUNTED)
    return found(
        *(
            run(
                rank,
                replicas=(model(size, evaluations=(replace(facts, padded=each),)),),
            )
            for rank, each in enumerate(padded)
        ),
        source=source,
    )


def test_padding_that_all_ranks_have_counted_is_told_with_its_number() -> None:
    (finding,) = evaluated(*[(10, 4)] * 3)
    assert (finding.category, finding.ranks) == (Category.EVAL_PADDING, (0, 1, 2))
    assert "12 in all, of a data set of 10: 2 of them are counted twice" in finding.cause


@pytest.mark.parametrize(
    "padded", [(None,) * 3, ((10, 4), (10, 4), None), ((10, 4), (10, 4), (9, 4)), ((10, 5),) * 3]
)
def test_padding_that_is_left_out_or_of_other_ranks_is_no_mistake(padded: tuple[Any, ...]) -> None:
    assert not evaluated(*padded)


@pytest.mark.parametrize(
    "told",
    [
        "print(total / (time.time() - began))",
        "print(right / len(data), total)",
        "rate = total * 1.0 / seconds; mean = (right / torch.tensor(len(data)))",
        "total",
    ],
)
def test_a_count_by_which_nothing_is_divided_is_no_part_of_a_result(told: str) -> None:
    """For the throughput, say, samples count that come twice; the metric may leave them out."""
    assert not evaluated(*[(10, 4)] * 3, source=DIVIDES.replace("print(right / total)", told))


@pytest.mark.parametrize(
    "told", ["right.div_(total)", "n = max(total, 1); x = right / n", "torch.div(right, total)"]
)
def test_a_division_by_the_count_may_be_written_in_many_ways(told: str) -> None:
    assert evaluated(*[(10, 4)] * 3, source=DIVIDES.replace("print(right / total)", told))


_DEALT = """
rank, world = dist.get_rank(), dist.get_world_size()
class Clips(Dataset):
    def __init__(self, n, rank, world):
        self.ids = list(range(n))[rank::world]
class Perhaps(Dataset):
    def __init__(self, n, rank, world, shard=False):
        self.ids = list(range(n))
        if shard:
            self.ids = self.ids[rank::world]
class Several(Dataset):
    def __init__(self, n, rank, world):
        self.ids = list(range(n))
        if world > 1:
            self.ids = self.ids[rank::world]
data = {}
sampler = DistributedSampler(data, num_replicas=world, rank=rank)
"""


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        ("Clips(240, rank, world)", True),
        ("files[rank::world]", True),
        ("Subset(full, range(rank, len(full), world))", True),
        ("files[rank :: dist.get_world_size()]", True),
        ("Several(240, rank, world)", True),
        ("Perhaps(240, rank, world)", False),  # it divides where it is told to
        ("files[rank::world] if args.shard else files", False),
        ("files[::2]", False),
        ("Other(240, rank, world)", False),
        ("Clips(240, 0, 1)", False),  # the class can divide, and does not here
        ("Images(download=rank == 0)", False),
        ("files[node_rank::num_nodes]", False),  # the sampler divides what its node has
        ("full\nvalid = DistributedSampler(held)\nheld = files", False),  # which one is it?
    ],
)
def test_data_that_are_divided_before_the_sampler_divides_them(made: str, wrong: bool) -> None:
    place = Place("train.py", 18)
    every = [
        run(
            rank,
            replicas=(model(),),
            samplers=(SamplerFacts("s", 80, 2, rank, epochs=(0,), place=place),),
        )
        for rank in (0, 1)
    ]
    told = kinds(*every, source=_DEALT.format(made))
    assert told == [(Category.SAMPLER_MISUSE, (0, 1))] * wrong


@pytest.mark.parametrize(
    ("data", "orders", "ranks"),
    [
        ("ddd", "abc", (0, 1, 2)),
        ("ddd", "aab", (2,)),  # the majority is right
        ("ddd", "aaa", ()),
        ("abc", "abc", ()),  # made at random, on each rank
        (("", "", ""), "abc", ()),  # not known
        ("ddd", ("a", "b", ""), ()),
        ("ddd", ("a x", "a y", "a z"), ()),  # one list of two: drawn beside the data
        ("ddd", ("a x", "b y", "c z"), (0, 1, 2)),
        ("ddd", ("a x|1", "a x|2", "a x|1"), (1,)),  # another part
    ],
)
def test_data_sets_of_another_order_under_a_distributed_sampler(
    data: Sequence[str], orders: Sequence[str], ranks: tuple[int, ...]
) -> None:
    samplers = [
        SamplerFacts("s", 80, 3, rank, epochs=(0,), place=HERE, data=of, order=order)
        for rank, (of, order) in enumerate(zip(data, orders, strict=True))
    ]
    every = [
        run(rank, replicas=(model(3),), samplers=(sampler,))
        for rank, sampler in enumerate(samplers)
    ]
    assert kinds(*every) == ([(Category.SAMPLER_MISUSE, ranks)] if ranks else [])


GATHERS = """
def gather(t):
    parts = [torch.zeros_like(t) for _ in range(world)]
    dist.all_gather(parts, t)
    return torch.cat(parts)
def test(pred, y):
    pred, y = gather(pred), gather(y)
    hits = pred == y
    return hits.sum() / len(y)
print(test(pred, y))
"""
GATHERED = (Place("train.py", 10), Place("train.py", 7, "test"), Place("train.py", 4, "gather"))


@pytest.mark.parametrize(
    ("instead", "wrong"),
    [
        ("hits.sum() / len(y)", True),
        ("hits.float().mean()", True),
        ("hits.sum()", False),  # no share of anything
        ("hits[:length].sum() / length", False),
        ("hits[order].sum() / len(y)", False),
        ("hits.sum() / len(y.unique())", False),
    ],
)
def test_padding_that_all_ranks_have_gathered(instead: str, wrong: bool) -> None:
    source = GATHERS.replace("hits.sum() / len(y)", instead)
    of = EvaluationFacts(8, 2, loader=True, place=HERE, padded=(10, 4), gathered=GATHERED)
    every = [run(rank, replicas=(model(3, evaluations=(of,)),)) for rank in range(3)]
    told = found(*every, source=source)
    assert [(each.category, each.ranks) for each in told] == [
        (Category.EVAL_PADDING, (0, 1, 2))
    ] * wrong
    assert not wrong or "gathers a row for each sample, of 4" in told[0].evidence[0]


# -- losses ------------------------------------------------------------------------------

_DIVIDED = "\n" * 5 + "loss = loss / dist.get_world_size()\nloss.backward()\n"
_IN_FUNCTION = """
def criterion(out, y, world_size):
    loss = (out - y).square().mean()
    return {}

loss = criterion(net(x), y, size)
loss.backward()
"""


@pytest.mark.parametrize(
    ("factor", "mean", "source", "backwards", "wrong"),
    [
        (0.5, True, _DIVIDED, 8, True),
        (0.5, True, "\n" * 6 + "(loss / world_size).backward()\n", 8, True),
        (0.5, True, _DIVIDED, 16, False),  # over two micro-batches, on two ranks
        (1.0, True, _DIVIDED, 8, False),
        (0.5, False, _DIVIDED, 8, False),  # a sum of two losses, halved
        # Half of a square, by custom; what is logged is divided afterwards.
        (0.5, True, "\n" * 6 + "loss.backward()\nloss /= dist.get_world_size()\n", 8, False),
        (0.5, True, "\n" * 5 + "mean = loss / world_size\nloss.backward()\n", 8, False),
        (0.5, True, "", 8, False),
        (0.5, True, _IN_FUNCTION.format("loss / world_size"), 8, True),
        (0.5, True, _IN_FUNCTION.format("loss / 2"), 8, False),
    ],
)
def test_a_loss_that_is_divided_by_the_world_size(
    factor: float, mean: bool, source: str, backwards: int, wrong: bool
) -> None:
    losses = (LossFacts(factor, mean, 8.0, HERE),) * 8
    replica = model(backwards=backwards)
    every = [run(rank, losses=losses, replicas=(replica,)) for rank in (0, 1)]
    assert kinds(*every, source=source) == [(Category.LOSS_SCALING, (0, 1))] * wrong


@pytest.mark.parametrize(
    ("counts", "fields", "wrong"),
    [
        (((20, 18, 21, 19), (3, 4, 3, 5)), {}, True),
        (((20, 18, 21, 19), (12, 11, 13, 12)), {}, False),  # not twice as many
        (((20, 3, 21, 19), (3, 20, 3, 5)), {}, False),  # now here, now there
        (((20, 18, 21), (3, 4, 3)), {}, False),  # too few to say
        (((20, 18, 21, 19), (0, 4, 3, 5)), {}, False),  # not known
        (((20, 18, 21, 19), (3, 4, 3, 5)), {"hook": "mine"}, False),
        (((20, 18, 21, 19), (3, 4, 3, 5)), {"factors": (1.6, 0.3)}, False),  # weighted by them
        (((20, 18, 21, 19), (3, 4, 3, 5)), {"mean": False}, False),
    ],
)
def test_means_over_far_fewer_values_on_one_rank(
    counts: tuple[tuple[int, ...], ...], fields: dict[str, Any], wrong: bool
) -> None:
    factors, mean = fields.get("factors", (1.0, 1.0)), fields.get("mean", True)
    every = [
        run(
            rank,
            losses=tuple(LossFacts(factors[rank], mean, float(c), HERE) for c in counts[rank]),
            replicas=(model(hook=fields.get("hook", "")),),
        )
        for rank in (0, 1)
    ]
    assert kinds(*every) == [(Category.LOSS_SCALING, (0, 1))] * wrong


@pytest.mark.parametrize(
    ("few", "many", "steps", "ignores", "wrong"),
    [
        (62, 90, 8, True, True),
        (62, 90, 8, False, False),  # batches of two sizes
        (62, 90, 6, True, False),  # in too few steps
        (80, 90, 8, True, False),  # hardly fewer
    ],
)
def test_means_over_fewer_tokens_on_the_same_rank_in_many_steps(
    few: int, many: int, steps: int, ignores: bool, wrong: bool
) -> None:
    every = [
        run(
            rank,
            losses=(LossFacts(1.0, True, float(count), HERE, ignores=ignores),) * steps,
            replicas=(model(),),
        )
        for rank, count in enumerate((few, many))
    ]
    assert kinds(*every) == [(Category.LOSS_SCALING, (0, 1))] * wrong


@pytest.mark.parametrize(
    ("divisors", "wrong"),
    [
        (((20, 18, 21, 19), (3, 4, 3, 5)), True),
        (((20, 18, 21, 19), (12, 11, 13, 12)), False),  # not twice as many
        (((23, 22, 24, 24), (23, 22, 24, 24)), False),  # what all ranks have counted
        (((20, 18, 21, 0), (3, 4, 3, 5)), False),  # not known
    ],
)
def test_sums_that_each_rank_divides_by_what_it_has_counted(
    divisors: tuple[tuple[int, ...], ...], wrong: bool
) -> None:
    every = [
        run(
            rank,
            losses=tuple(LossFacts(1 / d if d else 1.0, place=HERE, divisor=d) for d in of),
            replicas=(model(),),
        )
        for rank, of in enumerate(divisors)
    ]
    assert kinds(*every) == [(Category.LOSS_SCALING, (0, 1))] * wrong


def test_a_model_that_one_rank_trains_before_the_others_is_not_compared() -> None:
    before = Place("train.py", 3, "prepare", "loss.backward()")
    lone = (LossFacts(1.0, True, 352.0, before),) * 8
    often = (LossFacts(1.0, True, 16.0, HERE),) * 8
    every = [run(r, losses=lone if r == 0 else often, replicas=(model(3),)) for r in range(3)]
    assert not kinds(*every)


@pytest.mark.parametrize(
    ("divisors", "counts", "wrong"),
    [
        # A step of two micro-batches, two of one: each divisor is all the targets of its step.
        ((60, 60, 25, 31), ((10, 20, 12, 15), (15, 15, 13, 16)), True),
        ((30, 30, 12.5, 15.5), ((10, 20, 12, 15), (15, 15, 13, 16)), False),  # times world size
        ((60, 60, 26, 31), ((10, 20, 12, 15), (15, 15, 13, 16)), False),  # something else
        ((60, 60, 25, 31), ((0,) * 4, (15, 15, 13, 16)), False),  # not known on a rank
        ((50, 50, 50, 50), ((10, 15, 10, 15), (10, 15, 10, 15)), False),  # one step or several?
    ],
)
def test_sums_that_are_divided_by_all_ranks_targets_are_averaged_once_more(
    divisors: tuple[float, ...], counts: tuple[tuple[float, ...], ...], wrong: bool
) -> None:
    def every(replica: ReplicaFacts, factor: float) -> list[RunFacts]:
        return [
            run(
                rank,
                losses=tuple(
                    LossFacts(1 / d, count=float(n), place=HERE, divisor=d)
                    for d, n in zip(divisors, of, strict=True)
                ),
                replicas=(replica,),
                optimizers=(optimizer(factors=(factor,) * 3),),
            )
            for rank, of in enumerate(counts)
        ]

    assert kinds(*every(model(), 1.0)) == [(Category.LOSS_SCALING, (0, 1))] * wrong
    assert not kinds(*every(model(), 2.0))  # multiplied by the world size before the step
    assert not kinds(*every(model(hook="mine"), 1.0))
    rate = "opt = SGD(net.parameters(), lr=0.1 * dist.get_world_size())"
    assert not kinds(*every(model(), 1.0), source=rate)


@pytest.mark.parametrize(
    ("then", "read"),
    [
        ("mean = sum(got)", True),
        ("got[0] = own\nx = torch.cat(got)\nh.wait()", True),
        ("h.wait()\nx = torch.cat(got)", False),
        ("finish(h)\nx = torch.cat(got)", False),
        ("x = torch.cat(other)\nh.wait()", False),
    ],
)
def test_a_function_that_returns_a_tensor_and_its_handle(then: str, read: bool) -> None:
    call = "work = dist.all_gather(parts, x, async_op=True)"
    starts = f"parts = make()\n    {call}\n    return parts, work"
    code = (
        f"def gather(x):\n    {starts}\ndef finish(h):\n    h.wait()\ngot, h = gather(z)\n{then}\n"
    )
    every = [run(rank, replicas=(model(),)) for rank in (0, 1)]
    records = (Collective(0, 0, "all_gather", path=(Place("train.py", 3),)),)
    wrong = [(Category.ASYNC_MISUSE, (0, 1))]
    assert kinds(*every, records=records, source=code) == wrong * read
    plain = code.replace("return parts, work", "work.wait()\n    return parts, work")
    plain = plain.replace("async_op=True", "async_op=False")
    assert not kinds(*every, records=records, source=plain)


@pytest.mark.parametrize(
    ("code", "hashes", "ranks"),
    [
        ("self.waves = 3 * torch.randn(2, n)", "ab", (0, 1)),
        ("self.waves = torch.empty(2, n).normal_()", "aba", (1,)),
        ("self.waves = draw(n)\ndef draw(n):\n    return np.random.randn(n)", "ab", (0, 1)),
        ("self.waves = 3 * torch.randn(2, n)", "aa", ()),
        ("self.waves = places(rank, n)", "ab", ()),  # meant to differ, for all that is known
        ("self.others = torch.randn(2, n)", "ab", ()),
    ],
)
def test_tensors_that_are_no_buffers_and_are_drawn_on_each_rank(
    code: str, hashes: str, ranks: tuple[int, ...]
) -> None:
    every = [
        run(
            rank,
            optimizers=(optimizer(),),
            replicas=(
                model(
                    len(hashes),
                    constants=(TensorDigest("features.waves", 8, of, ord(of), (ord(of), 1.0)),),
                ),
            ),
        )
        for rank, of in enumerate(hashes)
    ]
    used = "\ndef forward(self, x):\n    return {}\ndef turn(x):\n    return (x @ self.waves).sin()"
    for forward in ("(x @ self.waves).sin()", "turn(x)"):
        told = kinds(*every, source=code + used.format(forward))
        assert told == ([(Category.RNG_MISMATCH, ranks)] if ranks else [])
    assert not kinds(*every, source=code + used.format("self.last(x)"))  # only looked at


# -- modes, and parameters that nobody updates -------------------------------------------


@pytest.mark.parametrize(
    ("modes", "varies", "ranks"),
    [
        (((True, True, False, False), (True,) * 4), True, (0,)),
        (((True, True, False, False), (True,) * 4), False, ()),  # nothing that could differ
        (((True, True, False, True), (True,) * 4), True, ()),  # one step alone
        (((False,) * 4, (False,) * 4), True, ()),  # frozen statistics, on all
    ],
)
def test_a_rank_that_trains_in_evaluation_mode(
    modes: tuple[tuple[bool, ...], ...], varies: bool, ranks: tuple[int, ...]
) -> None:
    every = [
        run(r, replicas=(model(backwards=4, evaluating=m.count(False), varies=varies),))
        for r, m in enumerate(modes)
    ]
    assert kinds(*every) == ([(Category.NUMERICS_MISMATCH, ranks)] if ranks else [])


def test_a_layer_between_others_that_no_optimizer_holds() -> None:
    forgotten = model(unheld=("adapter.weight", "adapter.bias"))
    found_there = kinds(*[run(rank, replicas=(forgotten,)) for rank in (0, 1)])
    assert found_there == [(Category.OPTIMIZER_DETACHED, (0, 1))]
    assert not kinds(run(0, replicas=(forgotten,)), run(1, replicas=(model(),)))


@pytest.mark.parametrize(("begins", "wrong"), [((1.0, 1.0), True), ((1.0, 2.0), False)])
def test_what_each_rank_began_with_values_of_its_own_is_its_own(
    begins: tuple[float, ...], wrong: bool
) -> None:
    """A client's head; one expert of many."""
    name = "param_groups[1]['params'][0]"

    def owns(rank: int) -> OptimizerFacts:
        return optimizer(
            unwrapped=(TensorDigest(name, 4, norm=3.0 + rank),),
            begins=(TensorDigest(name, 4, norm=begins[rank]),),
        )

    every = [run(rank, replicas=(model(),), optimizers=(owns(rank),)) for rank in (0, 1)]
    assert kinds(*every) == [(Category.PARAMS_OUTSIDE_DDP, (0, 1))] * wrong


@pytest.mark.parametrize(
    ("options", "replicas", "numel", "ranks"),
    [
        (
            (("weight_decay=0", "dampening=0"), ("weight_decay=0.1", "dampening=0")),
            (KEY,),
            1,
            (0, 1),
        ),
        ((("weight_decay=0",), ("weight_decay=0.1",)), (), 1, ()),  # each tries a value
        ((("weight_decay=0",), ("weight_decay=0.1",)), (), 4, (0, 1)),
        ((("weight_decay=0",), ("weight_decay=0.1",), ("weight_decay=0",)), (KEY,), 1, (1,)),
        ((("weight_decay=0",), ("weight_decay=0",)), (KEY,), 1, ()),
    ],
)
def test_optimizers_with_other_options(
    options: tuple[tuple[str, ...], ...],
    replicas: tuple[str, ...],
    numel: int,
    ranks: tuple[int, ...],
) -> None:
    every = [
        run(r, optimizers=(optimizer(replicas=replicas, numels=(2, 4), options=own),))
        for r, own in enumerate(options)
    ]
    sent = (Collective(0, 0, "all_reduce", numel=numel),)
    assert kinds(*every, records=sent) == ([(Category.REPLICA_DIVERGENCE, ranks)] if ranks else [])


SHARE = """
def mean(t):
    dist.all_reduce(t)
    t /= dist.get_world_size()
for x in part:
    right = right + (net(x) == y)
share = right / len(part)
mean(share)
"""
LISTED = """
def mean(t):
    dist.all_reduce(t)
    t /= dist.get_world_size()
for x in part:
    losses.append((net(x) - x).pow(2).mean())
mean_of = torch.stack(losses).mean()
mean(mean_of)
"""
METRIC = """
def mean(t):
    dist.all_reduce(t)
    t /= dist.get_world_size()
for x in part:
    metric.update(net(x), y)
share = metric.right / len(part)
mean(share)
class Metric:
    def update(self, out, y):
        self.right += (out == y)
metric = Metric()
metric.right = metric.seen = 0
"""
_AT, _SUMS = Place("train.py", 6), (Place("train.py", 8), Place("train.py", 3, "mean"))


@pytest.mark.parametrize(
    ("source", "samples", "wrong"),
    [
        (SHARE, (40, 10), True),
        (SHARE, (40, 40), False),
        (SHARE, (40, 0), False),  # not known
        (SHARE.replace("    t /= dist.get_world_size()", "    t /= 1"), (40, 10), False),
        (SHARE.replace("right / len(part)", "right"), (40, 10), False),  # a count
        (SHARE.replace("right / len(part)", "right.float().mean()"), (40, 10), True),
        (SHARE.replace("share = right", "share = loss"), (40, 10), False),  # of the training
        (LISTED, (40, 10), True),
        (METRIC, (40, 10), True),
        (METRIC.replace("self.right += (out", "self.seen += (out"), (40, 10), False),
        ("", (40, 10), False),
    ],
)
def test_means_of_unequal_parts_that_are_averaged(
    source: str, samples: tuple[int, ...], wrong: bool
) -> None:
    evaluation = EvaluationFacts(4, loader=True, place=_AT, summed=(_SUMS,))
    every = [
        run(rank, replicas=(model(evaluations=(replace(evaluation, samples=n),)),))
        for rank, n in enumerate(samples)
    ]
    assert kinds(*every, source=source) == [(Category.METRIC_MISAGGREGATION, (0, 1))] * wrong


@pytest.mark.parametrize(
    ("of_rank_1", "wrong"),
    [
        ({}, True),
        ({"place": Place("train.py", 5)}, False),  # one rank begins elsewhere: with a trial, say
    ],
)
def test_means_of_unequal_parts_where_nothing_is_trained(
    of_rank_1: dict[str, Any], wrong: bool
) -> None:
    evaluation = EvaluationFacts(0, loader=True, place=_AT, summed=(_SUMS,), samples=40)
    other = replace(evaluation, samples=10, **of_rank_1)
    drawn = SamplerFacts("s", 10, 2, epochs=(0, 0))  # in a training this would be a mistake
    every = [
        RunFacts(
            rank,
            1,
            evaluated=(ReplicaFacts(KEY, "Net", "net", group_size=2, evaluations=(each,)),),
            samplers=(replace(drawn, rank=rank),),
        )
        for rank, each in enumerate((evaluation, other))
    ]
    assert kinds(*every, source=SHARE) == [(Category.METRIC_MISAGGREGATION, (0, 1))] * wrong


@pytest.mark.parametrize(
    ("loads", "begins", "fields", "wrong"),
    [
        ((1, 0, 0), ((0.5,), (0.1,), (0.2,)), {}, True),
        ((1, 0, 0), ((0.5,), (0.5,), (0.5,)), {}, False),  # sent to the others
        ((1, 1, 1), ((0.5,), (0.1,), (0.2,)), {}, False),  # each its own
        ((0, 0, 0), ((0.5,), (0.1,), (0.2,)), {}, False),
        ((1, 0, 0), ((0.5,), (0.1,), (0.2,)), {"summed": ()}, False),  # nothing joins them
        ((1, 0, 0), ((0.5,), (), (0.2,)), {}, False),  # not known
    ],
)
def test_a_model_that_is_evaluated_and_loaded_on_some_ranks_alone(
    loads: tuple[int, ...], begins: tuple[tuple[float, ...], ...], fields: Any, wrong: bool
) -> None:
    evaluation = replace(EvaluationFacts(0, place=_AT, summed=(_SUMS,), samples=9), **fields)
    every = [
        RunFacts(
            rank,
            1,
            evaluated=(
                ReplicaFacts(
                    KEY,
                    "Net",
                    group_size=3,
                    evaluations=(evaluation,),
                    loads=count,
                    load_place=HERE if count else None,
                    begins=values,
                ),
            ),
        )
        for rank, (count, values) in enumerate(zip(loads, begins, strict=True))
    ]
    assert kinds(*every) == [(Category.CHECKPOINT_MISUSE, (1, 2))] * wrong


EARLY = """
work = dist.all_gather(parts, z, async_op=True)
every = torch.cat(parts)
work.wait()
"""


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (EARLY, True),
        (EARLY.replace("torch.cat(parts)", "sum(parts)"), True),
        (EARLY.replace("torch.cat(parts)", "parts[0] * 2"), True),
        (EARLY.replace("torch.cat(parts)", "torch.cat(z)"), False),  # what it sends
        (EARLY.replace("torch.cat(parts)", "torch.zeros_like(parts)"), False),
        (EARLY.replace("torch.cat(parts)", "dist.get_rank(parts)"), False),
        (EARLY.replace("every", "work.wait(); every"), False),
        (EARLY.replace("every", "todo.append(work); flush(todo); every"), False),
        (EARLY.replace("every", "flush(); every") + "def flush(): work.wait()", False),
        (EARLY.replace(", async_op=True", ""), False),
        (EARLY.replace("all_gather(parts, z", "gather(z, parts"), False),
        (EARLY.replace("all_gather(parts, z, async_op=True)", "irecv(parts, 0)"), True),
        ("for x in parts:\n    work = dist.all_reduce(x, async_op=True)\nwork.wait()", False),
    ],
)
def test_what_is_read_before_it_is_waited_for(source: str, wrong: bool) -> None:
    every = [run(rank) for rank in (0, 1)]
    sent = (Collective(0, 0, "all_gather", path=(Place("train.py", 2),)),)
    found = kinds(*every, records=sent, source=source)
    assert found == [(Category.ASYNC_MISUSE, (0, 1))] * wrong
    assert not kinds(*every, records=(Collective(0, 0, "barrier"),), source=source)


def hooked(rank: int, weights: tuple[float, ...]) -> tuple[GradientSample, ...]:
    """What a hook was given on a rank, and that it left the ranks' gradients with these weights."""

    def own(of: int, step: int) -> tuple[float, ...]:
        return tuple(((of * 7 + step * 5 + k * k) % 11 - 5.5) / 10 for k in range(8))

    def used(step: int) -> tuple[float, ...]:
        rows = [own(of, step) for of in range(len(weights))]
        return tuple(
            sum(w * v for w, v in zip(weights, c, strict=True)) for c in zip(*rows, strict=True)
        )

    return tuple(GradientSample((own(rank, step),), (used(step),), ()) for step in range(3))


@pytest.mark.parametrize(
    ("weights", "factor", "source", "wrong"),
    [
        ((1.0, 1.0), 1.0, "", True),
        ((1.004, 0.998), 1.0, "", True),  # in 16 bits
        ((0.5, 0.5), 1.0, "", False),
        ((1.0, 0.0), 1.0, "", False),  # one that does not reduce now
        ((1.0, 1.0), 0.5, "", False),  # the loss is divided
        ((1.0, 1.0), 1.0, "opt = SGD(p, lr=0.1 / dist.get_world_size())", False),
    ],
)
def test_a_hook_that_adds_up_and_does_not_divide(
    weights: tuple[float, ...], factor: float, source: str, wrong: bool
) -> None:
    losses = tuple(LossFacts(factor, True, 8.0) for _ in range(4))
    every = [
        run(r, replicas=(model(hook="mine", hooked=hooked(r, weights)),), losses=losses)
        for r in (0, 1)
    ]
    assert kinds(*every, source=source) == [(Category.LOSS_SCALING, (0, 1))] * wrong


SPLIT = SamplerFacts("s", 64, 4, 0)


@pytest.mark.parametrize(
    ("fields", "of_rank", "numel", "wrong"),
    [
        ({}, {"samplers": (SPLIT,)}, 1, True),
        ({}, {}, 1, False),  # folds, or trials
        ({}, {"saves": (SaveFacts("model.pt", (5,)),)}, 1, False),  # of which the best is kept
        ({}, {"samplers": (replace(SPLIT, num_replicas=2),)}, 1, False),
        ({"begins": None}, {"samplers": (SPLIT,)}, 1, False),
        ({"starts": (StepStart("", input="same"),)}, {"samplers": (SPLIT,)}, 1, False),
        ({"group": (0, 1, 2, 3)}, {"samplers": (SPLIT,)}, 1, False),
        (
            {"parameters": (TensorDigest("w", 16, "h", 1.0, (1.0,)),)},
            {"samplers": (SPLIT,)},
            1,
            False,
        ),
        ({}, {"samplers": (SPLIT,)}, 64, False),  # averaged over the groups by hand
    ],
)
def test_groups_of_ddp_that_train_one_model_apart(
    fields: dict[str, Any], of_rank: dict[str, Any], numel: int, wrong: bool
) -> None:
    def of(rank: int) -> RunFacts:
        half = rank // 2
        usual: dict[str, Any] = {
            "group": (2 * half, 2 * half + 1),
            "begins": (1.0, 2.0),
            "starts": (StepStart("", input=f"{rank}"),),
            "parameters": (TensorDigest("w", 16, f"{half}", 1.0 + half, (1.0 + half,)),),
        }
        own = {k: (1.0 + half,) if v is None else v for k, v in fields.items()}
        return run(
            rank, replicas=(model(**{**usual, **own}),), optimizers=(optimizer(),), **of_rank
        )

    sent = (Collective(0, 0, "all_reduce", numel=numel, backwards=2),)
    told = kinds(*map(of, range(4)), records=sent)
    assert [each for each in told if each[0] is not Category.SAMPLER_MISUSE] == [
        (Category.REPLICA_DIVERGENCE, (0, 1, 2, 3))
    ] * wrong


FIRST, LATER = (1.0, 2.0), (3.0, 4.0)


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ((((9, LATER),), ((9, FIRST),), ((9, FIRST),)), (0,)),  # used at the end alone
        ((((9, LATER),), ((9, LATER),), ((9, FIRST),)), (2,)),
        ((((1, FIRST), (9, LATER)), ((1, FIRST), (9, FIRST)), ((1, FIRST), (9, FIRST))), (0,)),
        ((((9, LATER),), ((9, LATER),), ((9, LATER),)), ()),  # updated on all, or sent to all
        ((((9, FIRST),), ((9, FIRST),), ((9, FIRST),)), ()),  # a frozen reference
        ((((9, (5.0, 5.0)),), ((9, LATER),), ((9, (7.0, 8.0)),)), ()),  # each rank's own
        ((((9, LATER),), (), ()), ()),  # nobody else uses it
        ((((1, LATER),), ((1, FIRST),), ((1, FIRST),)), ()),  # before training
        ((((9, LATER),), ((8, FIRST),), ((9, FIRST),)), ()),  # at other times
    ],
)
def test_an_average_of_the_weights_that_some_ranks_alone_update(
    values: tuple[tuple[tuple[int, tuple[float, ...]], ...], ...], ranks: tuple[int, ...]
) -> None:
    every = [
        run(
            rank,
            replicas=(model(3, begins=FIRST),),
            copies=(CopyFacts("Net", of, HERE),) if of else (),
        )
        for rank, of in enumerate(values)
    ]
    assert kinds(*every) == [(Category.REPLICA_DIVERGENCE, ranks)] * bool(ranks)


@pytest.mark.parametrize(
    ("script", "by_world"),
    [
        ("opt = SGD(p, lr=0.1)", False),  # another script of the folder does
        ("from settings import rate", True),
        ("import job.settings", True),
    ],
)
def test_a_rate_by_the_number_of_ranks_counts_where_the_script_has_it(
    script: str, by_world: bool
) -> None:
    other = "opt = SGD(p, lr=0.1 * dist.get_world_size())"
    sources = Sources({"train.py": script, "settings.py": other, "other.py": other})
    assert chooses_rate_by_world(sources, ["train.py"]) is by_world
    assert chooses_rate_by_world(sources, [])
