"""The benchmark on real gloo ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddp_notebook.bench.plan import DTYPE_BYTES, OP_NAMES, Plan
from ddp_notebook.bench.result import BenchRun
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import codec
from ddp_notebook.session import BenchOptions, BenchResult, InitOptions, Session

SHORT = Plan(max_bytes=2**20, factor=64, budget_s=1.0)
"""4 B, 256 B, 16 KiB, 1 MiB."""
BAD_BYTES = 16 * 2**10
"""The size that rank 1 gets wrong."""

_REPLACE = """
kept_all_reduce = dist.all_reduce
def replaced(tensor, *args, **named):
    import time
    real = kept_all_reduce
{body}
dist.all_reduce = replaced
"""
_RESTORE = "dist.all_reduce = kept_all_reduce"


@contextlib.contextmanager
def planted(session: Session, body: str, ranks: tuple[int, ...] | None = None) -> Iterator[None]:
    """Meanwhile `dist.all_reduce` is what `body` says on `ranks`; ``real`` is torch's."""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    session.run_cell(_REPLACE.format(body=indented), ranks).raise_for_error()
    try:
        yield
    finally:
        session.run_cell(_RESTORE, ranks).raise_for_error()


def values(session: Session, expression: str) -> dict[int, Any]:
    """What an expression is on each rank."""
    session.run_cell(f"asked = {expression}").raise_for_error()
    return dict(session.pull("asked"))


# -- what is measured --------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), tuple(sorted(DTYPE_BYTES))[3:]])
def test_every_operation_gives_exactly_what_it_must(
    ranks2: Session, dtypes: tuple[str, ...]
) -> None:
    plan = Plan(OP_NAMES, dtypes, min_bytes=64, max_bytes=2**22, factor=2**16, budget_s=0)
    run = ranks2.bench(plan)
    assert {(c.op, c.dtype) for c in run.curves if c.op != "barrier"} == {
        (op, dtype) for op in OP_NAMES if op != "barrier" for dtype in dtypes
    }
    assert [c.points[0].size_bytes for c in run.curves if c.op == "barrier"] == [0]
    for curve in run.curves:
        assert all(p.wrong == 0 and p.latency_us > 0 for p in curve.points), curve


def test_the_ranks_agree_and_every_rank_stamps_every_iteration(ranks2: Session) -> None:
    run = ranks2.bench(SHORT)
    assert [p.size_bytes for p in run.points] == list(SHORT.sizes())
    for point in run.points:
        assert point.samples is not None
        assert [len(times) for times in point.samples.times_ns] == [point.iterations] * 2
        assert sum(point.samples.rounds) == point.iterations
        low, high = point.latency_interval_us
        assert low <= point.latency_us <= high
    assert run.conditions.seconds > 0
    assert run.versions["torch"]


def test_parts_of_the_ranks_and_worlds_of_several_sizes(ranks4: Session) -> None:
    run = ranks4.bench(SHORT, BenchOptions(ranks=(1, 3)))
    assert run.curves[0].ranks == (1, 3)
    sizes = Plan(max_bytes=2**16, factor=2**14, world_sizes=(2, 4), budget_s=1.0)
    run = ranks4.bench(sizes)
    assert [curve.ranks for curve in run.curves] == [(0, 1), (0, 1, 2, 3)]
    assert all(p.wrong == 0 for curve in run.curves for p in curve.points)
    ranks4.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 4").raise_for_error()
    # torch names a group by how many there were, and some ranks had more of ours.
    ranks4.run_cell("dist.barrier(dist.new_group([0, 1, 2, 3]))").raise_for_error()


def test_pipelined_collectives_are_right_too(ranks2: Session) -> None:
    run = ranks2.bench(
        Plan(modes=("blocking", "pipelined"), max_bytes=2**16, factor=2**14, budget_s=0)
    )
    assert [curve.mode for curve in run.curves] == ["blocking", "pipelined"]
    assert all(p.wrong == 0 for curve in run.curves for p in curve.points)


def test_what_is_timed_is_torchs_own_group(ranks2: Session) -> None:
    body = "seen = globals().setdefault('groups', set())\nseen.add(type(named['group']).__name__)\n"
    with planted(ranks2, body + "return real(tensor, *args, **named)"):
        ranks2.bench(Plan(max_bytes=16, factor=4, budget_s=0))
    assert set(map(tuple, values(ranks2, "sorted(groups)").values())) == {("ProcessGroup",)}
    assert "ObservedGroup" in values(ranks2, "type(dist.group.WORLD).__name__").values()


# -- what is planted is found ------------------------------------------------------------


def test_a_wrong_result_is_caught_at_the_size_it_happens_at(ranks2: Session) -> None:
    body = (
        "work = real(tensor, *args, **named)\n"
        f"if tensor.nbytes == {BAD_BYTES} and not named.get('async_op'):\n"
        "    tensor[-1] += 1\n"
        "return work"
    )
    with planted(ranks2, body, (1,)):
        run = ranks2.bench(SHORT)
    wrong = {p.size_bytes: p.wrong for p in run.points if p.wrong}
    assert set(wrong) == {BAD_BYTES}
    assert run.notes[0].startswith("all_reduce gave wrong results")
    assert all(p.wrong == 0 for p in ranks2.bench(SHORT).points)


@pytest.mark.alone
def test_a_rank_that_is_2_ms_late_is_found_and_named(ranks4: Session) -> None:
    body = "time.sleep(0.002)\nreturn real(tensor, *args, **named)"
    with planted(ranks4, body, (2,)):
        (curve,) = ranks4.bench(Plan(max_bytes=2**16, factor=16, budget_s=2.0)).curves
    assert curve.straggler == 2
    assert curve.straggler_late_us > 1500
    assert all(p.latency_us > 2000 for p in curve.points)


# -- bad input ---------------------------------------------------------------------------


def test_more_memory_than_there_is_is_refused_with_the_size_that_fits(ranks2: Session) -> None:
    with pytest.raises(UsageMistake, match=r"What fits: --max \d+[GMK]"):
        ranks2.bench(Plan(max_bytes=2**46))
    assert ranks2.record.snapshot.ready


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (Plan(world_sizes=(2, 9)), BenchOptions(), "--world-sizes 9: there are 2 ranks"),
        (Plan(), BenchOptions(backend="nccl"), "NCCL moves data between GPUs only"),
        (Plan(), BenchOptions(device="cuda"), "started without GPUs"),
        (Plan(), BenchOptions(ranks=(0, 5)), "Rank 5 does not exist"),
    ],
)
def test_what_cannot_be_is_refused_before_it_begins(
    ranks2: Session, plan: Plan, options: BenchOptions, message: str
) -> None:
    with pytest.raises(UsageMistake, match=message):
        ranks2.bench(plan, options)


def test_what_the_backend_lacks_is_said_and_the_session_goes_on(ranks2: Session) -> None:
    with (
        planted(ranks2, "raise RuntimeError('Invalid scalar type')"),
        pytest.raises(
            UsageMistake, match=r"cannot measure this: ranks 0 and 1: .*Invalid scalar type"
        ),
    ):
        ranks2.bench(SHORT)
    assert ranks2.bench(SHORT).points


# -- ends before its time ----------------------------------------------------------------


class Meanwhile:
    """Does something once, when so many visits were heard of."""

    def __init__(self, act: Callable[[], None], after: int = 6) -> None:
        self._act, self._left = act, after

    def __call__(self, done: float, so_far: Callable[[], BenchRun]) -> None:
        self._left -= 1
        if not self._left:
            assert so_far().points
            self._act()


def test_an_interrupt_keeps_what_is_measured_and_the_session_goes_on(ranks2: Session) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    run = ranks2.bench(Plan(budget_s=300, precision=0), watch=Meanwhile(interrupt))
    assert "interrupted" in run.ended
    assert run.points
    assert time.monotonic() - began < 120
    ranks2.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 2").raise_for_error()
    assert ranks2.bench(SHORT).ended == ""


def test_a_rank_that_dies_is_named_and_what_was_measured_is_kept(session: Session) -> None:
    session.init(InitOptions(world_size=2, device="cpu"))
    pid = session.record.snapshot.ranks[1].pid
    run = session.bench(
        Plan(budget_s=300, precision=0), watch=Meanwhile(lambda: os.kill(pid, signal.SIGKILL))
    )
    assert run.ended.startswith("rank 1 died (exit code -9): %ddp_restart --ranks 1")
    assert run.points
    session.restart(None)
    assert session.bench(SHORT).ended == ""


# -- what it leaves ----------------------------------------------------------------------

_STATE = (
    "{'tensors': sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()), "
    "'groups': len(dist.distributed_c10d._world.pg_map), 'threads': torch.get_num_threads(), "
    "'random': torch.get_rng_state().sum().item(), 'grad': torch.is_grad_enabled(), "
    "'handler': str(signal.getsignal(signal.SIGINT))}"
)


def test_nothing_of_torch_is_changed_and_no_tensor_is_left(ranks2: Session) -> None:
    ranks2.run_cell("import gc, signal\ngc.collect()").raise_for_error()
    before = values(ranks2, _STATE)
    ranks2.bench(Plan(max_bytes=64, budget_s=0, world_sizes=(1, 2)))
    ranks2.run_cell("gc.collect()").raise_for_error()
    assert values(ranks2, _STATE) == before


def test_the_notebook_does_not_load_torch_for_it() -> None:
    code = (
        "import sys\n"
        "from ddp_notebook.session import InitOptions, Session\n"
        "from ddp_notebook.bench.plan import Plan\n"
        "session = Session()\n"
        "try:\n"
        "    session.init(InitOptions(world_size=2, device='cpu'))\n"
        "    assert session.bench(Plan(max_bytes=64, budget_s=0.1)).to_json()\n"
        "    print('torch' in sys.modules)\n"
        "finally:\n"
        "    session.shutdown()\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_a_result_says_how_it_was_run(ranks2: Session) -> None:
    run = ranks2.bench(SHORT)
    assert isinstance(run, BenchResult)
    assert (run.backend, run.device, run.world_size) == ("gloo", "cpu", 2)
    assert codec.decode(Plan, run.plan) == SHORT
