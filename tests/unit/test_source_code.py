"""What the code says about a line: conditions, loops, ways around it."""

from __future__ import annotations

import ast

import pytest
from traces import all_reduce, barrier

from ddp_notebook.diagnosis.source_code.sources import Sources

CODE = """%%ddp
def save(x):
    if dist.get_rank() != 0:
        return
    write(x)
    dist.barrier()

for i, x in enumerate(loader):
    loss = net(x)
    if i % 2:
        dist.all_reduce(loss)
    if rank == 0 and i:
        save(x)
    else:
        dist.all_gather(x)
dist.barrier()
"""


def known(code: str = CODE) -> Sources:
    """The code as train.py."""
    return Sources({"train.py": code})


def test_the_condition_that_asks_for_the_rank_is_the_one_to_name() -> None:
    found = known().condition(barrier(13, (6, "save")))
    assert found is not None
    assert (found.place.line, found.on_rank) == (3, True)
    assert found.place.text == "if dist.get_rank() != 0:"
    assert known().condition(all_reduce(11)) is None, "i is the same on all ranks"
    assert known().condition(barrier(16)) is None


LAMBDA = """
def mean(self):
    dist.all_reduce(x)
def note(self, make):
    if self.on:
        print(make())
for step in bar:
    if due(step):
        bar.note(lambda: f"{loss.mean}")
        bar.note(lambda: ready(x) and loss.mean())
"""


@pytest.mark.parametrize(("line", "asked"), [(9, 5), (10, 10)])
def test_what_stands_around_a_lambda_is_asked_before_it_is_called(line: int, asked: int) -> None:
    way = (line, (6, "note"), (line, "<lambda>"), (3, "mean"))
    found = known(LAMBDA).condition(all_reduce(*way))
    assert found is not None and found.place.line == asked


SAVE = """
ready = dist.is_available() and dist.is_initialized()
main = rank == 0
def on():
    \"\"\"Whether there is a job.\"\"\"
    if not dist.is_initialized():
        return False
    return True
def save(flag):
    if not dist.is_initialized():
        return
    if {test}:
        dist.barrier()
if __name__ == "__main__":
    if ready and on() and DISTRIBUTED and int(os.environ["WORLD_SIZE"]) > 1:
        save(x)
    dist.all_reduce(x)
"""


@pytest.mark.parametrize(
    "test",
    ["loss > 1", "rank == 0", "main", "not rank and flag", "is_main_process()", "len(batch) == 8"],
)
def test_a_main_guard_or_a_question_for_the_group_is_never_the_condition(test: str) -> None:
    record, there = barrier(16, (13, "save")), all_reduce(17)
    found = known(SAVE.format(test=test)).condition(record, there, (0,), (1, 2))
    assert found is not None
    assert found.quoted == f"if {test}:"
    for shared in ("ready", "on()", "world_size > 1", "dist.get_world_size() > 1", "torch.ready()"):
        found = known(SAVE.format(test=shared)).condition(record, there, (0,), (1, 2))
        assert (found is None) is (shared != "torch.ready()")


@pytest.mark.parametrize(
    ("outer", "inner", "told"),
    [
        ("rank < 2", "loss > 1", "inner"),  # rank 1 passed the outer one too
        ("rank in (0, 5)", "loss > 1", "outer"),
        ("rank == 0", "args.save", "outer"),
        ("dist.get_rank() % 4 == 0", "flag", "outer"),
        ("int(os.environ['RANK']) != 0", "loss > 1", "inner"),
        ("loss > 1", "step % 2 == 0", "outer"),
        ("loss > 1", "found", "inner"),
        ("args.save", "loss > 1", "inner"),
    ],
)
def test_of_nested_ifs_the_one_that_parts_these_ranks_is_named(
    outer: str, inner: str, told: str
) -> None:
    code = f"for step in range(9):\n  if {outer}:\n    if {inner}:\n      dist.barrier()\n"
    found = known(code).condition(barrier(4), None, (0,), (1, 2, 3))
    assert found is not None
    assert found.test == ast.unparse(ast.parse(outer if told == "outer" else inner))


@pytest.mark.parametrize(
    ("code", "quoted"),
    [
        ("dist.barrier() if rank == 0 else None", "if rank == 0"),
        ("None if rank else dist.barrier()", "else of if rank"),
        ("rank == 0 and dist.barrier()", "rank == 0 and …"),
        ("rank or dist.barrier()", "rank or …"),
        ("[dist.barrier() for x in xs if x.ok]", "if x.ok"),
        ("@rank_zero_only\ndef f():\n  dist.barrier()", "@rank_zero_only"),
        ("@torch.no_grad()\n@only_on(0, 1)\ndef f():\n  dist.barrier()", "@only_on(0, 1)"),
        ("match rank:\n  case 0:\n    dist.barrier()", "match rank: case 0"),
        ("if rank:\n  pass\nelse:\n  dist.barrier()", "else of if rank"),
        ("if a.x:\n  pass\nelif a.y:\n  dist.barrier()", "elif a.y:"),
        ("try:\n  f()\nexcept OSError:\n  dist.barrier()", "except OSError:"),
        ("def f(x):\n  if not x: return 3\n  dist.barrier()", "if not x: return"),
        ("for x in xs:\n  if x.bad:\n    continue\n  dist.barrier()", "if x.bad: continue"),
    ],
)
def test_every_way_in_which_code_asks_is_known(code: str, quoted: str) -> None:
    line = next(i for i, text in enumerate(code.splitlines(), 1) if "dist.barrier()" in text)
    found = known(code).condition(barrier(line), None, (0,), (1,))
    assert found is not None
    assert found.quoted == quoted


def test_a_filter_of_a_comprehension_is_a_way_around_its_line() -> None:
    record = all_reduce(1)
    assert known("[dist.all_reduce(x) for x in range(3) if x]").way_around(record) is None
    found = known("[dist.all_reduce(x) for x in range(3) if x or rank]").way_around(record)
    assert found is not None and found.quoted == "if x or rank"
    code = "@torch.no_grad()\ndef f():\n  dist.all_reduce(x)"
    assert known(code).condition(all_reduce(3)) is None, "a decorator for all ranks"


def test_a_question_for_the_group_is_no_way_around_a_line_of_a_loop() -> None:
    code = "for x in xs:\n    if dist.is_initialized():\n        dist.barrier()\n"
    assert known(code).way_around(barrier(3)) is None


def test_one_loop_or_past_it() -> None:
    assert known().in_one_loop(barrier(13, (6, "save")), all_reduce(11)) is True
    assert known().in_one_loop(barrier(16), all_reduce(11)) is False
    assert known().in_one_loop(all_reduce(11), barrier(16)) is None


def test_a_condition_on_the_loops_own_variable_is_the_same_on_all_ranks() -> None:
    code = "for i in range(9):\n    if i % 2:\n        continue\n    dist.barrier()\n"
    assert known(code).way_around(barrier(4)) is None
    code = code.replace("i % 2", "bad(i)")
    found = known(code).way_around(barrier(4))
    assert found is not None
    assert found.place.text == "if bad(i):"


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("len(batch) < 4: return", True),
        ("loss.item() > 3 * mean: return", True),
        ("scaler is not None: return", False),
        ("isinstance(batch, tuple): return", False),
        ("self.training: return", False),
        ("step % 10 == 0: return", False),
        ("dist.get_world_size() == 1: return", False),
    ],
)
def test_what_a_function_asks_of_its_data_is_a_way_around_for_the_loop_that_calls_it(
    test: str, found: bool
) -> None:
    step = f"def step(batch):\n    if {test}\n    dist.barrier()\n"
    code = step + "for batch in data:\n    step(batch)\n"
    way = known(code).way_around(barrier(5, (3, "step")))
    assert (way is not None) is found
    assert known(code.replace("for batch in data", "if True")).way_around(barrier(5)) is None


def test_branches_of_one_condition() -> None:
    assert known().alternatives(barrier(13, (6, "save")), all_reduce(15))
    assert not known().alternatives(all_reduce(11), all_reduce(15))


def test_a_comprehension_is_a_loop_too() -> None:
    code = "scores = [\n  net(x) for x in data\n]\ndist.all_reduce(n)\n"
    assert known(code).in_one_loop(all_reduce(4), all_reduce(1, (2, "<listcomp>"))) is False
    assert known(code).in_one_loop(all_reduce(4), all_reduce(2, api="forward")) is False
    code = "for x in y:\n  dist.all_reduce(cat([f(a) for a in x]))\n  dist.all_reduce(z)\n"
    assert known(code).in_one_loop(all_reduce(3), all_reduce(2)) is True, "it is not repeated"


@pytest.mark.parametrize(
    ("code", "quoted", "leaves"),
    [
        ("while loss.item() > goal:\n  dist.barrier()\n", "while loss.item() > goal:", True),
        ("while True:\n  dist.barrier()\n", "", False),
        ("for x in y:\n  dist.barrier()\n  if bad(x):\n    return\n", "if bad(x):", True),
        ("for x in y:\n  dist.barrier()\n  if bad(x):\n    continue\n", "if bad(x):", False),
        ("for x in y:\n  if bad(x):\n    dist.barrier()\n", "if bad(x):", False),
    ],
)
def test_what_leaves_a_loop_is_told_from_what_skips_an_iteration(
    code: str, quoted: str, leaves: bool
) -> None:
    line = next(i for i, text in enumerate(code.splitlines(), 1) if "barrier" in text)
    found = known(code).way_around(barrier(line))
    assert (found.quoted, found.leaves) == (quoted, leaves) if found else not quoted


def test_code_that_is_unknown_or_wrong_says_nothing() -> None:
    for sources in (Sources(), known("this is (not python")):
        record = barrier(3)
        assert not sources.knows(record)
        assert sources.condition(record) is None
        assert sources.way_around(record) is None
        assert sources.in_one_loop(record, barrier(9)) is None
        assert not sources.alternatives(record, barrier(9))
        assert not sources.swapped(record, barrier(9))
    assert not known().knows(barrier())


AGREED = """
def main():
    stop = worse(loss)
    dist.all_reduce(stop)
    while True:
        if stop.item() > 0:
            break
        dist.barrier()
"""


@pytest.mark.parametrize(
    ("old", "new", "may_differ"),
    [
        ("", "", False),
        ("all_reduce(stop)", "broadcast(stop, src=0)", False),
        ("all_reduce(stop)", "broadcast_object_list([stop], 0)", True),
        ("all_reduce(stop)", "all_reduce(stop, group=dp)", True),
        ("all_reduce(stop)", "reduce(stop, 0)", True),
        ("    while True:", "    stop = worse(loss)\n    while True:", True),
        ("if stop.item() > 0", "if bool(stop[0])", False),
        ("if stop.item() > 0", "if worse(stop)", True),
        ("if stop.item() > 0", "if stop.item() > limit(x)", True),
    ],
)
def test_what_a_collective_gave_every_rank_is_no_reason_to_part(
    old: str, new: str, may_differ: bool
) -> None:
    code = AGREED.replace(old, new) if old else AGREED
    line = next(i for i, text in enumerate(code.splitlines(), 1) if "dist.barrier()" in text)
    found = known(code).way_around(barrier((line, "main")))
    assert (found is not None) is may_differ


def test_a_value_that_is_agreed_on_later_may_differ_before() -> None:
    code = "for x in xs:\n  if bad(loss):\n    continue\n  dist.barrier()\n  dist.all_reduce(loss)"
    assert known(code).way_around(barrier(4)) is not None


FIT = """
def fit(data):
    for x in data:
        net(x).backward()

def main():
    for epoch in range(9):
        fit(data)
        if stopper(val):
            {leave}
    dist.barrier()
"""


@pytest.mark.parametrize("leave", ["break", "return", "sys.exit()", "os._exit(0)"])
def test_the_loop_around_the_call_of_a_loop_may_be_left(leave: str) -> None:
    record = all_reduce((8, "main"), (4, "fit"))
    found = known(FIT.format(leave=leave)).way_around(record)
    assert found is not None and found.quoted == "if stopper(val):"
    assert known(FIT.format(leave="print(1)")).way_around(record) is None


@pytest.mark.parametrize(("test", "leaves"), [("worse(x)", True), ("epoch < last", False)])
def test_a_loop_around_the_innermost_ends_by_its_own_test_if_that_is_asked(
    test: str, leaves: bool
) -> None:
    code = f"while {test}:\n  for p in params:\n    dist.all_reduce(p)\n"
    found = known(code).way_around(all_reduce(3))
    assert (found is not None and found.leaves) is leaves


def test_past_a_loop_in_a_function_that_was_called_before() -> None:
    sources, record = known(FIT), all_reduce((8, "main"), (4, "fit"))
    assert sources.in_one_loop(barrier((11, "main")), record) is False
    assert sources.in_one_loop(all_reduce((9, "main"), (20, "val")), record) is False
    assert sources.in_one_loop(all_reduce((7, "main")), record) is True, "before it, in one loop"
    either = known("if a:\n  fit(d)\nelse:\n  x()\ndef fit(d):\n  for x in d:\n    y()\n")
    assert either.in_one_loop(barrier(4), barrier(2, (7, "fit"))) is None, "another branch"
