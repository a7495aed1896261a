"""What `%ddp_bench` measures, against loops that do without it, in turns."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from observing import Ranks
from rows import Measurement, Numbers, Row, seconds

from ddp_notebook.bench.plan import Plan
from ddp_notebook.model.bench import BenchRun, Change, Trust
from ddp_notebook.session import BenchOptions, Session

WORLD_SIZE = 2
REPEATS = 5
LARGE = 4 * 2**20
PLAN = Plan(min_bytes=2**10, max_bytes=64 * 2**20, factor=4, budget_s=6.0)
SHORT = Plan(min_bytes=2**10, max_bytes=16 * 2**20, factor=4, budget_s=3.0)
METHODS = ("bare", "param", "stas00")
UNCHANGED = 20
TURNS = 60
TURN_SIZES = (4 * 2**20, 16 * 2**20)
_BADGES = (Trust.GOOD, Trust.FAIR, Trust.NOISY)

_SLOWER = """
kept_all_reduce = dist.all_reduce
def slower(*args, **named):
    import time
    began = time.perf_counter()
    work = kept_all_reduce(*args, **named)
    end = began + 1.2 * (time.perf_counter() - began)
    while time.perf_counter() < end:
        pass
    return work
dist.all_reduce = slower
"""
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
from ddp_notebook.agent import observer
from ddp_notebook.bench.timing import time_each
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
        with Ranks(WORLD_SIZE) as session, Loops(WORLD_SIZE) as loops:
            numbers.update(_timed_region(session))
            numbers.update(_against_loops(session, loops))
            numbers.update(_planted(session))
            numbers.update(_unchanged(session))
        with Ranks(4) as session:
            numbers.update(_default(session))
        return numbers

    def rows(self, medians: Numbers) -> list[Row]:
        """Against the bars."""
        rows = [
            compare_both_ways(f"the timed region alone, {size // 2**20} MiB", medians, size)
            for size in TURN_SIZES
        ]
        for method in METHODS:
            off = medians[f"{method} large off"]
            rows.append(
                Row(
                    f"all_reduce from 4 MiB: median against {method}, worst size",
                    f"{off:.1%} off",
                    wanted="within 5 %",
                    met=off <= 0.05,
                )
            )
        rows += [
            _share("below 4 MiB: our interval holds the bare loop's", medians["held"], 0.9),
            _share("repeats lie inside each other's intervals", medians["repeated"], 0.9),
            _share("a slowdown of 20 % is judged as such", medians["slowdown found"], 1.0),
            _share(f"{UNCHANGED} unchanged runs are judged unchanged", medians["unchanged"], 1.0),
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


def _against_loops(session: Session, loops: Loops) -> Numbers:
    """Ours and theirs in turns, in another order each time."""
    order = random.Random(1)
    ours: list[BenchRun] = []
    theirs: dict[str, list[dict[int, float]]] = {method: [] for method in METHODS}
    turns: list[Callable[[], None]] = [lambda: ours.append(session.bench(PLAN))]
    turns += [
        lambda method=method: theirs[method].append(_three_rounds(loops, method, order))
        for method in METHODS
    ]
    for _ in range(REPEATS):
        for turn in order.sample(turns, k=len(turns)):
            turn()
    numbers = {f"{m} large off": _worst_off(ours, theirs[m]) for m in METHODS}
    held, inside = [], []
    for run, bare in zip(ours, theirs["bare"], strict=True):
        for point in run.points:
            if point.size_bytes < LARGE:
                low, high = point.latency_interval_us
                held.append(low <= 1e6 * bare[point.size_bytes] <= high)
    for one, other in itertools.pairwise(ours):
        for a, b in zip(one.points, other.points, strict=True):
            inside.append(_inside(a.latency_us, b.latency_interval_us))
            inside.append(_inside(b.latency_us, a.latency_interval_us))
    return {**numbers, "held": statistics.fmean(held), "repeated": statistics.fmean(inside)}


def _inside(value: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= value <= ends[1]


def _three_rounds(loops: Loops, method: str, order: random.Random) -> dict[int, float]:
    """The median over three shuffled rounds, so that theirs see as many moments as ours."""
    sizes = list(PLAN.sizes())
    rounds = [loops.ask(method, order.sample(sizes, k=len(sizes))) for _ in range(3)]
    return {size: statistics.median(each[size] for each in rounds) for size in sizes}


def _worst_off(ours: list[BenchRun], theirs: list[dict[int, float]]) -> float:
    """The largest difference of the medians over the repeats, of the sizes from 4 MiB on."""
    worst = 0.0
    for size in (s for s in PLAN.sizes() if s >= LARGE):
        mine = statistics.median(
            p.latency_us for run in ours for p in run.points if p.size_bytes == size
        )
        other = 1e6 * statistics.median(each[size] for each in theirs)
        worst = max(worst, abs(mine / other - 1))
    return worst


def _planted(session: Session) -> Numbers:
    """What is planted: a slowdown, a late rank, load."""
    longer = replace(SHORT, budget_s=10.0)
    before = session.bench(longer)
    with _instead(session, _SLOWER, None):
        slower = session.bench(longer, BenchOptions(baseline=before))
    with _instead(session, _LATE, (1,)):
        late = session.bench(SHORT)
    quiet = session.bench(SHORT)
    with _load():
        loaded = session.bench(SHORT)
    lower = _BADGES.index(loaded.trust) > _BADGES.index(quiet.trust)
    return {
        "slowdown found": float(slower.compared()[0].change is Change.SLOWER),
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


def _unchanged(session: Session) -> Numbers:
    """Runs of the same thing, each against the one before."""
    same = []
    before = session.bench(SHORT)
    for _ in range(UNCHANGED):
        run = session.bench(SHORT, BenchOptions(baseline=before))
        same.append(run.compared()[0].change not in (Change.SLOWER, Change.FASTER))
        before = run
    return {"unchanged": statistics.fmean(same)}


def _default(session: Session) -> Numbers:
    began = time.monotonic()
    first: list[float] = []

    def watch(_: float, so_far: Callable[[], BenchRun]) -> None:
        if not first and so_far().points:
            first.append(time.monotonic() - began)

    session.bench(Plan(), watch=watch)
    return {"default_s": time.monotonic() - began, "first_s": first[0]}
