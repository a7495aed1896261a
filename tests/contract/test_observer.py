"""What the observer writes down of each collective, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from observed import issued, run, waiting_for_a_cell
from support import eventually

from ddp_notebook.errors import Stuck
from ddp_notebook.model import Collective, Part, Phase
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ranks(ranks4: Session) -> Iterator[Session]:
    with waiting_for_a_cell(ranks4):
        yield ranks4


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
    # Since torch 2.15 it gathers into one tensor.
    operations = {"all_gather", "all_gather_into_tensor"}
    assert gathered and all(each.operation in operations for each in gathered)
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
from ddp_notebook.rank import runtime
assert not runtime.current().core.observer.broken
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


def test_what_was_freed_by_an_abort_is_not_written_down_as_done(ranks: Session) -> None:
    """The board painted the time that the ranks waited for nobody as one long all_reduce."""
    cell = (
        "model = DDP(torch.nn.Linear(4, 4))\nif rank:\n    model(torch.ones(2, 4)).sum().backward()"
    )
    assert isinstance(ranks.run_cell(cell).error, Stuck)
    ranks.abort()
    *before, backward = [each for each in issued(ranks).of[1] if each.part is not None]
    assert (backward.part, backward.phase, backward.call.freed) == (
        Part.BACKWARD,
        Phase.FAILED,
        True,
    )
    assert {each.phase for each in before} == {Phase.DONE}


def test_a_group_that_the_observer_is_around_is_torchs_in_every_other_way(ranks: Session) -> None:
    run(
        ranks,
        "group = dist.group.WORLD\n"
        "assert isinstance(group, dist.ProcessGroup)\n"
        "assert dist.get_backend() == 'gloo' and dist.get_world_size() == 4\n"
        "assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]\n"
        "assert group.group_name == '0'\n"
        "assert (group.rank(), group.size()) == (rank, 4)\n"
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
        "    assert (half.rank(), half.size()) == (rank, 2)\n"
        "    dist.destroy_process_group(half)\n"
        "dist.barrier()",
    )


def test_a_recv_from_any_rank_is_written_down_with_the_rank_that_sent(ranks: Session) -> None:
    found = run(
        ranks,
        "if rank == 0:\n"
        "    for _ in range(3):\n"
        "        source = dist.recv(torch.zeros(8))\n"
        "        dist.recv(torch.zeros(2, dtype=torch.int64), source)\n"
        "else:\n"
        "    dist.send(torch.ones(8), 0)\n"
        "    dist.send(torch.ones(2, dtype=torch.int64), 0)\n"
        "dist.barrier()",
    )
    received = [each for each in found.of[0] if each.is_point_to_point]
    assert sorted(each.peer or 0 for each in received) == [1, 1, 2, 2, 3, 3]
    assert [each.peer for each in received[::2]] == [each.peer for each in received[1::2]]
    assert not ranks.why().findings


def test_threads_are_told_apart(ranks: Session) -> None:
    found = run(
        ranks,
        "import threading\n"
        "dist.barrier()\n"
        "for _ in range(2):\n"
        "    thread = threading.Thread(target=dist.barrier)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "dist.barrier()",
    )
    threads = [each.call.thread for each in found.of[0]]
    assert threads[0] == threads[3] == 0
    assert threads[1] > 0
    assert threads[2] > 0
    assert all(each.call.waited for each in found.of[0])


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
