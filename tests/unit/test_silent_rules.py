"""What ranks know of works, gradients, evaluations, random numbers: what is a mistake, what not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from collective_cases import found_in_training

from ddp_notebook.model import (
    Category,
    Collective,
    Collectives,
    EvaluationFacts,
    Finding,
    FunctionalFacts,
    LoaderFacts,
    OptimizerFacts,
    Part,
    Place,
    ReplicaFacts,
    RunFacts,
    SamplerFacts,
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
        (
            WorkFacts("all_reduce", 4, 4, 4, 0, HERE),
            True,
            "changes a tensor without waiting for the `all_reduce`",
        ),
        (
            WorkFacts("all_reduce", 4, 0, 0, 4, HERE),
            True,
            "steps without waiting for the `all_reduce` of its gradients",
        ),
        (WorkFacts("isend", 1, 0, 1, 0, HERE), True, "waiting for the `isend` that sends it"),
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
        assert words in findings[0].cause and findings[0].decides is not None
        assert str(findings[0].decides.place).startswith("train.py, line 7")
    assert len(found(run(0, works=(work,)), run(1))) == wrong, "on one rank alone"


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
    rates = {0: "rank 0 uses lr 0.1, rank 1 uses 0.2", 1: "rank 1 uses lr 0.2, rank 0 uses 0.1"}
    assert rates[ranks[0]] in finding.cause.lower()


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
        assert "created before `fully_shard`" in findings[0].cause and findings[0].ranks == (0, 1)


def test_an_optimizer_without_a_tensor_on_a_rank_has_others_on_other_ranks() -> None:
    """As ZeroRedundancyOptimizer has, which divides them among the ranks."""
    empty = optimizer(replicas=(), steps=8, idle_steps=8, numels=())
    assert not found(run(0, replicas=(model(),)), run(1, replicas=(model(),), optimizers=(empty,)))


def test_a_layer_that_was_replaced_after_the_optimizer_was_made() -> None:
    lacks = optimizer(unheld=("head.weight", "head.bias"), idle_tensors=2)
    every = [run(rank, replicas=(model(),), optimizers=(lacks,)) for rank in (0, 1)]
    (finding,) = found(*every)
    assert (finding.category, finding.ranks) == (Category.OPTIMIZER_DETACHED, (0, 1))
    assert "`head.weight` and `head.bias` are never updated" in finding.cause
    assert "head.weight and head.bias did, and no optimizer holds them" in finding.evidence[-1]
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
    assert wrong or "all gradients were averaged" in findings[0].cause or not fields["forwards"]


# -- evaluations -------------------------------------------------------------------------


def evaluation(**fields: Any) -> EvaluationFacts:
    usual: dict[str, Any] = {"backwards": 8, "place": HERE}
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
    assert "train.py, line 3" in finding.evidence[1]


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


# -- data sets under a sampler -------------------------------------------------------------


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


# -- parameters that nobody updates ------------------------------------------------------


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


_AT, _SUMS = Place("train.py", 6), (Place("train.py", 8), Place("train.py", 3, "mean"))


FIRST, LATER = (1.0, 2.0), (3.0, 4.0)
