"""Cases in which something goes wrong, one for most rules: to be mutated, and judged."""

from __future__ import annotations

from dataclasses import replace

from collective_cases import DDP, same
from setup_cases import arguments, waiting
from traces import (
    BUSY,
    DESTROYED,
    all_reduce,
    backward,
    barrier,
    died,
    forward,
    message,
    op,
    play,
    raised,
    report,
    with_facts,
)

from ddp_notebook.model import (
    Activity,
    Case,
    Collectives,
    OptimizerFacts,
    Place,
    Probe,
    ReplicaFacts,
    RunFacts,
    SamplerFacts,
    StoreFile,
    TensorDigest,
    Worker,
)
from ddp_notebook.model.ddp import Fingerprint, TensorInfo

CODE = {
    "train.py": "import x\nfor i in range(9):\n    step(i)\n    if rank == 0:\n        evaluate()\n"
    "    elif x and rank:\n        [f(i) for i in y if rank]\n    else:\n        continue\n"
}
_FOR_KEY = report(0, Activity.WAITING, "key", initialized=True, key="ready")
_LOADS = with_facts(
    BUSY,
    workers=(Worker(71, True, True, 2.0, True, False, Place("data.py", 14)), Worker(72)),
)
_TRAINS = ReplicaFacts("Net 1", "Net", "net", forwards=4, backwards=4)
_STUCK = [*DDP, forward(), backward(), backward(), barrier(31)]


def _in_setup() -> tuple[Case, ...]:
    model = Fingerprint((TensorInfo("w", (2, 3), "float32"),), ())
    ranks = tuple(
        with_facts(
            waiting(rank, inside),
            model=model,
            file=StoreFile("/tmp/x", True, {"0": 1, "1": 2}),
            reach=(Probe("10.0.0.1:9", "refused"),),
            listens=("127.0.0.1:81",),
            polls_for="/tmp/ready" if rank else "",
        )
        for rank, inside in enumerate(("store", "rendezvous", "process-group"))
    )
    failed = with_facts(
        ranks[1],
        activity=Activity.FAILED,
        error_type="RuntimeError",
        error_text="EADDRINUSE: port 29500 is in use",
        error_at=(Place("train.py", 3, "main", "init()"),),
        arguments=arguments(1, 4, path="/tmp/x", stale=True),
    )
    gone = with_facts(died(-9), rank=2, peak_bytes=9, oom_kills=1, last_words="one\ntwo")
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "3"}
    return (
        Case(ranks, told, 0, sources=CODE),
        Case((ranks[0], failed, gone), told, 0, store_alive=False, sources=CODE),
        Case((ranks[0], replace(_FOR_KEY, rank=1), replace(_LOADS, rank=2)), told, sources=CODE),
    )


def _in_a_run() -> tuple[Case, ...]:
    lines = [all_reduce(5), op("all_gather", 8), op("broadcast", 9, root=0, label="loss")]
    groups = {"g": (0, 1), "h": (1, 2)}
    crossed = {
        0: [barrier(3, group="g"), all_reduce(4)],
        1: [barrier(4, group="h"), barrier(5, group="g")],
        2: [all_reduce(4), barrier(6, group="h")],
    }
    return (
        play(same(3, _STUCK, r0=[*_STUCK[:4], barrier((16, "save")), *_STUCK[4:]])),
        play(same(3, _STUCK, r1=_STUCK[:3]), {1: DESTROYED}),
        play(same(3, _STUCK, r1=_STUCK[:4]), {1: raised("KeyError: 'x'", "KeyError")}),
        play(same(3, _STUCK, r2=_STUCK[:4]), {2: died(-9)}),
        play(same(4, lines, r2=[lines[0], lines[2]])),
        play(same(3, lines, r1=lines[::-1])),
        play(same(2, lines, r1=[replace(lines[0], dtype="int64", shape=(9,)), *lines[1:]])),
        play({0: [message("send", 1, 3)], 1: [message("send", 0, 4)], 2: [message("recv", 1, 5)]}),
        play(same(3, _STUCK, r1=_STUCK[:4]), {1: _FOR_KEY}),
        play(same(3, _STUCK, r1=_STUCK[:4]), {1: with_facts(_LOADS, replicas=(_TRAINS,))}),
        play(crossed, groups=groups),
    )


CASES = (*_in_setup(), *(replace(case, sources=CODE) for case in _in_a_run()))


def _trained(rank: int) -> RunFacts:
    tensor = TensorDigest("w", 4, f"{rank}", 2.0, (1.0, 2.0 + rank))
    replica = replace(
        _TRAINS,
        group_size=2,
        device="cuda:0",
        backend="gloo",
        steps=4,
        local_steps=rank,
        bypassed_steps=rank,
        unready_steps=rank,
        unready=("w",),
        outside=("b",),
        bad_place=Place("train.py", 3),
        parameters=(tensor,),
        buffers=(replace(tensor, name="mean"),),
        gradients=(replace(tensor, norm=None, sample=(None,), finite=False),),
        buffer_order=("mean",),
    )
    optimizer = OptimizerFacts("o", "SGD", 4, (0.1 + rank,), ("Net 1",), (tensor,), (tensor,))
    sampler = SamplerFacts("s", 100, 2, rank, seed=rank, epochs=(0, 0))
    return RunFacts(
        rank=rank,
        run=1,
        host="h",
        backwards=4,
        replicas=(replica,),
        optimizers=(optimizer,),
        samplers=(sampler,),
    )


FACTS = ({rank: _trained(rank) for rank in range(3)}, Collectives())
"""What ranks know of their training, and what they issued."""
