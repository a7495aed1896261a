"""What a benchmark says in sentences: the fit, stragglers, wrong results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ddp_notebook.bench.results import LOOPBACK_TCP, Conditions, Curve, Fit, Floor
from ddp_notebook.bench.trust import TAILED, sizes
from ddp_notebook.model import format_bytes

_FLAT_PART = 8
"""Below this part of the half-bandwidth size the bytes add at most an eighth to the latency."""
_LOOP_CPU = 0.3
"""Share of a core used by gloo's loop thread: moving the bytes of small sizes takes far less."""
SMALL_BYTES = 64 * 2**10


def notes(
    curves: Sequence[Curve], conditions: Conditions, floors: Sequence[Floor]
) -> tuple[str, ...]:
    """What the reader should know, in one or two sentences each; wrong results first."""
    several = len(curves) > 1
    sentences: list[str] = []
    for curve in curves:
        where = f"{curve.name}: " if several else ""
        sentences += [where + text for text in _of_curve(curve, floors)]
    sentences += _tuning(curves)
    sentences += _spinning(curves, conditions)
    if len(curves) == 1 and curves[0].world_size == 1:
        sentences.append("One rank sends nothing: these are the times of the call alone.")
    return tuple(sentences)


def _of_curve(curve: Curve, floors: Sequence[Floor]) -> Iterable[str]:
    wrong = [p for p in curve.points if p.wrong]
    if wrong:
        first = wrong[0]
        yield (
            f"{curve.op} gave wrong results: {first.wrong:,} elements at "
            f"{format_bytes(first.size_bytes)}"
            + (f", and more at {sizes(wrong[1:])}." if len(wrong) > 1 else ".")
        )
    if curve.straggler is not None:
        yield (
            f"Rank {curve.straggler} brings its part {duration(curve.straggler_late_us / 1e6)} "
            "after the others, at most sizes: they wait for it, and what is measured is its delay."
        )
    if curve.fit is not None:
        yield explained(curve.fit)
        yield from _against_floor(curve, floors)
    elif curve.no_fit and curve.world_size > 1:
        yield f"No latency and bandwidth are given: {curve.no_fit}."
    if not curve.operation.sized and curve.points:
        yield f"A barrier takes {duration(curve.points[0].latency_us / 1e6)}."


def explained(fit: Fit) -> str:
    """A fit in words."""
    latency, bandwidth = duration(fit.latency_s), fit.bandwidth_bytes_per_s / 1e9
    half = fit.half_bandwidth_bytes
    flat = half / _FLAT_PART
    words = ""
    if flat > 2 * fit.from_bytes:
        power = 1 << (int(flat).bit_length() - 1)
        words = f"Below {format_bytes(power)} you pay {latency} however little you send. "
    else:
        words = f"Even the least costs {latency}. "
    per_mib = duration(2**20 / fit.bandwidth_bytes_per_s)
    words += f"Large tensors move at {bandwidth:.3g} GB/s: each MiB more costs {per_mib}"
    if half <= fit.to_bytes:
        words += f". Half of that speed takes {format_bytes(round_bytes(half))} at a time"
    return words + f". (The model is off by {fit.median_error:.0%} at half of the sizes.)"


def _against_floor(curve: Curve, floors: Sequence[Floor]) -> Iterable[str]:
    """How the results compare with a plain socket."""
    tcp = next(
        (f for f in floors if f.what == LOOPBACK_TCP and f.latency_us and f.bandwidth_gb_per_s),
        None,
    )
    passes = curve.operation.ring_passes
    if tcp is None or curve.fit is None or not passes or not curve.points:
        return
    steps = passes * (curve.world_size - 1)
    best = max(p.busbw_gb_per_s for p in curve.points)
    ideal_us = steps * tcp.latency_us
    share = best / tcp.bandwidth_gb_per_s
    if share > 1:  # the machine was busier while the socket was measured
        return
    yield (
        f"A plain TCP socket here takes {duration(tcp.latency_us / 1e6)} one way and carries "
        f"{tcp.bandwidth_gb_per_s:.3g} GB/s: a ring of {curve.world_size} ranks cannot do better "
        f"than {duration(ideal_us / 1e6)} by it, and gets {share:.0%} of its bandwidth."
    )


def _tuning(curves: Sequence[Curve]) -> Iterable[str]:
    """The effect of SCHED_BATCH, if both policies were measured."""
    for after in curves:
        before = next(
            (c for c in curves if not c.tuned and c.key[:-1] == after.key[:-1] and after.tuned),
            None,
        )
        if before is None:
            continue
        pairs = [
            (b, a)
            for b in before.points
            for a in after.points
            if a.size_bytes == b.size_bytes and b.mean_us and b.latency_us
        ]
        faster = [p for p in pairs if p[1].latency_interval_us[1] < p[0].latency_interval_us[0]]
        slower = [p for p in pairs if p[1].latency_interval_us[0] > p[0].latency_interval_us[1]]
        if not pairs:
            continue
        means = [a.mean_us / b.mean_us for b, a in pairs]
        yield (
            "With gloo's loop thread under SCHED_BATCH the mean time is "
            f"{statistics.median(means):.2f} times what it was (median over sizes). The median is "
            f"faster at {len(faster)} of {len(pairs)} sizes and slower at {len(slower)}. The "
            "thread is as it was before: this was a measurement."
        )


def _spinning(curves: Sequence[Curve], conditions: Conditions) -> Iterable[str]:
    """Whether gloo's loop thread spins: long tails at small sizes and a busy core are its signs."""
    small = [
        p
        for c in curves
        for p in c.points
        if not c.tuned and p.size_bytes <= SMALL_BYTES and p.count > 1
    ]
    tailed = [p for p in small if p.mean_us > TAILED * p.latency_us]
    loop = conditions.loop_cpu
    if loop is not None and loop > _LOOP_CPU and len(tailed) > len(small) / 3:
        yield (
            f"Gloo's loop thread used {loop:.0%} of a core on a rank, and small sizes have means "
            "far above their medians: it spins for whole time slices when cores are short. "
            "%ddp_bench --tune shows what SCHED_BATCH on that thread changes."
        )


def duration(seconds: float) -> str:
    """A time to three digits: ``280 µs``, ``1.2 ms``, ``3 s``."""
    for unit, worth in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= worth * 0.9995:
            return f"{float(f'{seconds / worth:.3g}'):g} {unit}"
    return f"{float(f'{seconds * 1e6:.3g}'):g} µs"


def round_bytes(size: float) -> int:
    """A computed size, to about two digits of its unit."""
    unit = 1
    while size / unit >= 1024 and unit < 2**30:
        unit *= 1024
    return max(1, round(size / unit)) * unit
