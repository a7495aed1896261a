"""What observing costs a rank: the same work through the observer and without it, in turns."""

from __future__ import annotations

import time
from typing import Any

from rows import Measurement, Numbers, Row, compare

from ddp_notebook.model.ring import FILE_BYTES
from ddp_notebook.session import InitOptions, Session

COMPARE = """
import statistics, time

def in_turns(one, other, rounds, count, clock=time.perf_counter_ns):
    \"\"\"Medians over rounds of the time of a call of each, in us; they take turns.\"\"\"
    times = ([], [])
    for each in range(rounds):
        for which, call in ((0, one), (1, other)) if each % 2 else ((1, other), (0, one)):
            dist.barrier()
            began = clock()
            for _ in range(count):
                call()
            times[which].append((clock() - began) / count / 1e3)
    return statistics.median(times[0]), statistics.median(times[1])

def unobserved(ranks):
    observer.observer.broken = "for comparison"
    try:
        return dist.new_group(ranks)
    finally:
        observer.observer.broken = ""

from ddp_notebook.agent import observer
# Of one rank each: no time passes on the wire.
alone = [dist.new_group([each]) for each in range(2)][rank]
alone_plain = [unobserved([each]) for each in range(2)][rank]
both, both_plain = dist.new_group([0, 1]), unobserved([0, 1])
assert type(both_plain) is dist.ProcessGroup and type(both) is not dist.ProcessGroup

small = torch.ones(1)
call = in_turns(
    lambda: dist.all_reduce(small, group=alone),
    lambda: dist.all_reduce(small, group=alone_plain), 20, 500, time.thread_time_ns,
)
big = torch.ones(4 * 2**20)                      # 16 MiB
large = in_turns(
    lambda: dist.all_reduce(big, group=both),
    lambda: dist.all_reduce(big, group=both_plain), 20, 3,
)

def step_of(group, width, layers, cap_mb, batch):
    torch.manual_seed(0)
    stack = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    model = DDP(torch.nn.Sequential(*stack), process_group=group, bucket_cap_mb=cap_mb)
    def step():
        model(batch).sum().backward()
    for _ in range(3):
        step()
    return step

thin = torch.ones(1, 16)                         # 64 buckets of 1 KiB
buckets = in_turns(
    step_of(alone, 16, 64, 0.0005, thin), step_of(alone_plain, 16, 64, 0.0005, thin),
    20, 10, time.thread_time_ns,
)
wide = torch.ones(256, 256)
training = in_turns(
    step_of(both, 256, 8, 25, wide), step_of(both_plain, 256, 8, 25, wide), 30, 3
)
numbers = {"call": call, "large": large, "buckets": buckets, "training": training}
"""
BLOCKED = "if rank:\n    dist.all_reduce(torch.ones(1))"


class Observing(Measurement):
    """Time through the observer against torch's own group, on two ranks.

    The first two are CPU time of the thread that issues: how long gloo's own threads take to be
    scheduled differs by more than what is measured.
    """

    name = "observing"

    def round(self) -> Numbers:
        """One session of two ranks for the comparison, one of four that are blocked."""
        with Ranks(2) as session:
            session.run_cell(COMPARE).raise_for_error()
            found: Any = session.pull("numbers")[0]
        numbers = {
            f"{name} {kind}": pair[which]
            for name, pair in found.items()
            for which, kind in enumerate(("observed", "plain"))
        }
        with Ranks(4) as session:
            session.run_cell(BLOCKED)
            began = time.perf_counter()
            assert session.why().wrong
            numbers["why_ms"] = 1e3 * (time.perf_counter() - began)
        return numbers

    def rows(self, medians: Numbers) -> list[Row]:
        """Against the bars."""
        call = medians["call observed"] - medians["call plain"]
        bucket = (medians["buckets observed"] - medians["buckets plain"]) / 64
        return [
            _cost("a collective from Python, 4 B (CPU)", call, medians["call plain"], 5.0),
            _cost("a bucket from DDP's reducer (CPU)", bucket, medians["buckets plain"] / 64, 10.0),
            _ratio("all_reduce of 16 MiB", medians, "large", 1.02),
            _ratio("a training step, 2 MiB of gradients", medians, "training", 1.02),
            Row(
                "%ddp_why, 4 ranks, 3 blocked",
                f"{medians['why_ms']:.0f} ms",
                wanted="under 100 ms",
                met=medians["why_ms"] < 100,
            ),
            Row(
                "ring of 10,000 collectives",
                f"{FILE_BYTES / 1e6:.1f} MB a rank",
                wanted="under 10 MB",
                met=FILE_BYTES < 10e6,
            ),
        ]


def _cost(bar: str, more_us: float, plain_us: float, at_most_us: float) -> Row:
    ours, rival = f"{more_us:.1f} us more", f"torch {plain_us:.1f} us"
    return Row(bar, ours, rival, wanted=f"at most {at_most_us:g} us", met=more_us <= at_most_us)


def _ratio(bar: str, medians: Numbers, name: str, at_most: float) -> Row:
    ours, torchs = medians[f"{name} observed"] / 1e6, medians[f"{name} plain"] / 1e6
    return compare(bar, ours, torchs, at_most, "torch")


class Ranks:
    """A session for a with statement."""

    def __init__(self, world_size: int) -> None:
        self.session = Session()
        self.session.init(InitOptions(world_size=world_size, device="cpu"))

    def __enter__(self) -> Session:
        return self.session

    def __exit__(self, *_: object) -> None:
        self.session.shutdown()
