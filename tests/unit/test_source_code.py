"""What the code says about a line: conditions, loops, ways around it."""

from __future__ import annotations

from traces import all_reduce, barrier

from ddp_notebook.diagnosis.collectives.source_code import Sources

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
    found = known().condition(all_reduce(11))
    assert found is not None
    assert (found.test, found.on_rank) == ("i % 2", False)
    assert known().condition(barrier(16)) is None


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


def test_branches_of_one_condition() -> None:
    assert known().alternatives(barrier(13, (6, "save")), all_reduce(15))
    assert not known().alternatives(all_reduce(11), all_reduce(15))


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
