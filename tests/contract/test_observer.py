"""What the observer writes down of real collectives, and what it refuses to send."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support import eventually

from ddp_notebook.bench.plan import Plan
from ddp_notebook.errors import Stuck
from ddp_notebook.model import Collective, Collectives, Part, Phase, Status
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ranks(ranks4: Session) -> Iterator[Session]:
    """Four ranks that wait for a cell, before and after."""
    dead = ranks4.record.snapshot.with_status(Status.DEAD)
    if dead:
        ranks4.restart(dead)
    if not ranks4.record.snapshot.ready:
        ranks4.abort()
    yield ranks4
    dead = ranks4.record.snapshot.with_status(Status.DEAD)
    if dead:
        ranks4.restart(dead)
    elif not ranks4.record.snapshot.ready:
        ranks4.abort()


def issued(session: Session) -> Collectives:
    """What the ranks issued in the last cell."""
    assert session.current is not None
    processes: Any = session._processes
    found: Collectives = processes.rings.read((0, 1, 2, 3), session.current.cell)
    return found


def run(session: Session, source: str) -> Collectives:
    session.run_cell(source).raise_for_error()
    return issued(session)


def short(record: Collective) -> tuple[Any, ...]:
    return (record.operation, record.shape, record.dtype, record.phase)


def test_a_collective_is_written_down_with_all_it_is_about(ranks: Session) -> None:
    found = run(
        ranks,
        "def step(x):\n"
        "    dist.all_reduce(x, op=dist.ReduceOp.MAX)\n"
        "step(torch.ones(2, 3, dtype=torch.int32))\n"
        "dist.broadcast(torch.ones(4), src=2)\n"
        "dist.barrier()",
    )
    for rank in range(4):
        reduced, sent, barrier = found.of[rank]
        assert short(reduced) == ("all_reduce", (2, 3), "int32", Phase.DONE)
        assert (reduced.reduce_op, reduced.numel, reduced.bytes) == ("MAX", 6, 24)
        assert [place.line for place in reduced.path] == [4, 3]
        assert reduced.path[1].function == "step"
        assert reduced.path[1].text == "dist.all_reduce(x, op=dist.ReduceOp.MAX)"
        assert (sent.operation, sent.root) == ("broadcast", 2)
        assert short(barrier) == ("barrier", (), "", Phase.DONE)
        assert [each.slot - reduced.slot for each in found.of[rank]] == [0, 1, 2]
        assert 0 < reduced.issued_ns <= reduced.done_ns <= sent.issued_ns
    assert found.groups["default"] == (0, 1, 2, 3)


def test_ddps_own_collectives_are_told_by_their_part(ranks: Session) -> None:
    found = run(
        ranks,
        "model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))\n"
        "for _ in range(2):\n"
        "    model(torch.ones(2, 4)).sum().backward()",
    )
    records = found.of[1]
    assert {each.part for each in records} == {Part.CONSTRUCTOR, Part.FORWARD, Part.BACKWARD}
    backward = [each for each in records if each.part is Part.BACKWARD]
    assert [short(each)[:3] for each in backward] == [("all_reduce", (28,), "float32")] * 2
    assert {(each.api, each.place.line if each.place else 0) for each in backward} == {
        ("backward", 4)
    }

    def all_done() -> bool:
        """It is torch's reducer that waits for them; they are seen to be done when it is asked."""
        assert not ranks.why().wrong
        return all(each.phase is Phase.DONE for each in issued(ranks).of[1])

    eventually(all_done, 10, "all collectives of DDP's own done")


def test_object_collectives_groups_and_messages_are_seen(ranks: Session) -> None:
    found = run(
        ranks,
        "everything = [None] * 4\n"
        "dist.all_gather_object(everything, rank)\n"
        "pair = dist.new_group([1, 3])\n"
        "if rank in (1, 3):\n"
        "    dist.all_reduce(torch.ones(1), group=pair)\n"
        "if rank == 0:\n"
        "    dist.send(torch.ones(5), 2, tag=7)\n"
        "if rank == 2:\n"
        "    dist.recv(torch.ones(5), 0, tag=7)\n"
        "dist.barrier()",
    )
    gathered = [each for each in found.of[0] if each.api == "all_gather_object"]
    assert gathered and all(each.operation == "all_gather" for each in gathered)
    (inside,) = [each for each in found.of[3] if each.group != "default"]
    assert found.groups[inside.group] == (1, 3)
    (sent,) = [each for each in found.of[0] if each.is_point_to_point]
    (got,) = [each for each in found.of[2] if each.is_point_to_point]
    assert (sent.operation, sent.peer, sent.tag, sent.numel) == ("send", 2, 7, 5)
    assert (got.operation, got.peer, got.tag) == ("recv", 0, 7)


def test_the_name_of_what_a_loop_reduces_is_its_label(ranks: Session) -> None:
    found = run(
        ranks,
        "def log(name, value):\n"
        "    dist.all_reduce(value)\n"
        "for key in ('loss', 'accuracy'):\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "log('precision', torch.ones(1))\n"
        "dist.all_reduce(torch.ones(1))",
    )
    assert [each.label for each in found.of[0]] == ["loss", "accuracy", "precision", ""]


def test_one_line_reached_from_two_is_told_by_the_way_it_was_reached(ranks: Session) -> None:
    found = run(
        ranks,
        "def step():\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "for _ in range(3):\n"
        "    step()\n"
        "    step()",
    )
    assert [[place.line for place in each.path] for each in found.of[1]] == [[5, 3], [6, 3]] * 3


IN_A_THREAD = """
import _thread, time
def send(x):
    # As autograd's own threads do on GPUs: no frame of Python's is under the call.
    _thread.start_new_thread(dist.group.WORLD.allreduce, ([x],))
    deadline = time.monotonic() + 20
    while x.item() != 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert x.item() == 4
send(torch.ones(1))
w = torch.ones(1, requires_grad=True)
w.register_hook(lambda _: send(torch.ones(1)))
w.sum().backward()
from ddp_notebook.agent import observer
assert not observer.observer.broken
"""


def test_a_thread_of_torchs_own_is_observed_and_its_bucket_belongs_to_the_backward(
    ranks: Session,
) -> None:
    alone, in_backward = run(ranks, IN_A_THREAD).of[0]
    assert (alone.path, alone.part) == ((), None)
    assert (in_backward.api, in_backward.part) == ("backward", Part.BACKWARD)
    assert [place.text for place in in_backward.path] == ["w.sum().backward()"]


def test_collectives_of_lists_are_looked_at_each_time(ranks: Session) -> None:
    found = run(
        ranks,
        "for size in (1, 2):\n"
        "    dist.all_gather([torch.zeros(size) for _ in range(4)], torch.ones(size))",
    )
    assert [each.shape for each in found.of[0]] == [(1,), (2,)]


def test_what_is_asynchronous_is_done_when_it_is_waited_for(ranks: Session) -> None:
    found = run(
        ranks,
        "works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]\n"
        "for work in works:\n"
        "    work.wait()",
    )
    assert [each.phase for each in found.of[2]] == [Phase.DONE] * 3


def test_a_group_that_the_observer_is_around_is_torchs_in_every_other_way(ranks: Session) -> None:
    run(
        ranks,
        "group = dist.group.WORLD\n"
        "assert isinstance(group, dist.ProcessGroup)\n"
        "assert dist.get_backend() == 'gloo' and dist.get_world_size() == 4\n"
        "assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]\n"
        "assert group.group_name == '0'\n"
        "gathered = [torch.zeros(1) for _ in range(4)]\n"
        "dist.all_gather(gathered, torch.tensor([float(rank)]))\n"
        "assert torch.cat(gathered).tolist() == [0, 1, 2, 3]\n"
        "flat = torch.zeros(4)\n"
        "dist.all_gather_into_tensor(flat, torch.tensor([float(rank)]))\n"
        "assert flat.tolist() == [0, 1, 2, 3]\n"
        "from torch.distributed import _functional_collectives as functional\n"
        "total = functional.all_reduce(torch.ones(2), 'sum', group)\n"
        "assert total.tolist() == [4, 4]\n"
        "parts = [torch.ones(1) * each for each in range(4)] if rank == 1 else None\n"
        "mine = torch.zeros(1)\n"
        "dist.scatter(mine, parts, src=1)\n"
        "assert mine.item() == rank\n"
        "there = [torch.zeros(2) for _ in range(4)] if rank == 3 else None\n"
        "dist.gather(torch.ones(2) * rank, there, dst=3)\n"
        "send = dist.P2POp(dist.isend, torch.ones(1) * rank, (rank + 1) % 4)\n"
        "box = torch.zeros(1)\n"
        "receive = dist.P2POp(dist.irecv, box, (rank - 1) % 4)\n"
        "for work in dist.batch_isend_irecv([send, receive]):\n"
        "    work.wait()\n"
        "assert box.item() == (rank - 1) % 4\n"
        "dist.monitored_barrier()\n"
        "half = dist.new_group([0, 1])\n"
        "if rank < 2:\n"
        "    dist.all_reduce(torch.ones(1), group=half)\n"
        "    dist.destroy_process_group(half)\n"
        "dist.barrier()",
    )


COALESCES = """
from types import SimpleNamespace
group = dist.group.WORLD
kind = type(group)
kept = kind._get_backend, kind._start_coalescing, kind._end_coalescing
told, works = [], []

def isend(*args, **named):
    told.append("isend")
    works.append(true_isend(*args, **named))

def irecv(*args, **named):
    told.append("irecv")
    works.append(true_irecv(*args, **named))

true_isend, true_irecv = dist.isend, dist.irecv
gone, box = torch.ones(1) * rank, torch.zeros(1)
ops = [
    dist.P2POp(dist.isend, gone, (rank + 1) % 4),
    dist.P2POp(dist.irecv, box, (rank - 1) % 4),
]
try:
    kind._get_backend = lambda self, device: SimpleNamespace(supports_coalescing=True)
    kind._start_coalescing = lambda self, device: told.append("start")
    kind._end_coalescing = lambda self, device: told.append("end") or "all of them"
    ops[0].op, ops[1].op = isend, irecv
    dist.isend = isend
    assert dist.batch_isend_irecv(ops) == ["all of them"]
finally:
    dist.isend = true_isend
    kind._get_backend, kind._start_coalescing, kind._end_coalescing = kept
for work in works:
    work.wait()
assert told == ["start", "isend", "irecv", "end"]
assert box.item() == (rank - 1) % 4
"""


def test_sends_of_a_backend_that_sends_together_go_as_one(ranks: Session) -> None:
    """NCCL does; here its part is played by gloo, which does not."""
    run(ranks, COALESCES)


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
    "a shorter piece": (
        "out = [torch.zeros(8) for _ in range(4)]\n"
        "dist.all_gather(out, torch.ones(5 if rank == 2 else 8))"
    ),
}


@pytest.mark.parametrize("source", MISMATCHES.values(), ids=MISMATCHES)
def test_what_does_not_match_is_refused_and_every_rank_lives(ranks: Session, source: str) -> None:
    pids = [state.pid for state in ranks.record.snapshot.ranks]
    ranks.run_cell("kept = 'kept'").raise_for_error()
    result = ranks.run_cell(source)
    assert result.error is not None
    records = {rank: each[-1] for rank, each in issued(ranks).of.items()}
    refused = {rank for rank, each in records.items() if each.phase is Phase.REFUSED}
    # Of those that were sent, none meets another: rank 2 alone, or some of the others.
    sent = set(records) - refused
    assert refused and (2 not in sent or sent == {2})
    shown = "\n".join(item.text for group in result.tracebacks for item in group.items)
    assert "Mismatch" in shown and "It was not sent" in shown
    ranks.abort()
    assert [state.pid for state in ranks.record.snapshot.ranks] == pids
    assert ranks.pull("kept") == dict.fromkeys(range(4), "kept")
    ranks.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 4").raise_for_error()


LATE = """
import time
def come_last(late):
    group = dist.group.WORLD
    slot = group.ddp_notebook_slots[0]
    words = [theirs for _, _, theirs in group.ddp_notebook_guard._peers]
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


def test_a_rank_that_goes_on_after_a_refusal_is_told_where_it_parted(ranks: Session) -> None:
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
    assert (finding.category.value, finding.ranks) == ("shape-mismatch", (2,))
    assert finding.waiting == (0, 1, 3)
    assert "was refused all_reduce" in finding.cause and "went on without it" in finding.cause


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
    assert "rank 1 died" in str(result.error)
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
        "from ddp_notebook.agent import observer\n"
        "def broken(*_):\n"
        "    raise KeyError('a defect of ours')\n"
        "kept, observer.sites.site = observer.sites.site, broken\n"
        "try:\n"
        "    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n"
        "    assert x == 4 and 'a defect of ours' in observer.observer.broken\n"
        "finally:\n"
        "    observer.sites.site, observer.observer.broken = kept, ''"
    ).raise_for_error()
