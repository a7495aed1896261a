"""Collectives that some ranks did not reach, or reached with other tensors: whose mistake it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import DDP, SKIP, found, lines_of, refuse, refused, same, the_one
from traces import (
    all_reduce,
    backward,
    barrier,
    died,
    forward,
    message,
    op,
    places,
    play,
    raised,
    with_facts,
)

from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Collective,
    Part,
    Place,
    ProcessEnd,
    RankError,
    RankReport,
    ReplicaFacts,
    ThreadError,
)

# -- collectives that only some ranks issue ------------------------------------------------


def test_a_save_on_rank_0_alone_whose_barrier_meets_that_of_the_others() -> None:
    save = barrier(30, (16, "save"))
    case = play(same(3, [*DDP, backward(), barrier(31)], r0=[*DDP, backward(), save, barrier(31)]))
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
    assert finding.waiting == (), "rank 0 waits too, by its own doing"
    assert finding.sentence.startswith("Only rank 0 calls `barrier` (line 16); ranks 1")
    assert finding.sentence.endswith(" call `barrier` (line 31)") and lines_of(finding) == [16, 31]
    assert any("collective 3" in line for line in finding.evidence)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_barrier_of_rank_0_alone_in_the_middle_of_training(size: int) -> None:
    save = [*DDP, backward(), backward(), barrier(28, (16, "save")), backward(), backward()]
    case = play(same(size, [*DDP, *[backward()] * 4], r0=save))
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
    assert finding.waiting == tuple(range(1, size))


@pytest.mark.parametrize("size", [2, 3])
def test_a_collective_of_rank_0_alone_after_all_others_are_through(size: int) -> None:
    body = [*DDP, backward(), backward()]
    case = play(same(size, body, r0=[*body, all_reduce(40)]))
    assert found(case) == [("conditional-collective", (0,))]


def test_half_of_the_ranks_reach_a_collective_under_a_condition() -> None:
    some = [all_reduce(5), all_reduce(8), all_reduce(9)]
    rest = [all_reduce(5), all_reduce(9)]
    case = play({0: some, 1: rest, 2: some, 3: rest})
    assert found(case) == [("conditional-collective", (0, 2))]


def test_most_ranks_reach_it_and_one_does_not() -> None:
    program = [all_reduce(5), op("all_gather", 8), op("broadcast", 9, root=0)]
    case = play(same(4, program, r2=[program[0], program[2]]))
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (2,))
    assert finding.sentence.startswith("Rank 2 skips the `all_gather` of ranks 0")
    assert finding.sentence.endswith(", and is waiting in `broadcast`")
    assert lines_of(finding) == [8, 9]


VALIDATES = """\
def validate():
    dist.all_reduce(right)
for i in range(9):
    step(i)
    if rank == 0:
        print(validate())
dist.barrier()
"""


@pytest.mark.parametrize(
    ("line", "moved"),
    [("print(validate())", "validate"), ("print(check())", "all_reduce"), ("", "all_reduce")],
)
def test_a_function_of_the_users_that_a_condition_decides_is_what_is_to_be_moved(
    line: str, moved: str
) -> None:
    path = (Place("train.py", 6, "", line), Place("train.py", 2, "validate"))
    checks, end = replace(all_reduce(2), path=path), barrier(7)
    case = play(same(3, [backward(4), end], r0=[backward(4), checks, end]))
    finding = the_one(case, {"train.py": VALIDATES})
    assert finding.remedy == f"Call `{moved}` on every rank: move it out of `if rank == 0`."
    assert finding.cause.startswith(f"Only rank 0 calls `{moved}`")
    assert lines_of(finding) == [2, 7], "where the collective is called"


def test_a_call_behind_a_return_of_some_ranks_is_to_be_moved_before_it() -> None:
    code = "def save():\n    if rank != 0:\n        return\n    dist.barrier()\nsave()\n"
    case = play({0: [barrier((5, ""), (4, "save"))], 1: [], 2: []})
    finding = the_one(case, {"train.py": code})
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
    assert finding.remedy == (
        "Call `barrier` on every rank: no rank may leave before it by `if rank != 0: return`."
    )


def test_backticks_in_the_users_code_make_up_no_command() -> None:
    code = "for i in range(9):\n    step(i)\n    if tag == '`%ddp_abort`' or rank == 0:\n"
    code += "        dist.barrier()\ndist.all_reduce(x)\n"
    case = play(same(3, [backward(2), all_reduce(5)], r0=[backward(2), barrier(4), all_reduce(5)]))
    finding = the_one(case, {"train.py": code})
    assert "%ddp_abort" in finding.remedy and not finding.commands


def test_a_condition_in_the_code_is_named() -> None:
    code = "import x\nfor i in range(9):\n    step(i)\n    if rank == 0:\n        evaluate()\n"
    case = play(same(2, [backward(3), backward(3)], r0=[backward(3), all_reduce(5), backward(3)]))
    finding = the_one(case, {"train.py": code})
    assert finding.ranks == (0,)
    assert finding.remedy == "Call `all_reduce` on every rank: move it out of `if rank == 0`."
    assert "train.py, line 4: if rank == 0:" in finding.evidence


def test_the_two_branches_of_a_condition_may_each_have_their_own_barrier() -> None:
    first = [barrier(5), all_reduce(9), all_reduce(10)]
    other = [barrier(7), all_reduce(9), all_reduce(10)]
    assert found(play({0: first, 1: other, 2: other})) == []
    assert found(play({0: first, 1: other})) == []
    # and they do not hide what goes wrong later
    case = play({0: [*first, barrier(20)], 1: other, 2: other})
    assert found(case) == [("conditional-collective", (0,))]


# -- loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_ran_out_of_batches(size: int) -> None:
    last = {f"r{size - 1}": [*DDP, *[backward()] * 2]}
    case = play(same(size, [*DDP, *[backward()] * 4], **last))
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.UNEVEN_INPUTS, (size - 1,))
    assert finding.waiting == tuple(range(size - 1))


def test_several_ranks_ran_out_of_batches_at_different_times() -> None:
    case = play(
        {0: [backward()] * 5, 1: [backward()] * 5, 2: [backward()] * 5, 3: [backward()] * 3}
    )
    assert found(case) == [("uneven-inputs", (3,))]


def test_a_batch_less_when_the_others_stand_in_the_last_of_several_buckets() -> None:
    buckets = [backward(20, (5,)), backward(20, (7,))]
    case = play(same(3, [*DDP, *buckets * 3], r2=[*DDP, *buckets * 2]))
    of, ranks = dict(case.collectives.of), list(case.ranks)
    for rank in (0, 1):
        number = len(of[rank])
        of[rank] = (*of[rank], replace(buckets[1], rank=rank, number=number, slot=number))
        ranks[rank] = replace(ranks[rank], waits_for=number)
    case = replace(case, ranks=tuple(ranks), collectives=replace(case.collectives, of=of))
    assert found(case) == [("uneven-inputs", (2,))]


def test_a_rank_without_any_batch() -> None:
    case = play(same(3, [*DDP, *[backward(4)] * 3], r2=DDP))
    assert found(case) == [("uneven-inputs", (2,))]
    assert found(case, {"train.py": LOOP}) == [("uneven-inputs", (2,))]


def test_a_loop_that_the_end_of_the_batches_leaves_is_a_loop_over_batches() -> None:
    code = "it = iter(data)\nwhile True:\n    try:\n        x = next(it)\n    {}: break\n    {}"
    case = play(same(3, [all_reduce(6)] * 4, r2=[all_reduce(6)] * 3))
    for handler, category in (
        ("except StopIteration", "uneven-inputs"),
        ("except OSError", "divergent-control-flow"),
    ):
        text = code.format(handler, "dist.all_reduce(x)")
        assert found(case, {"train.py": text}) == [(category, (2,))]


def test_one_rank_of_three_has_a_batch_more() -> None:
    case = play(same(3, [*DDP, *[backward()] * 3], r1=[*DDP, *[backward()] * 4]))
    assert found(case) == [("uneven-inputs", (1,))]


LOOP = """
for x in loader:
    loss = net(x)
    loss.backward()
dist.barrier()
"""


def test_past_the_loop_into_a_barrier_is_uneven_where_the_code_is_known() -> None:
    step, end = backward(4), barrier(5)
    case = play(same(3, [*[step] * 4, end], r2=[*[step] * 2, end]))
    assert found(case, {"train.py": LOOP}) == [("uneven-inputs", (2,))]
    case = play(same(3, [*[step] * 2, end], r2=[*[step] * 4, end]))
    assert found(case, {"train.py": LOOP}) == [("uneven-inputs", (2,))]
    case = play({0: [*[step] * 4, end], 1: [*[step] * 2, end]})
    assert found(case, {"train.py": LOOP}) == [("uneven-inputs", (1,))]


NAN = """
for i, x in enumerate(loader):
    loss = net(x)
    if not torch.isfinite(loss):
        continue
    loss.backward()
"""

STOP = """
for x in loader:
    loss = net(x)
    if loss < best:
        break
    loss.backward()
"""

EVERY_SECOND = """
for i, x in enumerate(loader):
    if i % 2 == 0:
        loss = net(x)
        loss.backward()
"""


@pytest.mark.parametrize(
    ("code", "line", "category"),
    [
        (SKIP, 7, "divergent-control-flow"),
        (NAN, 6, "divergent-control-flow"),
        (STOP, 6, "divergent-control-flow"),
        (EVERY_SECOND, 5, "uneven-inputs"),
        (LOOP, 4, "uneven-inputs"),
        ("", 4, "uneven-inputs"),
        ("not python (", 4, "uneven-inputs"),
    ],
)
def test_a_way_around_the_line_in_the_loop_tells_a_skipped_step_from_a_missing_batch(
    code: str, line: int, category: str
) -> None:
    case = play(same(3, [*DDP, *[backward(line)] * 5], r1=[*DDP, *[backward(line)] * 4]))
    assert found(case, {"train.py": code}) == [(category, (1,))]


@pytest.mark.parametrize("rest", [[], [barrier(9)]])
@pytest.mark.parametrize(("forwards", "category"), [(5, "divergent-control-flow"), (4, None)])
def test_who_ran_as_many_forwards_had_as_many_batches(
    rest: list[Collective], forwards: int, category: str | None
) -> None:
    step = [backward(4)]
    case = play(same(3, [*DDP, *step * 5, *rest], r1=[*DDP, *step * 4, *rest]))
    counts = {0: (5, 5), 1: (forwards, 4), 2: (5, 5)}
    facts = {r: ReplicaFacts("m", forwards=f, backwards=b) for r, (f, b) in counts.items()}
    reports = tuple(with_facts(e, replicas=(facts[e.rank],)) for e in case.ranks)
    told = found(replace(case, ranks=reports), {"train.py": LOOP})
    assert told == [(category or "uneven-inputs", (1,))]


def test_a_step_left_out_in_a_loop_of_several_collectives() -> None:
    step = [all_reduce(5), op("all_gather", 6)]
    case = play(same(3, step * 4, r1=[*step, *step, step[0], *step]))
    assert found(case) == [("divergent-control-flow", (1,))]


def test_of_two_ranks_the_one_that_breaks_the_habit_of_the_loop() -> None:
    step = [all_reduce(5), op("all_gather", 6)]
    case = play({0: step * 4, 1: [*step, *step, step[0], *step]})
    assert found(case) == [("divergent-control-flow", (1,))]


# -- what meets in one slot ----------------------------------------------------------------


def test_a_shorter_batch_in_an_all_gather() -> None:
    case = play(
        same(3, [op("all_gather", 14, shape=(8, 2))], r2=[op("all_gather", 14, shape=(5, 2))])
    )
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.SHAPE_MISMATCH, (2,))
    assert finding.cause.startswith("Rank 2 passed float32 [5, 2] to `all_gather`, ranks 0")
    assert finding.cause.endswith(" float32 [8, 2]") and lines_of(finding) == [14, 14]


def test_a_rank_that_died_of_a_shape_mismatch_is_not_blamed_for_dying() -> None:
    case = play(
        same(3, [op("all_gather", 14, shape=(8,))], r2=[op("all_gather", 14, shape=(5,))]),
        {0: died(-6), 1: raised("op.preamble.length <= op.nbytes. 64 vs 40", "RuntimeError")},
    )
    assert found(case) == [("shape-mismatch", (2,))]


def test_without_a_majority_all_ranks_are_named_whose_shapes_differ() -> None:
    """A last batch that is shorter than all before it is not the wrong one for that."""
    usual, last = op("all_gather", 14, shape=(8,)), op("all_gather", 14, shape=(5,))
    both = [("shape-mismatch", (0, 1))]
    assert found(play({0: [usual, usual, last], 1: [usual] * 3})) == both
    assert found(play({0: [usual] * 3, 1: [usual, usual, last]})) == both
    assert found(play({0: [last], 1: [usual]})) == both


def test_of_two_ranks_the_one_to_which_the_code_gives_a_shape_of_its_own_is_named() -> None:
    code = "batch = load()\nif rank == 0:\n    batch = batch[:5]\ndist.all_gather(out, batch)\n"
    calls = [
        replace(
            op("all_gather", 4, shape=shape),
            path=(Place("train.py", 4, "", "dist.all_gather(out, batch)"),),
        )
        for shape in ((5,), (8,))
    ]
    case = play({0: calls[:1], 1: calls[1:]})
    assert found(replace(case, sources={"train.py": code})) == [("shape-mismatch", (0,))]


def test_every_rank_with_a_length_of_its_own_carries_the_same_mistake() -> None:
    case = play({rank: [op("all_gather", 14, shape=(rank + 3,))] for rank in range(3)})
    assert found(case) == [("shape-mismatch", (0, 1, 2))]


@pytest.mark.parametrize(
    ("odd", "category", "words"),
    [
        ({"dtype": "int32"}, "dtype-mismatch", "Rank 1 passed int32 to `all_reduce`, "),
        ({"reduce_op": "MAX"}, "op-mismatch", "Rank 1 called `all_reduce` with `op=MAX`, "),
        ({"shape": (2, 4), "numel": 8}, "shape-mismatch", "Rank 1 passed float32 [2, 4] to"),
        ({"numel": 9, "tensors": 2}, "shape-mismatch", "Rank 1 passed 9 elements in 2 tensors"),
    ],
)
def test_silent_mismatches_are_found_though_nobody_waits(
    odd: dict[str, object], category: str, words: str
) -> None:
    usual = all_reduce(14, shape=(4, 2))
    finding = the_one(play(same(3, [usual], r1=[replace(usual, **odd)])))  # type: ignore[arg-type]
    assert (str(finding.category), finding.ranks) == (category, (1,))
    assert words in finding.cause


def test_another_root_and_another_operation_at_one_line() -> None:
    case = play(same(3, [op("broadcast", 7, root=0)], r2=[op("broadcast", 7, root=2)]))
    assert found(case) == [("op-mismatch", (2,))]
    case = play(same(3, [op("all_gather", 7)], r2=[op("all_reduce", 7, api="all_gather")]))
    assert found(case) == [("op-mismatch", (2,))]


def test_a_tensor_of_one_element_may_have_any_shape() -> None:
    assert found(play({0: [all_reduce(3, shape=())], 1: [all_reduce(3, shape=(1,))]})) == []


def test_all_to_all_and_objects_may_differ_in_size() -> None:
    assert found(play({r: [op("all_to_all", 3, shape=(r + 1,))] for r in range(3)})) == []


def test_a_collective_that_was_refused_names_the_rank_that_does_not_match() -> None:
    usual, odd = all_reduce(9, shape=(8,)), all_reduce(9, shape=(5,))
    refused = "slot 0 of rank 1 does not match"
    for victims in ((0, 1, 2), (1,), (0, 2)):
        case = play(same(3, [usual], r1=[odd]))
        for rank in victims:
            case = refuse(case, rank, refused)
        assert found(case) == [("shape-mismatch", (1,))], victims


TRAIN = """
def train(net, batches):
    for x in batches:
        try:
            net(x).sum().backward()
        except RuntimeError:
            skipped += 1

skipped = train(net, batches)
dist.all_reduce(skipped)
"""


def test_a_rank_that_is_past_a_loop_in_a_function_is_not_alone_in_what_comes_next() -> None:
    step, end = all_reduce(9, (5, "train"), api="backward"), all_reduce(10, shape=())
    case = play(same(2, [*[step] * 4, end], r1=[*[step] * 3, end]))
    finding = the_one(case, {"train.py": TRAIN})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert "Rank 1 left the loop" in finding.cause and 10 in lines_of(finding)
    assert "train.py, line 6, in train: except RuntimeError:" in finding.evidence
    # A call of one rank alone that follows the loop is still that.
    code = TRAIN.replace("dist.all_reduce(skipped)", "if rank == 1: dist.all_reduce(skipped)")
    case = play(same(2, [step] * 4, r1=[*[step] * 3, end]))
    assert found(case, {"train.py": code}) == [("conditional-collective", (1,))]


EPOCHS = """
for epoch in range(2):
    for x in data:
        net(x).sum().backward()
    dist.all_gather_object(parts, mine)
    log(values)
dist.barrier()

def log(values):
    for name in values:
        dist.all_reduce(values[name])
"""


def test_ranks_that_have_all_left_a_loop_did_not_part_in_it() -> None:
    train = [*[backward(4)] * 3, op("all_gather_object", 5, dtype="uint8")]
    logged = all_reduce(6, (11, "log"), label="accuracy")
    case = play(same(3, [*train, *train, barrier(7)], r0=[*train, logged, *train, barrier(7)]))
    finding = the_one(case, {"train.py": EPOCHS})
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
    assert "Only rank 0 calls `all_reduce` ('accuracy')" in finding.cause
    assert 11 in lines_of(finding)
    # With a batch less in the same place it is the batch.
    short = [*train[1:], logged, *train, barrier(7)]
    case = play(same(3, [*train, logged, *train, barrier(7)], r0=short))
    finding = the_one(case, {"train.py": EPOCHS})
    assert (finding.category, finding.ranks) == (Category.UNEVEN_INPUTS, (0,))
    every = play(same(3, [*train, logged, *train, barrier(7)]))
    assert found(every, {"train.py": EPOCHS}) == []


WRITER = """
for step in range(4):
    dist.all_reduce(loss)
    if step % 2:
        flush(rows)
dist.all_reduce(total)

def flush(rows):
    if not rows:
        return
    dist.monitored_barrier()
"""


def test_a_rank_that_leaves_a_turn_early_has_not_had_fewer_batches() -> None:
    step, flush = all_reduce(3, shape=()), op("monitored_barrier", 5, (11, "flush"))
    half, end = [step, step, flush], all_reduce(6, shape=(2,))
    case = play(same(4, [*half, *half, end], r1=[*half, step, step, end]))
    finding = the_one(case, {"train.py": WRITER})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert "left the loop in mid-iteration" in finding.cause
    assert "a flag for `if not rows: return`" in finding.remedy
    assert "train.py, line 9, in flush: if not rows:" in finding.evidence
    # The same where it has finished.
    case = play(same(4, [*half, *half], r1=[*half, step, step]))
    finding = the_one(case, {"train.py": WRITER})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    # A whole turn less is one: it is past the loop before the first call of the turn.
    case = play(same(4, [*half, *half, end], r1=[*half, end]))
    finding = the_one(case, {"train.py": WRITER})
    assert (finding.category, finding.ranks) == (Category.UNEVEN_INPUTS, (1,))
    assert found(play(same(4, [*half, *half, end])), {"train.py": WRITER}) == []


def test_a_rank_that_leaves_the_loop_has_not_skipped_an_iteration() -> None:
    code = "for x in data:\n  net(x).backward()\n  if good(x):\n    sys.exit()\n"
    step = backward(2)
    finding = the_one(play(same(2, [step] * 5, r0=[step] * 3)), {"train.py": code})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (0,))
    assert "Rank 0 left the loop" in finding.cause and "`if good(x)`" in finding.remedy


def test_one_line_for_many_tensors_tells_whose_tensor_each_rank_is_at() -> None:
    code = "for p in params:\n  if p.grad is not None:\n    dist.all_reduce(p.grad)\n"
    many = [all_reduce(3, shape=(size,)) for size in (5, 6, 7)]
    first = [*many, many[0]]
    case = play(
        same(3, [*first, refused(many[1])], r1=[*first, refused(many[2])]),
        {rank: raised("all_reduce does not match", "Mismatch") for rank in range(3)},
    )
    finding = the_one(case, {"train.py": code})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert "Rank 1 calls `all_reduce` of [7] in the loop" in finding.cause
    assert finding.cause.endswith("call `all_reduce` of [6]")


def test_one_line_for_many_tensors_is_another_order_where_the_loop_leaves_none_out() -> None:
    many = [all_reduce(2, shape=(size,)) for size in (12, 3, 120, 40)]
    ends = {rank: raised("all_reduce does not match", "Mismatch") for rank in range(3)}
    case = play(same(3, many, r1=[many[2], many[3]]), ends)
    code = "for p in params:\n  dist.all_reduce(p.grad, async_op=True)\n"
    finding = the_one(case, {"train.py": code})
    assert (finding.category, finding.ranks) == (Category.MISMATCHED_ORDER, (1,))
    assert "Rank 1 calls `all_reduce` of [120] in the loop" in finding.cause
    assert finding.cause.endswith("call `all_reduce` of [12]")
    code = "for p in params:\n  if p.grad is not None: dist.all_reduce(p.grad, async_op=True)\n"
    assert found(case, {"train.py": code}) == [("divergent-control-flow", (1,))]


FINISH = """
def meet_first(x):
    dist.barrier()
    dist.all_reduce(x)
def reduce_first(x):
    dist.all_reduce(x)
    dist.barrier()
finish = reduce_first if rank == 2 else meet_first
finish(x)
"""


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_three_calls_in_whatever_other_order_are_another_order(order: tuple[int, ...]) -> None:
    calls = [all_reduce(line, shape=(4,)) for line in (5, 6, 7)]
    case = play(same(3, calls, r0=[calls[index] for index in order]))
    assert found(case) == [("mismatched-order", (0,))]


def test_two_functions_that_are_called_at_one_line_may_have_another_order() -> None:
    usual = [barrier(9, (3, "meet_first")), all_reduce(9, (4, "meet_first"))]
    odd = [all_reduce(9, (6, "reduce_first")), barrier(9, (7, "reduce_first"))]
    finding = the_one(play(same(3, usual, r2=odd)), {"train.py": FINISH})
    assert (finding.category, finding.ranks) == (Category.MISMATCHED_ORDER, (2,))
    assert finding.sentence.startswith("Rank 2 calls `all_reduce` first; ranks 0")
    assert finding.sentence.endswith(" call `barrier` first")
    once = FINISH.replace("    dist.barrier()\nfinish", "    pass\nfinish")
    case = play(same(3, usual, r2=odd[:1]))
    assert found(case, {"train.py": once}) != [("mismatched-order", (2,))], "it has no barrier"


def _handles(case: Case, *ranks: int, kind: str = "ValueError", text: str = "bad") -> Case:
    error = ThreadError("main", kind, text, places((9, "train")))
    reports = (replace(e, handles=error) if e.rank in ranks else e for e in case.ranks)
    return replace(case, ranks=tuple(reports))


def test_a_rank_that_raised_and_waits_in_its_finally() -> None:
    step = backward(12)
    case = play(same(2, [step] * 4, r1=[*[step] * 2, barrier(21)]))
    finding = the_one(_handles(case, 1))
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1,))
    title = "Rank 1 raised ValueError, then called `barrier`; rank 0 is waiting in `backward`"
    assert finding.sentence == title
    assert finding.evidence[0].startswith("rank 1 raised ValueError: bad at train.py")
    ends = {1: raised("barrier does not match", "Mismatch")}
    refusing = play(same(2, [step] * 4, r1=[*[step] * 2, refused(barrier(21))]), ends)
    assert found(_handles(refusing, 1)) == [("exception-on-one-rank", (1,))]
    # Another rank lost its connection to that one, and comes to the same lines after it.
    out = [step, step, refused(barrier(21))]
    three = play(same(3, [step] * 3, r1=out, r2=out), {1: ends[1], 2: ends[1]})
    dragged = _handles(three, 2, kind="RuntimeError", text="Connection closed by peer")
    assert found(_handles(dragged, 1))[0] == ("exception-on-one-rank", (1,))
    for other in (
        _handles(case, 0, 1),  # both handle one
        _handles(case, 1, kind="Mismatch"),
        _handles(case, 1, kind="RuntimeError", text="Connection closed by peer"),
    ):
        assert found(other) != [("exception-on-one-rank", (1,))]


def test_who_was_refused_and_then_comes_to_the_same_finally_was_there_before() -> None:
    step, out = all_reduce(12), barrier(21)
    own = [step, step, refused(step)]
    for ends in ([*own, refused(out)], [*own, out]):
        case = play(
            same(3, [step] * 4, r0=ends, r1=[step, step, out]),
            {0: raised("barrier does not match", "Mismatch")},
        )
        blamed = _handles(case, 1)
        first = replace(blamed.ranks[0], handles=ThreadError("main", "Mismatch", "no match"))
        finding = the_one(replace(blamed, ranks=(first, *blamed.ranks[1:])))
        assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1,))
        assert any("`all_reduce`" in line for line in finding.evidence)


PASSES_OVER = """
def step(model, x):
    model(x).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
for x in loader:
    try:
        step(model, x)
    except {error}:
        {then}
dist.barrier()
"""


@pytest.mark.parametrize(
    ("error", "then", "category"),
    [
        ("Exception as e", "log.warning(e)", "divergent-control-flow"),
        ("ValueError", "continue", "divergent-control-flow"),
        ("ValueError", "raise", "uneven-inputs"),
        ("StopIteration", "break", "uneven-inputs"),
    ],
)
def test_a_turn_that_an_except_passes_over_is_no_lack_of_batches(
    error: str, then: str, category: str
) -> None:
    code = {"train.py": PASSES_OVER.format(error=error, then=then)}
    step, end = all_reduce(8, (5, "step")), barrier(11)
    past = play(same(3, [*[step] * 8, end], r1=[*[step] * 6, end]))
    ended = play(same(3, [step] * 8, r1=[step] * 6))
    for case in (past, ended):
        finding = the_one(case, code)
        assert (finding.category, finding.ranks) == (category, (1,))
        assert (f"train.py, line 9: except {error}:" in finding.evidence) == (category[0] == "d")


CLOSURE = """
def closure():
    loss = f(net(x)); loss.backward()
    dist.all_reduce(grad)
    return loss
for _ in range(3):
    opt.step({argument})
dist.barrier()
"""


@pytest.mark.parametrize(
    ("argument", "category"),
    [("closure", "divergent-control-flow"), ("closure()", "uneven-inputs")],
)
def test_an_optimizer_that_calls_its_closure_more_often_on_one_rank(
    argument: str, category: str
) -> None:
    code = {"train.py": CLOSURE.format(argument=argument)}
    step, end = all_reduce(7, (4, "closure")), barrier(8)
    past = play(same(2, [*[step] * 9, end], r1=[*[step] * 7, end]))
    finding = the_one(past, code)
    assert (finding.category, finding.ranks) == (category, (1,))
    assert ("train.py, line 7: opt.step(closure)" in finding.evidence) == (argument == "closure")
    assert ("`all_reduce` the loss" in finding.remedy) == (argument == "closure")
    ended = the_one(play(same(3, [step] * 9, r1=[step] * 7)), code)
    assert (ended.category, ended.ranks) == (category, (1,))


@pytest.mark.parametrize(("size", "raising"), [(3, (1, 2)), (4, (1, 2, 3)), (4, (2, 3)), (3, (2,))])
def test_ranks_that_raised_are_one_finding_though_they_are_the_most(
    size: int, raising: tuple[int, ...]
) -> None:
    step = backward(12)
    out = {f"r{rank}": [step, step, barrier(21)] for rank in raising}
    case = play(same(size, [step] * 4, **out))
    finding = the_one(_handles(case, *raising))
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, raising)
    # Two errors are two causes.
    first, *others = case.ranks
    error = ThreadError("main", "KeyError", "3", places((8, "load")))
    both = _handles(replace(case, ranks=(first, *others)), *raising[1:])
    reports = tuple(replace(e, handles=error) if e.rank == raising[0] else e for e in both.ranks)
    assert len(found(replace(both, ranks=reports))) == min(2, len(raising))


def test_a_rank_that_raised_and_runs_its_step_again_is_told_by_the_second_try() -> None:
    step = (forward(11), backward(12))
    case = play(same(2, [*step] * 3, r1=[*step, forward(11), forward(15), step[1]]))
    finding = the_one(_handles(case, 1))
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert "then tried again in `forward`" in finding.cause
    error = ThreadError("main", "OSError", "stale", places((3, "<module>"), (9, "load")))
    for lines, category in (
        (((5, "<module>"), (8, "load")), Category.DIVERGENT_CONTROL_FLOW),
        (((5, "<module>"), (30, "report")), Category.EXCEPTION_ON_ONE_RANK),
        (((3, "<module>"), (10, "load")), Category.EXCEPTION_ON_ONE_RANK),
    ):
        case = play(same(2, [all_reduce(40)], r1=[barrier(*lines)]))
        reports = (case.ranks[0], replace(case.ranks[1], handles=error))
        assert found(replace(case, ranks=reports)) == [(category, (1,))]
    # A traceback begins where the error is handled: here in the function that calls on the way out.
    case = play(same(2, [all_reduce(40)], r1=[barrier((3, "<module>"), (21, "train"))]))
    assert found(_handles(case, 1)) == [("exception-on-one-rank", (1,))]


def test_a_collective_in_a_finally_that_met_what_the_others_called() -> None:
    step, end = backward(12), barrier(21)
    case = play(
        same(2, [step, step, refused(step), end], r1=[step, step, end]),
        {
            0: raised("backward (all_reduce) does not match", "Mismatch"),
            1: with_facts(raised("bad", "ValueError"), error_at=places((9, "train"))),
        },
    )
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1,))
    assert "Rank 1 raised ValueError, then called a collective that does not" in finding.cause
    assert finding.evidence[0].startswith("rank 1 raised ValueError: bad at train.py")


def test_a_rank_that_leaves_a_layer_before_its_last_exchange() -> None:
    code = """
def layer(x):
    dist.all_to_all_single(counts, own)
    dist.all_to_all_single(inbox, x, got, own)
    if inbox.shape[0] == 0:
        return x
    dist.all_to_all_single(out, y, own, got)
for x in xs:
    layer(x)
"""
    counts = op("all_to_all_single", 9, (3, "layer"), dtype="int64", shape=(3,))
    there, back = (op("all_to_all_single", 9, (line, "layer")) for line in (4, 7))
    for same_dtype in (False, True):
        first = replace(counts, dtype="float32") if same_dtype else counts
        case = play(
            same(
                3,
                [first, there, back, first, there, refused(back)],
                r2=[first, there, back, first, there, refused(first)],
            ),
            {rank: raised("all_to_all_single does not match", "Mismatch") for rank in range(3)},
        )
        finding = the_one(case, {"train.py": code})
        assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (2,))
        assert "`if inbox.shape[0] == 0: return`" in finding.remedy


def test_a_forward_of_one_rank_alone_can_be_had_without_the_others() -> None:
    code = "\n" * 18 + "if rank == 0:\n    net(x)\n"
    case = play(same(2, [*DDP, backward(5)], r0=[*DDP, forward(20), backward(5)]))
    finding = the_one(case, {"train.py": code})
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
    assert "`model.module` under `torch.no_grad()`" in finding.remedy


# -- what an `except` leads around ---------------------------------------------------------

GIVES_UP = """
def run(path):
    dist.all_reduce(x)
    try:
        part = json.loads(path.read_text())
    except ValueError as error:
        {then}
    dist.barrier()
"""


@pytest.mark.parametrize("then", ["return None", "raise"])
def test_who_left_early_is_shown_the_except_that_may_have_let_it_go(then: str) -> None:
    reduce, wait = all_reduce(9, (3, "run")), barrier(9, (8, "run"))
    case = play({0: [reduce, wait], 1: [reduce]})
    finding = the_one(case, {"train.py": GIVES_UP.format(then=then)})
    assert (finding.category, finding.ranks) == ("early-exit", (1,))
    line = "train.py, line 6, in run: except ValueError as error:"
    assert (line in finding.evidence) == (then != "raise")


SKIPS = """
def one(step):
    try:
        x = read(step)
    except OSError as error:
        log(error)
        return
    dist.all_reduce(x)
for step in range(5):
    one(step)
dist.all_reduce(best)
"""


def test_a_call_that_an_except_leaves_before_its_reduction_is_no_lack_of_batches() -> None:
    step, end = all_reduce(10, (8, "one")), all_reduce(11, shape=(1,))
    case = play(same(3, [*[step] * 5, end], r1=[*[step] * 4, end]))
    finding = the_one(case, {"train.py": SKIPS})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert "train.py, line 5, in one: except OSError as error:" in finding.evidence


ENDS = """
def one(batches):
    try:
        x = next(batches)
    except StopIteration:
        return
    dist.all_reduce(x)
for _ in range(5):
    one(batches)
dist.all_reduce(best)
"""


def test_a_call_that_returns_at_the_end_of_the_batches_is_a_lack_of_batches() -> None:
    step, end = all_reduce(9, (7, "one")), all_reduce(10, shape=(1,))
    case = play(same(3, [*[step] * 5, end], r1=[*[step] * 4, end]))
    assert found(case, {"train.py": ENDS}) == [("uneven-inputs", (1,))]


BEGINS_AGAIN = """
def find(train, size):
    while True:
        try:
            return train(size)
        except RuntimeError as error:
            size //= 2
def train(size):
    model = DDP(net)
    for step in range(4):
        model(batch(size)).sum().backward()
find(train, 16)
"""


def test_a_rank_that_begins_all_of_its_training_again_is_told_by_the_except() -> None:
    inside = (12, (5, "find"))
    made = op("all_gather", *inside, (9, "train"), part=Part.CONSTRUCTOR)
    back = op("all_reduce", *inside, (11, "train"), part=Part.BACKWARD, shape=(9,))
    case = play(same(3, [made, back], r1=[made, made]))
    finding = the_one(case, {"train.py": BEGINS_AGAIN})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert "called `all_gather` again after an error" in finding.cause
    assert any("except RuntimeError as error:" in line for line in finding.evidence)


def test_layers_of_one_shape_do_not_pass_for_one_more_turn_of_their_loop() -> None:
    # The gradients of two alike layers, reduced one by one after a forward that reduces, too.
    inner = [all_reduce(46, shape=shape) for shape in [(6, 6), (6,), (6, 6), (6,)]]
    turn = [all_reduce(41, (19, "forward"), shape=(2,)), *inner]
    case = play(same(3, turn * 4, r1=[*turn * 3, *inner]))
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))


def test_a_message_that_is_too_long_is_told_once() -> None:
    case = play(
        {0: [message("send", 1, 5, shape=(9,))], 1: [message("recv", 0, 8, shape=(7,))]},
        {1: replace(died(-6), end=ProcessEnd(-6, "36 vs 28. Received data size doesn't match"))},
    )
    assert found(case) == [("p2p-mismatch", (0, 1))]


# -- all ranks raise at one line -----------------------------------------------------------


def _raised_with(line: str, function: str, *variables: dict[str, str]) -> Case:
    at = (Place("train.py", 5, function, line),)
    error = RankError("IndexError", "out of range", at)
    reports = (
        RankReport(rank, Activity.FAILED, error=replace(error, variables=own))
        for rank, own in enumerate(variables)
    )
    return Case(tuple(reports), collectives=play(same(2, [all_reduce(4)])).collectives)


def test_where_all_ranks_raise_at_one_line_the_variables_that_differ_are_named() -> None:
    own = [{"begin": "4", "n": "3", "other": "1"}, {"begin": "8", "n": "3", "other": "2"}]
    finding = the_one(_raised_with("row = table[begin + n]", "", *own))
    assert (finding.category, finding.ranks) == (Category.EXCEPTION, (0, 1))
    assert finding.evidence[2:] == ("`begin` is 4 on rank 0 and 8 on rank 1",)
    hidden = the_one(_raised_with("return pick(table)", "load", *own))
    assert any(line.startswith("`other`") for line in hidden.evidence), "those of the function"
    assert found(_raised_with("pick(table)", "", *own)) == [], "a program's globals say nothing"
    assert found(_raised_with("table[begin]", "", own[0], own[0])) == []


def test_ranks_that_raise_at_one_line_of_other_values_are_one_finding() -> None:
    case = play(
        same(3, [all_reduce(8)], r1=[], r2=[]),
        {
            rank: with_facts(
                raised(f"no key {rank}", "KeyError"), error_at=(Place("train.py", 5, "", "d[k]"),)
            )
            for rank in (1, 2)
        },
    )
    assert found(case) == [("exception-on-one-rank", (1, 2))]


def test_ranks_at_one_line_of_a_function_are_told_by_where_they_come_from() -> None:
    student, teacher = all_reduce(33, (22, "forward")), all_reduce(42, (22, "forward"))
    case = play(same(3, [student] * 4, r1=[student, student, replace(teacher, shape=(9,))]))
    finding = the_one(case)
    assert finding.ranks == (1,)
    ways = {side.ranks: [place.line for place in side.path] for side in finding.sides}
    assert ways == {(1,): [42, 22], (0, 2): [33, 22]}
