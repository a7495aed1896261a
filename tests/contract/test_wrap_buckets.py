"""The buckets that are foretold for a model, and wraps that do not end well."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support import eventually
from wrapping import NET, SOON_S, begin, has_line, run, still_works, train

from ddp_notebook.errors import CellInterrupted, UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Category, Status
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.tools.ddp_construction import Wrap

# -- buckets ---------------------------------------------------------------------------

DEEP = (
    "from torch import nn\ntorch.manual_seed(0)\n"
    "model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))\n"
)

KB = 1 / 1024
"""A KiB in MiB, as --bucket-cap-mb takes it."""


def table_in(made: Wrap, title: str) -> list[str]:
    """The lines of the table of buckets under the line that begins with `title`."""
    lines = list(made.table.details)
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("  "):
            break
        rows.append(line)
    return rows


def test_the_expected_buckets_are_those_that_ddp_rebuilds(ranks2: Session) -> None:
    run(ranks2, DEEP)
    made = begin(ranks2, bucket_cap_mb=KB / 2)
    first = table_in(made, "In the first step")
    expected = table_in(made, "From the second step on")
    assert (len(first), len(expected)) == (1, 2)
    assert has_line(made, "its buckets in the first step: 864 B")
    assert begin(ranks2).table.details[0].startswith("model has not run a step yet")
    train(ranks2)
    after_one = begin(ranks2, buckets=True)
    assert after_one.done
    assert has_line(after_one, "  1     2.bias")
    assert table_in(after_one, "DDP will build these buckets") == expected
    train(ranks2)
    rebuilt = table_in(begin(ranks2), "The buckets that DDP built from rank 0's first order")
    assert rebuilt == expected
    train(ranks2, 20)
    assert table_in(begin(ranks2), "The buckets that DDP built") == expected


def test_a_model_that_the_user_wrapped_shows_its_buckets_too(ranks2: Session) -> None:
    run(ranks2, DEEP + "model = DDP(model, bucket_cap_mb=1)")
    train(ranks2, 2)
    made = begin(ranks2)
    assert made.done
    assert len(table_in(made, "The buckets that DDP built from rank 0's first order")) == 1


def test_with_unused_parameters_ddp_keeps_its_buckets(ranks2: Session) -> None:
    run(ranks2, DEEP + "model.spare = nn.Linear(2, 2)\nmodel.forward = lambda x: model[0](x)")
    made = begin(ranks2, find_unused_parameters=True, bucket_cap_mb=KB / 2, target="net")
    kept = table_in(made, "Buckets (")
    assert len(kept) > 1
    run(ranks2, "for _ in range(2): net(torch.randn(4, 8)).sum().backward()")
    after = begin(ranks2, "net")
    assert table_in(after, "With find_unused_parameters DDP keeps") == kept
    assert has_line(after, "No gradient for 1.weight, 1.bias, 2.weight, 2.bias")


def test_ranks_with_another_order_of_gradients_are_named(ranks4: Session) -> None:
    run(
        ranks4,
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.a(self.b(x)) if rank == 3 else self.b(self.a(x))\n"
        "model = Net()",
    )
    begin(ranks4)
    train(ranks4)
    made = begin(ranks4)
    assert has_line(made, "on rank 0, whose order all ranks use; a different one on rank 3")


def test_buckets_of_a_model_that_is_not_wrapped_are_refused(ranks2: Session) -> None:
    run(ranks2, NET)
    with pytest.raises(UsageMistake, match=r"not wrapped yet.*%ddp_wrap model"):
        begin(ranks2, buckets=True)


# -- when it goes wrong ----------------------------------------------------------------


@pytest.fixture
def session(session: Session) -> Session:
    """Three ranks of which a test may spoil some."""
    session.init(InitOptions(world_size=3, device="cpu"))
    return session


LIMIT = (
    "import resource\n"
    "pages = int(open('/proc/self/statm').read().split()[0])\n"
    "room = pages * resource.getpagesize() + 32 * 2**20\n"
    "resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))"
)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_that_runs_out_on_rank_0_is_a_result_and_no_hang(session: Session) -> None:
    run(session, "from torch import nn\nmodel = nn.ModuleList([nn.Linear(2048, 4096)] * 1)")
    run(session, "model.append(nn.Linear(2048, 4096))\nkept = rank")
    run(session, LIMIT, (0,))
    began = time.monotonic()
    made = begin(session)
    assert time.monotonic() - began < scaled_for_load(SOON_S)
    assert made.diagnosis is not None
    (finding,) = made.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.OOM_ON_ONE_RANK, (0,))
    assert "stage broadcast" in finding.cause
    assert "asking for" in finding.cause and "MiB" in finding.cause
    assert finding.waiting == (1, 2)
    session.restart((0,))
    assert still_works(session)
    assert session.pull("kept", (1, 2)) == {1: 1, 2: 2}, "they kept their variables"


def test_a_rank_that_dies_in_the_broadcast_is_named(session: Session) -> None:
    run(session, NET)
    run(
        session,
        "import os\n"
        "from ddp_notebook.rank.training import ddp as agent\n"
        "agent.sync = lambda *_: os.kill(os.getpid(), 9)",
        (1,),
    )
    made = begin(session)
    assert made.diagnosis is not None
    (finding,) = made.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.RANK_DIED, (1,))
    assert "died in stage broadcast of `%ddp_wrap`, killed by SIGKILL" in finding.cause
    session.restart((1, *finding.waiting))
    assert still_works(session)


BLOCK = (
    "import time\n"
    "from ddp_notebook.rank.training import ddp as agent\n"
    "agent.sync = lambda *_: time.sleep(1000)"
)


def test_an_interrupt_gives_the_notebook_back_and_the_model_is_as_it_was(session: Session) -> None:
    run(session, NET)
    run(session, BLOCK, (1,))

    def in_broadcast() -> bool:
        return session.record.snapshot.ranks[1].doing == "%ddp_wrap: broadcast"

    def interrupt() -> None:
        eventually(in_broadcast, SOON_S)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(CellInterrupted, match="interrupted in stage broadcast") as caught:
        begin(session)
    thread.join()
    assert 1 not in caught.value.still_running, "it was in Python, and could be stopped"
    assert session.record.snapshot.ranks[1].status is Status.READY
    session.restart((1, *caught.value.still_running))
    assert still_works(session)


# -- torch's private API ---------------------------------------------------------------


def test_torch_still_makes_the_parameters_and_the_buckets_that_are_foretold(
    ranks2: Session,
) -> None:
    run(
        ranks2,
        "from torch import nn\n"
        "from ddp_notebook.rank.training import ddp as agent\n"
        "model = nn.Module()\n"
        "model.root = nn.Parameter(torch.ones(3))\n"
        "model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)\n"
        "model.table = nn.EmbeddingBag(10, 4, sparse=True)\n"
        "model.a, model.half = nn.Linear(4, 300), nn.Linear(300, 4).bfloat16()\n"
        "model.tied = model.a\n"
        "found = agent.reduced(model)\n"
        "checks = []\n"
        "for cap_mb, unused in ((None, False), (None, True), (0.001, True), (2, True)):\n"
        "    plan = agent.bucket_plan(model, cap_mb, unused)\n"
        "    options = {} if cap_mb is None else {'bucket_cap_mb': cap_mb}\n"
        "    made = DDP(model, init_sync=False, find_unused_parameters=unused, **options)\n"
        "    parameters, sparse = made._build_params_for_reducer()\n"
        "    checks.append([id(p) for p in parameters] == [id(p) for p in found[1]])\n"
        "    checks.append(sparse == found[2])\n"
        "    sizes = [bucket.size_bytes for bucket in plan.first]\n"
        "    checks.append(str(made._get_ddp_logging_data()['bucket_sizes'])\n"
        "                  == ', '.join(map(str, sizes)))\n"
        "    cap = None if made.bucket_bytes_cap_default else made.bucket_bytes_cap / 2**20\n"
        "    checks.append(tuple(agent.bucket_limits(cap)) == plan.limits_bytes)\n"
        "    del made",
    )
    assert all(ranks2.pull("checks")[0])


def test_torchs_own_constructor_still_does_the_same_collectives(ranks2: Session) -> None:
    """The stages stand for what DDP does with init_sync=True: it makes the same two calls."""
    run(
        ranks2,
        "from torch import nn\n"
        "from torch.nn.parallel import distributed\n"
        "calls = []\n"
        "real = {}\n"
        "for name in ('_verify_param_shape_across_processes', '_sync_module_states'):\n"
        "    real[name] = getattr(distributed, name)\n"
        "    def noted(*args, name=name, **options):\n"
        "        calls.append((name, sorted(options), options.get('broadcast_bucket_size')))\n"
        "        return real[name](*args, **options)\n"
        "    setattr(distributed, name, noted)\n"
        "DDP(nn.Linear(2, 2))\n"
        "for name, function in real.items():\n"
        "    setattr(distributed, name, function)",
    )
    (verify, sync) = ranks2.pull("calls")[0]
    assert verify[0] == "_verify_param_shape_across_processes"
    assert sync[0] == "_sync_module_states"
    assert {"module", "process_group", "src", "params_and_buffers_to_ignore"} <= set(sync[1])
    assert sync[2] == 250 * 2**20
