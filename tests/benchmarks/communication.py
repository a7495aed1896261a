"""What `%ddp_bench` measures, against loops that do without it, in turns."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from observing import Ranks
from rows import Measurement, Numbers, Row, seconds

from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.result import BenchPoint, BenchRun, Trust
from ddp_notebook.session import Session

WORLD_SIZE = 2
REPEATS = 5
LARGE = 4 * 2**20
PLAN = Plan(min_bytes=2**10, max_bytes=64 * 2**20, factor=4, budget_s=6.0)
SHORT = Plan(min_bytes=2**10, max_bytes=16 * 2**20, factor=4, budget_s=3.0)
METHODS = ("bare", "param", "stas00")
AGAIN, PLAIN = "bare again", "bare in plain processes"
LARGE_PLAN = Plan(min_bytes=LARGE, max_bytes=64 * 2**20, factor=4, budget_s=1.5)
STARTS = 4
TURNS_EACH = 5
TURNS = 200
TURN_SIZES = (4 * 2**20, 16 * 2**20)
_BADGES = (Trust.GOOD, Trust.FAIR, Trust.NOISY)

_LATE = """
kept_all_reduce = dist.all_reduce
def late(*args, **named):
    import time
    time.sleep(0.002)
    return kept_all_reduce(*args, **named)
dist.all_reduce = late
"""
_IN_TURNS = """
import functools, statistics, time
from ddp_notebook.rank.collectives import observer
from ddp_notebook.rank.bench.collectives import time_each
group, cpu = observer.unobserved(dist.group.WORLD), torch.device("cpu")

def bare(tensor, count):
    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter_ns() - began)
    return times

in_turns = {}
for size in SIZES:
    tensor = torch.zeros(size // 4)
    call = functools.partial(dist.all_reduce, tensor, group=group)
    took = ([], [])
    for turn in range(TURNS):
        for which in (0, 1) if turn % 2 else (1, 0):
            dist.all_reduce(tensor, group=group)
            dist.barrier()
            took[which].extend(bare(tensor, 4) if which else time_each([call], 4, cpu))
    slowest = torch.tensor(took, dtype=torch.int64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    in_turns[size] = [statistics.median(each) / 1e9 for each in slowest.tolist()]
"""
_AS_IT_WAS = "dist.all_reduce = kept_all_reduce"


class Communication(Measurement):
    """Medians against bare loops, repeats against each other, and what is planted."""

    name = "communication"

    def round(self) -> Numbers:
        """Two ranks of ours and two plain processes, one of them at a time."""
        numbers: dict[str, float] = {}
        numbers.update(_large_sizes())
        with Ranks(WORLD_SIZE) as session:
            numbers.update(_timed_region(session))
            with Loops(WORLD_SIZE) as loops:
                numbers.update(_intervals(session, loops))
            numbers.update(_planted(session))
        with Ranks(4) as session:
            numbers.update(_default(session))
        return numbers

    def rows(self, medians: Numbers) -> list[Row]:
        """Against the bars."""
        rows = [
            compare_both_ways(f"the timed region alone, {size // 2**20} MiB", medians, size)
            for size in TURN_SIZES
        ]
        rows += [
            _off(f"from 4 MiB: as {m} condenses it, worst size", medians[f"{m} large off"])
            for m in METHODS
        ]
        rows += [
            Row(f"  our median against its {what}", f"{medians[f'{m} large median off']:.3f}x")
            for m, what in (("param", "mean"), ("stas00", "mean of rates"))
        ]
        rows += [
            Row(f"  the bare loop, once more in {where}", f"{medians[f'{who} large off']:.3f}x")
            for who, where in ((AGAIN, "the same ranks"), (PLAIN, "plain processes"))
        ]
        rows += [
            _share("below 4 MiB: our interval holds the bare loop's", medians["held"], 0.9),
            _share("repeats lie inside each other's intervals", medians["repeated"], 0.9),
            _share("a rank that is 2 ms late is named", medians["late found"], 1.0),
            _share("load from others lowers the badge, or it is the lowest", medians["badge"], 1.0),
            _under("default on 4 ranks", medians["default_s"], 20.0),
            _under("  its first point after", medians["first_s"], 1.0),
        ]
        return rows


def compare_both_ways(bar: str, medians: Numbers, size: int) -> Row:
    """Ours against a bare loop in the same ranks: neither may be slower by more than 5 %."""
    ours, bare = medians[f"ours {size}"], medians[f"bare {size}"]
    ratio = ours / bare
    met = abs(ratio - 1) <= 0.05
    return Row(
        bar, seconds(ours), f"a bare loop in turns {seconds(bare)}", ratio, "within 5 %", met
    )


def _off(bar: str, ratio: float) -> Row:
    met = abs(ratio - 1) <= 0.05
    return Row(bar, f"{ratio:.3f}x", wanted="within 5 %", met=met)


def _share(bar: str, share: float, at_least: float) -> Row:
    return Row(bar, f"{share:.0%}", wanted=f"at least {at_least:.0%}", met=share >= at_least)


def _under(bar: str, taken_s: float, at_most_s: float) -> Row:
    return Row(bar, f"{taken_s:.2f} s", wanted=f"under {at_most_s:g} s", met=taken_s < at_most_s)


class Loops:
    """Plain processes that run `bare_loops.py`, idle until they are asked."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        program = str(Path(__file__).parent / "bare_loops.py")
        self._processes = [
            subprocess.Popen(
                [sys.executable, program, str(rank), str(world_size), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def __enter__(self) -> Loops:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.communicate(timeout=30)
        self._folder.cleanup()

    def ask(self, method: str, sizes: list[int]) -> dict[int, float]:
        """Seconds by size."""
        answers = []
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"method": method, "sizes": sizes}) + "\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        return {int(size): value for size, value in answers[0].items()}


def _timed_region(session: Session) -> Numbers:
    """What is timed against a bare loop in the same ranks, in short turns."""
    source = _IN_TURNS.replace("SIZES", repr(TURN_SIZES)).replace("TURNS", str(TURNS))
    session.run_cell(source).raise_for_error()
    found = session.pull("in_turns")[0]
    return {
        f"{name} {size}": pair[which]
        for size, pair in found.items()
        for which, name in enumerate(("ours", "bare"))
    }


def _intervals(session: Session, loops: Loops) -> Numbers:
    """Whether the bare loop and the next run lie where ours says."""
    held, ours = [], []
    for _ in range(REPEATS):
        before = _three_rounds(loops)
        ours.append(run := session.bench(PLAN))
        after = _three_rounds(loops)
        for point in run.points:
            if point.size_bytes < LARGE:
                bare_s = statistics.median(before[point.size_bytes] + after[point.size_bytes])
                held.append(_inside(1e6 * bare_s, point.latency_interval_us))
    inside = []
    for one, other in itertools.pairwise(ours):
        for a, b in zip(one.points, other.points, strict=True):
            inside.append(_inside(a.latency_us, b.latency_interval_us))
            inside.append(_inside(b.latency_us, a.latency_interval_us))
    return {"held": statistics.fmean(held), "repeated": statistics.fmean(inside)}


Turn = tuple[BenchRun, dict[str, dict[int, float]]]
"""Ours, and theirs in seconds by method and size."""


def _large_sizes() -> Numbers:
    """How far off each method is, at the size where it is most: condensed as it does, and as a
    median.

    What is compared took turns, in short ones, in the same ranks: the ratio is of one turn, and
    the median over all of them. Two pairs of processes that run the same program differ by more
    than what is asked. How much is said too, by plain processes with the bare loop; and all of
    them are started anew some times.
    """
    order, turns = random.Random(1), []
    for _ in range(STARTS):
        with Ranks(WORLD_SIZE) as session, Loops(WORLD_SIZE) as plain:
            turns += [_turn(session, plain, order) for _ in range(TURNS_EACH)]
    numbers = {}
    for method in METHODS:
        numbers[f"{method} large off"] = _ratio(turns, method, method)
        numbers[f"{method} large median off"] = _ratio(turns, method, "bare")
    for who in (AGAIN, PLAIN):
        same = [[each[who][s] / each["bare"][s] for s in LARGE_PLAN.sizes()] for _, each in turns]
        numbers[f"{who} large off"] = _worst(same)
    return numbers


def _turn(session: Session, plain: Loops, order: random.Random) -> Turn:
    sizes = list(LARGE_PLAN.sizes())
    runs: list[BenchRun] = []
    theirs = {}
    for who in order.sample(("ours", *METHODS, AGAIN, PLAIN), k=len(METHODS) + 3):
        shuffled = order.sample(sizes, k=len(sizes))
        if who == "ours":
            runs.append(session.bench(LARGE_PLAN))
        elif who == PLAIN:
            theirs[who] = plain.ask("bare", shuffled)
        else:
            theirs[who] = _in_the_ranks(session, "bare" if who == AGAIN else who, shuffled)
    return runs[0], theirs


def _in_the_ranks(session: Session, method: str, sizes: list[int]) -> dict[int, float]:
    """A method of `bare_loops.py` in the ranks that ours is measured in: seconds by size."""
    session.run_cell(
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "import bare_loops\n"
        f"loop_s = {{size: bare_loops.{method}(size) for size in {sizes}}}"
    ).raise_for_error()
    found: dict[int, float] = session.pull("loop_s")[0]
    return found


def _ratio(turns: list[Turn], method: str, condensed: str) -> float:
    """Ours, `condensed` as a method does, over what `method` said."""
    return _worst(
        [
            [_condensed(condensed, p) / theirs[method][p.size_bytes] for p in run.points]
            for run, theirs in turns
        ]
    )


def _worst(ratios: list[list[float]]) -> float:
    """The median over turns, at the size where it is farthest from 1."""
    each = [statistics.median(column) for column in zip(*ratios, strict=True)]
    return max(each, key=lambda ratio: abs(math.log(ratio)))


def _condensed(method: str, point: BenchPoint) -> float:
    """The iterations of one size made into one time as `method` does, in seconds."""
    assert point.samples is not None
    times_ns = point.samples.times_ns
    if method == "param":
        return statistics.median(statistics.fmean(mine) for mine in times_ns) / 1e9
    if method == "stas00":
        return statistics.harmonic_mean(times_ns[0]) / 1e9
    return point.latency_us / 1e6


def _inside(value: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= value <= ends[1]


def _three_rounds(loops: Loops) -> dict[int, list[float]]:
    """The bare loop's medians of three rounds over the small sizes."""
    sizes = [size for size in PLAN.sizes() if size < LARGE]
    rounds = [loops.ask("bare", random.sample(sizes, k=len(sizes))) for _ in range(3)]
    return {size: [each[size] for each in rounds] for size in sizes}


def _planted(session: Session) -> Numbers:
    """What is planted: a late rank, load."""
    with _instead(session, _LATE, (1,)):
        late = session.bench(SHORT)
    quiet = session.bench(SHORT)
    with _load():
        loaded = session.bench(SHORT)
    lower = _BADGES.index(loaded.trust) > _BADGES.index(quiet.trust)
    return {
        "late found": float(late.curves[0].straggler == 1),
        "badge": float(lower or loaded.trust is _BADGES[-1]),
    }


@contextlib.contextmanager
def _instead(session: Session, cell: str, ranks: tuple[int, ...] | None) -> Iterator[None]:
    session.run_cell(cell, ranks).raise_for_error()
    try:
        yield
    finally:
        session.run_cell(_AS_IT_WAS, ranks).raise_for_error()


@contextlib.contextmanager
def _load() -> Iterator[None]:
    """A process for each core that does nothing but take time."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def _default(session: Session) -> Numbers:
    began = time.monotonic()
    first: list[float] = []

    def watch(_: float, so_far: Callable[[], BenchRun]) -> None:
        if not first and so_far().points:
            first.append(time.monotonic() - began)

    session.bench(Plan(), watch=watch)
    return {"default_s": time.monotonic() - began, "first_s": first[0]}
