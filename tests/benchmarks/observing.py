"""What observing costs a rank: the same work through the observer and without it, in turns."""

from __future__ import annotations

import time
from typing import Any

from rows import Measurement, Numbers, Row, seconds

from ddp_notebook.model.collective_log import FILE_BYTES
from ddp_notebook.session import InitOptions, Session

COMPARE = """
import statistics, time
from ddp_notebook.rank import runtime

tracker = runtime.current().core.tracker

def in_turns(one, other, rounds, count, clock=time.perf_counter_ns):
    \"\"\"Times of a call of each, in us, a pair for each round; they take turns.\"\"\"
    pairs = []
    for each in range(rounds):
        pair = [0.0, 0.0]
        for which, call in ((0, one), (1, other)) if each % 2 else ((1, other), (0, one)):
            dist.barrier()
            began = clock()
            for _ in range(count):
                call()
            pair[which] = (clock() - began) / count / 1e3
        pairs.append(pair)
    return pairs

def of(values):
    \"\"\"Their median, and between what it is with 95 %.\"\"\"
    values, n = sorted(values), len(values)
    off = int(0.98 * n**0.5) + 1
    return statistics.median(values), values[n // 2 - off], values[n // 2 + off]

def compared(pairs):
    return {
        "observed": statistics.median(ours for ours, _ in pairs),
        "plain": statistics.median(theirs for _, theirs in pairs),
        "more": of([ours - theirs for ours, theirs in pairs]),
        "ratio": of([ours / theirs for ours, theirs in pairs]),
    }

def uncounted(call):
    def plain():
        tracker.broken = "for comparison"
        try:
            call()
        finally:
            tracker.broken = ""
    return plain

# The observed group and the one inside: two groups have sockets and threads of their own, and
# differ by more than what is measured.
alone = [dist.new_group([each]) for each in range(2)][rank]        # no time passes on the wire
both = dist.new_group([0, 1])
alone_plain, both_plain = alone.ddp_notebook_inner, both.ddp_notebook_inner
assert type(both_plain) is dist.ProcessGroup and type(both) is not dist.ProcessGroup

small = torch.ones(1)
call = in_turns(
    lambda: dist.all_reduce(small, group=alone),
    lambda: dist.all_reduce(small, group=alone_plain), 200, 50, time.thread_time_ns,
)
big = torch.ones(4 * 2**20)                      # 16 MiB
large = in_turns(
    lambda: dist.all_reduce(big, group=both),
    lambda: dist.all_reduce(big, group=both_plain), 150, 1,
)

def step_of(group, width, layers, cap_mb, batch):
    torch.manual_seed(0)
    stack = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    model = DDP(torch.nn.Sequential(*stack), process_group=group, bucket_cap_mb=cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    def step():
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    for _ in range(3):
        step()
    return step

thin = torch.ones(1, 16)                         # 64 buckets of 1 KiB
buckets = in_turns(
    step_of(alone, 16, 64, 0.0005, thin),
    uncounted(step_of(alone_plain, 16, 64, 0.0005, thin)), 150, 2, time.thread_time_ns,
)
wide = torch.ones(256, 256)
training = in_turns(
    step_of(both, 256, 8, 25, wide), uncounted(step_of(both_plain, 256, 8, 25, wide)), 150, 1,
)
numbers = {
    "call": compared(call), "large": compared(large),
    "buckets": compared(buckets), "training": compared(training),
}
"""
BLOCKED = "if rank:\n    dist.all_reduce(torch.ones(1))"


class Observing(Measurement):
    """Time through the observer against torch's own group inside it, on two ranks.

    What is told is the median of the differences (or ratios) of pairs that were measured one
    after the other, and in brackets where it lies with 95 %. Of small collectives it is the CPU
    time of the thread that issues: how long gloo's own threads take to be scheduled differs by
    more than what is measured.
    """

    name = "observing"

    def round(self) -> Numbers:
        """One session of two ranks for the comparison, one of four that are blocked."""
        with Ranks(2) as session:
            session.run_cell(COMPARE).raise_for_error()
            found: Any = session.pull("numbers")[0]
        numbers = {}
        for name, of in found.items():
            numbers |= {f"{name} {kind}": of[kind] for kind in ("observed", "plain")}
            for kind in ("more", "ratio"):
                for place, value in zip(("", " low", " high"), of[kind], strict=True):
                    numbers[f"{name} {kind}{place}"] = value
        with Ranks(4) as session:
            session.run_cell(BLOCKED)
            began = time.perf_counter()
            assert session.why().wrong
            numbers["why_ms"] = 1e3 * (time.perf_counter() - began)
        return numbers

    def rows(self, medians: Numbers) -> list[Row]:
        """Against the bars."""
        return [
            _cost("a collective from Python, 4 B (CPU)", medians, "call", 1, 5.0),
            _cost("a bucket from DDP's reducer (CPU)", medians, "buckets", 64, 10.0),
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


def _cost(bar: str, medians: Numbers, name: str, each: int, at_most_us: float) -> Row:
    """A bar on what `each` collectives of a call cost more."""
    more, low, high = (medians[f"{name} more{place}"] / each for place in ("", " low", " high"))
    ours = f"{more:.1f} us more [{low:.1f}, {high:.1f}]"
    rival = f"torch {medians[f'{name} plain'] / each:.1f} us"
    return Row(bar, ours, rival, wanted=f"at most {at_most_us:g} us", met=more <= at_most_us)


def _ratio(bar: str, medians: Numbers, name: str, at_most: float) -> Row:
    ratio, low, high = (medians[f"{name} ratio{place}"] for place in ("", " low", " high"))
    ours = f"{seconds(medians[f'{name} observed'] / 1e6)} [{low:.3f}x, {high:.3f}x]"
    rival = f"torch {seconds(medians[f'{name} plain'] / 1e6)}"
    return Row(bar, ours, rival, ratio, f"at most {at_most:g}x", ratio <= at_most)


class Ranks:
    """A session for a with statement."""

    def __init__(self, world_size: int) -> None:
        self.session = Session()
        self.session.init(InitOptions(world_size=world_size, device="cpu"))

    def __enter__(self) -> Session:
        return self.session

    def __exit__(self, *_: object) -> None:
        self.session.shutdown()
