"""The guard refuses what does not match, and what is known of a rank from outside of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from observed import issued, run, waiting_for_a_cell
from results import rank_pids
from support import eventually

from ddp_notebook.bench.plan import Plan
from ddp_notebook.errors import Stuck
from ddp_notebook.model import Phase
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ranks(ranks4: Session) -> Iterator[Session]:
    with waiting_for_a_cell(ranks4):
        yield ranks4


# ------------------------------------------------------------------------------- the guard


MISMATCHES = {
    "a longer tensor": "x = torch.ones(32 if rank == 2 else 16)\ndist.all_reduce(x)",
    "as many elements in another shape": (
        "x = torch.ones((4, 4) if rank == 2 else (2, 8))\ndist.all_reduce(x)"
    ),
    "another dtype": (
        "x = torch.ones(4, dtype=torch.int32 if rank == 2 else torch.float32)\ndist.all_reduce(x)"
    ),
    "another reduction": (
        "op = dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM\n"
        "dist.all_reduce(torch.ones(4), op=op)"
    ),
    "another root": "dist.broadcast(torch.ones(4), src=1 if rank == 2 else 0)",
    "another operation": ("dist.barrier() if rank == 2 else dist.all_reduce(torch.ones(4))"),
    "a part that its receiver does not expect": (
        "sends = [1, 1, 1, 2] if rank == 2 else [1, 1, 1, 1]\n"
        "x, out = torch.ones(sum(sends), 3), torch.empty(4, 3)\n"
        "dist.all_to_all_single(out, x, [1, 1, 1, 1], sends)\n"
        "dist.barrier()"
    ),
    "a shorter piece": (
        "out = [torch.zeros(8) for _ in range(4)]\n"
        "dist.all_gather(out, torch.ones(5 if rank == 2 else 8))"
    ),
}


def test_dimensions_of_size_1_are_sent_as_torch_sends_them(ranks: Session) -> None:
    source = (
        "x = torch.ones(()) if rank == 2 else torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "y = torch.full((2, 1) if rank else (2,), float(rank + 3))\n"
        "dist.broadcast(y, 0)\n"
        "assert x == 4 and (y == 3).all()"
    )
    ranks.run_cell(source).raise_for_error()


@pytest.mark.parametrize("source", MISMATCHES.values(), ids=MISMATCHES)
def test_what_does_not_match_is_refused_and_every_rank_lives(ranks: Session, source: str) -> None:
    pids = rank_pids(ranks)
    ranks.run_cell("kept = 'kept'").raise_for_error()
    result = ranks.run_cell(source)
    assert result.error is not None
    records = {rank: each[-1] for rank, each in issued(ranks).of.items()}
    refused = {rank for rank, each in records.items() if each.phase is Phase.REFUSED}
    # Of those that were sent, none meets another: rank 2 alone, or some of the others.
    sent = set(records) - refused
    if "all_to_all" in source:  # ranks 2 and 3 alone disagree
        assert refused & {2, 3}
    else:
        assert refused and (2 not in sent or sent == {2})
    shown = "\n".join(item.text for group in result.tracebacks for item in group.items)
    assert "Mismatch" in shown and "It was blocked before sending" in shown
    ranks.abort()
    assert rank_pids(ranks) == pids
    assert ranks.pull("kept") == dict.fromkeys(range(4), "kept")
    ranks.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 4").raise_for_error()


LATE = """
import time
def come_last(late):
    group = dist.group.WORLD
    slot = group.ddp_notebook_group.seq_ids[0]
    words = [theirs for theirs, _ in group.ddp_notebook_group.checks[0].__self__._peers]
    while rank == late and any(each[slot % 1024 * 2] >> 40 != slot + 1 for each in words):
        time.sleep(0.01)
"""


def test_a_rank_that_was_refused_comes_again_and_meets_the_others(ranks: Session) -> None:
    found = run(
        ranks,
        f"{LATE}\n"
        "for i in range(3):\n"
        "    if i == 1:\n"
        "        come_last(2)\n"
        "    for size in (5, 8) if rank == 2 and i == 1 else (8,):\n"
        "        x = torch.full((size,), i + 1.0)\n"
        "        try:\n"
        "            dist.all_reduce(x)\n"
        "        except RuntimeError:\n"
        "            continue\n"
        "    assert x.tolist() == [4 * (i + 1.0)] * 8",
    )
    phases = [each.phase for each in found.of[2]]
    assert phases == [Phase.DONE, Phase.REFUSED, Phase.DONE, Phase.DONE]
    slots = {rank: [each.slot for each in of] for rank, of in found.of.items()}
    assert slots[2][1] == slots[2][2]
    assert {of[-1] for of in slots.values()} == {slots[0][-1]}
    assert not ranks.why().findings


def test_a_rank_that_goes_on_after_a_refusal_is_named_with_the_except(ranks: Session) -> None:
    result = ranks.run_cell(
        f"{LATE}\n"
        "for i in range(4):\n"
        "    if i == 1:\n"
        "        come_last(2)\n"
        "    try:\n"
        "        dist.all_reduce(torch.ones(5 if rank == 2 and i == 1 else 8))\n"
        "    except RuntimeError:\n"
        "        continue"
    )
    assert isinstance(result.error, Stuck) and result.diagnosis is not None, result.error
    (finding,) = result.diagnosis.findings
    assert (finding.category.value, finding.ranks) == ("divergent-control-flow", (2,))
    assert finding.waiting == (0, 1, 3)
    assert any("except RuntimeError:" in line for line in finding.evidence)


def test_what_may_differ_is_let_through(ranks: Session) -> None:
    run(
        ranks,
        "if rank == 0:\n"
        "    pieces = [torch.zeros(1) for _ in range(4)]\n"
        "else:\n"
        "    pieces = None\n"
        "dist.gather(torch.ones(1), pieces, dst=0)\n"
        "dist.all_gather_object([None] * 4, 'x' * (1 + rank * 100))\n"
        "box = [{'a': rank}] if rank == 1 else [None]\n"
        "dist.broadcast_object_list(box, src=1)\n"
        "assert box[0] == {'a': 1}",
    )


# ------------------------------------------------------------------- outside of the process


def test_what_a_killed_rank_issued_last_is_still_known(ranks: Session) -> None:
    pid = ranks.record.snapshot.ranks[1].pid
    result = ranks.run_cell(
        "dist.all_reduce(torch.ones(1))\n"
        "if rank == 1:\n"
        "    import os, signal\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()"
    )
    # What the others do first, raise or wait, decides which of two sentences it is.
    assert "SIGKILL" in str(result.error)
    found = issued(ranks)
    assert [each.operation for each in found.of[1]] == ["all_reduce"]
    assert [each.operation for each in found.of[0]] == ["all_reduce", "barrier"]
    assert pid != 0


def test_a_stopped_rank_is_read_without_being_asked(ranks: Session) -> None:
    run(ranks, "dist.all_reduce(torch.ones(1))")
    pid = ranks.record.snapshot.ranks[3].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert [each.operation for each in issued(ranks).of[3]] == ["all_reduce"]
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: ranks.record.snapshot.ready, 10, "the rank goes on")


def test_a_benchmark_measures_torch_and_not_us(ranks: Session) -> None:
    run(ranks, "dist.barrier()")
    assert ranks.bench(Plan(max_bytes=64, budget_s=0.5)).points
    assert [each.operation for each in issued(ranks).of[0]] == ["barrier"]
    run(ranks, "dist.barrier()")


def test_a_defect_of_the_observer_does_not_reach_the_users_code(ranks: Session) -> None:
    ranks.run_cell(
        "from ddp_notebook.rank import runtime\n"
        "observer = runtime.current().core.observer\n"
        "def broken(*_):\n"
        "    raise KeyError('a defect of ours')\n"
        "log, observer.call_sites.site = observer.log, broken\n"
        "try:\n"
        "    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n"
        "    assert x == 4 and 'a defect of ours' in observer.broken\n"
        "finally:\n"
        "    del observer.call_sites.site\n"
        "    observer.log, observer.broken = log, ''"
    ).raise_for_error()
