"""A benchmark of training steps on two real ranks: what it finds, and what it leaves as it was."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import eventually
from wrapping import run, still_works

from ddp_notebook.bench.steps import StepBenchResult, StepPlan
from ddp_notebook.errors import DDPError, UsageMistake
from ddp_notebook.model import Status
from ddp_notebook.session import InitOptions, Session

NET = (
    "from torch import nn\n"
    "import random\n"
    "torch.manual_seed(0)\n"
    "net = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))\n"
)
SHORT: dict[str, Any] = {"batches": (4, 16), "budget_s": 120.0, "rounds": 2, "max_steps": 4}
"""The budget is more than any machine needs, so that what is run does not depend on its speed."""


def measure(session: Session, model: str = "net", **options: Any) -> StepBenchResult:
    return session.bench_steps(StepPlan(model=model, **{**SHORT, **options}))


# -- what is measured ------------------------------------------------------------------


def test_a_step_is_split_for_every_batch_and_bucket_size(ranks2: Session) -> None:
    run(ranks2, NET)
    result = measure(ranks2, buckets=("default", "0.001"))
    assert not result.problem
    assert [(p.bucket, p.batch) for p in result.points] == [
        ("0.001", 4),
        ("0.001", 16),
        ("default", 4),
        ("default", 16),
    ]
    assert result.parameters == 8 * 300 + 300 + 2 * 300 + 300 * 4 + 4
    assert result.gradient_bytes == 4 * result.parameters
    assert "random inputs, [batch, 8], as Linear takes them" in result.inputs
    for point in result.points:
        assert point.steps == SHORT["rounds"] * SHORT["max_steps"]
        assert min(point.forward_us, point.backward_us, point.optimizer_us, point.alone_us) > 0
        assert point.exposed_us == pytest.approx(point.step_us - point.local_us)
        low, high = point.exposed_interval_us
        assert low <= high
        assert point.overlapped_us is not None
        assert 0 <= point.overlapped_us < point.step_us


EVENTS = """
import time
from ddp_notebook.rank.bench import steps as measured
class Event:
    def __init__(self):
        self.at_ns, self.done = time.perf_counter_ns(), False
    def synchronize(self):
        self.done = True
    def elapsed_time(self, end):
        return (end.at_ns - self.at_ns) / 1e6
before, measured.clock_of = measured.clock_of, lambda device: Event
"""


def test_steps_and_their_overlap_are_timed_by_the_events_of_a_gpu(ranks2: Session) -> None:
    # There is no GPU: events are stand-ins that know their time at once.
    run(ranks2, NET + EVENTS)
    try:
        result = measure(ranks2, batches=(4,))
    finally:
        run(ranks2, "measured.clock_of = before")
    (point,) = result.points
    assert not result.problem and point.step_us > 0
    assert point.overlapped_us is not None and 0 <= point.overlapped_us < point.step_us


def test_some_of_the_ranks_can_be_measured(ranks: Session) -> None:
    run(ranks, NET)
    result = ranks.bench_steps(StepPlan(model="net", **SHORT), ranks=(0, 2))
    assert (result.problem, result.world_size) == ("", 2)
    assert all(point.alone_us > 0 for point in result.points)
    ranks.run_cell("dist.barrier()").raise_for_error()


@pytest.mark.parametrize("model", ["cnn", "mlp", "transformer"])
def test_models_ship(ranks2: Session, model: str) -> None:
    result = measure(ranks2, model, batches=(2,), rounds=1)
    assert (result.model, result.problem) == (model, "")
    assert result.points[0].step_us > 0
    assert result.parameters > 300_000


def test_a_model_in_ddp_a_function_a_loss_and_data_are_the_users(ranks2: Session) -> None:
    run(
        ranks2,
        f"{NET}made = []\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.f = nn.Linear(5, 3)\n"
        "    def forward(self, a, b):\n"
        "        seen.add((len(a), tuple(b.shape[1:])))\n"
        "        return self.f(a + b)\n"
        "def make_net():\n    return Net()\n"
        "seen, losses = set(), []\n"
        "def my_loss(output, target):\n"
        "    losses.append(len(target))\n"
        "    return nn.functional.cross_entropy(output, target)\n"
        "samples = ((torch.randn(6, 5), torch.randn(6, 5)), torch.arange(6) % 3)\n"
        "wrapped = DDP(net, bucket_cap_mb=0.001)\n",
    )
    result = measure(ranks2, "make_net", loss="my_loss", data="samples", rounds=1)
    assert result.model == "make_net()"
    assert result.inputs == "data samples, loss my_loss"
    run(ranks2, "told = sorted(seen), sorted(set(losses))")
    assert ranks2.pull("told")[0] == ([(4, (5,)), (16, (5,))], [4, 16])
    run(
        ranks2,
        "made, make = [], DDP.__init__\n"
        "def noted(self, *args, **named):\n"
        "    made.append(named.get('bucket_cap_mb'))\n"
        "    make(self, *args, **named)\n"
        "DDP.__init__ = noted",
    )
    assert measure(ranks2, "wrapped", rounds=1).points
    run(ranks2, "DDP.__init__ = make")
    caps = ranks2.pull("made")[0]
    assert caps == pytest.approx([0.001] * len(caps), rel=0.01), "its own bucket size is kept"


def test_a_loss_without_targets_gets_some_that_fit(ranks2: Session) -> None:
    run(ranks2, f"{NET}criterion = nn.NLLLoss()\nlogs = nn.Sequential(net, nn.LogSoftmax(1))")
    result = measure(ranks2, "logs", loss="criterion", rounds=1)
    assert "targets: class 0" in result.inputs


def test_a_model_that_calls_collectives_itself_is_not_run_on_one_rank_alone(
    ranks2: Session,
) -> None:
    run(
        ranks2,
        f"{NET}class Together(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.net = net\n"
        "    def forward(self, x):\n"
        "        total = torch.ones(1)\n        dist.all_reduce(total)\n"
        "        return self.net(x) * total\n"
        "together = Together()\nsample = torch.randn(4, 8)",
    )
    result = measure(ranks2, "together", data="sample", rounds=1)
    assert not result.problem
    assert any("calls collectives itself" in note for note in result.notes)
    assert result.points[0].alone_us == result.points[0].local_us
    assert still_works(ranks2)


# -- what is left as it was ------------------------------------------------------------

STATE = (
    "state = [float(t.double().sum()) for t in net.state_dict().values()]\n"
    "grads = [None if p.grad is None else float(p.grad.double().sum()) for p in net.parameters()]\n"
    "numbers = torch.rand(2).tolist(), random.random(), np.random.rand()\n"
    "told = state, grads, net.training, [m.training for m in net.modules()], numbers, "
    "optimizer.state_dict()['state'], len(net._forward_pre_hooks), torch.is_grad_enabled()\n"
)
KNOWN = "from ddp_notebook.rank import runtime\nknown = runtime.current().core.tracker.made\n"


def test_the_users_model_is_as_it_was(ranks2: Session) -> None:
    prepare = (
        f"{NET}import numpy as np\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)\n"
        "net(torch.randn(4, 8)).sum().backward()\noptimizer.step()\nnet.eval()\n"
        "random.seed(1); np.random.seed(1); torch.manual_seed(1)\n"
    )
    run(ranks2, prepare)
    run(ranks2, STATE)
    before = ranks2.pull("told")
    run(ranks2, f"{prepare}{KNOWN}")
    known = ranks2.pull("known")
    measure(ranks2, rounds=1)
    run(ranks2, STATE)
    assert repr(ranks2.pull("told")) == repr(before)
    run(ranks2, KNOWN)
    assert ranks2.pull("known") == known, "DDP objects of ours are not the user's"
    assert still_works(ranks2)


# -- what cannot be measured -----------------------------------------------------------


def test_what_cannot_be_measured_is_refused_with_what_to_type(ranks2: Session) -> None:
    run(
        ranks2,
        f"{NET}odd = nn.Linear(4, 4 + rank)\nnumber = 3\nfrozen = nn.Linear(2, 2)"
        ".requires_grad_(False)\n"
        "class Opaque(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.ones(3))\n"
        "    def forward(self, x):\n        return x['a'] * self.w\n"
        "opaque = Opaque()\n"
        "stuck = nn.Linear(2, 2)\nstuck.extra = stuck.weight * 2\n"
        "huge = nn.Module()\nhuge.w = nn.Parameter(torch.zeros(1).expand(2**40))\n",
    )
    for model, words in {
        "nothing_there": "ranks 0 and 1: this rank has no variable 'nothing_there'",
        "number": "number is of type int; expected a torch module",
        "frozen": "no parameter of frozen requires a gradient",
        "odd": "odd is not the same on all ranks.* on rank 1, ",
        "opaque": "give samples with --data batch",
        "stuck": "stuck cannot be copied.*--model make_stuck",
        "huge": "to train a copy of it takes 16384 GiB, and .* are free",
    }.items():
        with pytest.raises(UsageMistake, match=words):
            measure(ranks2, model)
    for option, words in {"loss": "no variable 'nope'", "data": "no variable 'nope'"}.items():
        with pytest.raises(UsageMistake, match=words):
            measure(ranks2, **{option: "nope"})
    assert still_works(ranks2)


def test_more_memory_than_there_is_is_refused_before_it_is_taken(ranks2: Session) -> None:
    run(ranks2, NET)
    with pytest.raises(UsageMistake, match=r"A batch of 10,000,000,000 needs about .* fits\."):
        measure(ranks2, batches=(4, 10**10))
    assert still_works(ranks2)


def test_a_batch_that_one_rank_cannot_take_is_left_out_and_named(ranks2: Session) -> None:
    run(
        ranks2,
        f"{NET}class Picky(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.net = net\n"
        "    def forward(self, x):\n"
        "        if rank == 1 and len(x) > 8: raise MemoryError('out of memory, as it were')\n"
        "        return self.net(x)\n"
        "picky = Picky()",
    )
    result = measure(ranks2, "picky", rounds=1)
    assert result.batches == (4,)
    assert any(
        "Not measured: batch 16. rank 1 raised MemoryError: out of memory, as it were (batch 16)"
        in note
        for note in result.notes
    )
    with pytest.raises(DDPError, match=r"picky cannot be measured \(rank 1: MemoryError"):
        measure(ranks2, "picky", batches=(16, 32))
    assert still_works(ranks2)


# -- what comes in between -------------------------------------------------------------

COUNTING = (
    "from torch import nn\n"
    "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.f, self.count = nn.Linear(4, 4), 0\n"
    "    def forward(self, x):\n"
    "        self.count += 1\n"
    "        if rank == 1 and self.count > most: raise ValueError('enough of it')\n"
    "        return self.f(x)\n"
    "net = Net()\n"
    "kept = 10 + rank\n"
)


def test_what_was_measured_is_kept_when_a_rank_fails_and_the_others_are_freed(
    ranks2: Session,
) -> None:
    run(ranks2, f"most = 100\n{COUNTING}")
    result = measure(ranks2, data="", batches=(4,), rounds=8)
    assert "rank 1 raised ValueError: enough of it (batch 4)" in result.problem
    assert result.points[0].steps > 0
    assert still_works(ranks2)
    if not ranks2.record.snapshot.notes:  # which tell of a rank that had to have a new process
        assert set(ranks2.pull("kept").values()) == {10, 11}


def test_a_failure_before_anything_was_measured_is_an_error(ranks2: Session) -> None:
    run(ranks2, f"most = 5\n{COUNTING}")
    with pytest.raises(DDPError, match="rank 1 raised ValueError: enough of it"):
        measure(ranks2, batches=(4,), rounds=1)
    assert still_works(ranks2)


@pytest.fixture
def session(session: Session) -> Session:
    """Two ranks that a test may end."""
    session.init(InitOptions(world_size=2, device="cpu"))
    return session


def after_some_blocks(session: Session, act: Any, **options: Any) -> StepBenchResult:
    """Measure, and `act` once when three blocks of each kind there is are done."""
    acted = threading.Event()
    seen: list[StepBenchResult] = []

    def watch(done: float, so_far: Callable[[], StepBenchResult]) -> None:
        if done > 1 / 2 and not acted.is_set():
            seen.append(so_far())
            acted.set()
            act()

    plan = StepPlan(model="net", **{**SHORT, "rounds": 12, **options})
    result = session.bench_steps(plan, watch=watch)
    assert seen[0].batches == result.batches, "what there is by then is told"
    return result


def test_an_interrupt_keeps_what_is_measured_and_the_session_goes_on(ranks2: Session) -> None:
    run(ranks2, NET)
    result = after_some_blocks(ranks2, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert result.problem == "The benchmark was interrupted."
    assert 0 < result.points[0].steps < 12 * SHORT["max_steps"]
    assert still_works(ranks2)
    again = measure(ranks2, rounds=1)
    assert not again.problem


def test_a_rank_that_dies_is_named_and_what_was_measured_is_kept(session: Session) -> None:
    run(session, NET)
    pid = session.record.snapshot.ranks[1].pid
    result = after_some_blocks(session, lambda: os.kill(pid, signal.SIGKILL))
    assert "rank 1 died, killed by SIGKILL" in result.problem
    assert "%ddp_restart --ranks 1" in result.problem
    assert result.points
    eventually(lambda: not session.record.snapshot.with_status(Status.RUNNING), 10)
    session.restart((1,))
    assert still_works(session)
