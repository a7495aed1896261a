"""How far a benchmark's numbers can be trusted, and what they mean in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ddp_notebook.bench.result import (
    BenchPoint,
    BenchRun,
    Conditions,
    Curve,
    Fit,
    Trust,
    duration,
)
from ddp_notebook.model import counted, format_bytes

_CORES_PER_RANK = 2
_NEAR_ISSUE = 1.5
"""A collective that takes at most this times as long as the host issues it is bound by the host."""
_TAILED = 2.0
"""A size has a long tail when its mean is more than this times its median."""


def judge(curves: Sequence[Curve], conditions: Conditions) -> tuple[Trust, tuple[str, ...]]:
    """Return the badge, and every reason why it is not a better one, worst first."""
    points = [p for curve in curves for p in curve.points]
    load = from_load(conditions.ranks_per_host, conditions.cores, conditions.others_cpu)
    return worst_first([*load, *_from_points(points)])


def worst_first(judged: Sequence[tuple[Trust, str]]) -> tuple[Trust, tuple[str, ...]]:
    """Return the worst badge of all that was `judged`, and the reasons, its own first."""
    order = (Trust.GOOD, Trust.FAIR, Trust.NOISY)
    ordered = sorted(judged, key=lambda item: -order.index(item[0]))
    worst = ordered[0][0] if ordered else Trust.GOOD
    return worst, tuple(reason for _, reason in ordered)


def from_load(
    ranks: int, cores: int | None, others_cpu: float | None
) -> Iterable[tuple[Trust, str]]:
    """Say what `ranks` on `cores` cores mean, of which other processes kept `others_cpu` busy."""
    if cores and ranks > 1 and cores < _CORES_PER_RANK * ranks:
        yield (
            Trust.FAIR,
            f"{ranks} ranks on {counted(cores, 'core')}: with fewer than {_CORES_PER_RANK} cores "
            "per rank the ranks wait for each other's turn on a core, and small sizes say more "
            "about the machine's scheduler than about communication",
        )
    if cores and others_cpu is not None and others_cpu >= 0.1 * cores:
        yield (
            Trust.NOISY if others_cpu >= 0.25 * cores else Trust.FAIR,
            f"other processes used {others_cpu:.1f} of {counted(cores, 'core')} during the run",
        )


def _from_points(points: Sequence[BenchPoint]) -> Iterable[tuple[Trust, str]]:
    if not points:
        return
    wrong = [p for p in points if p.wrong]
    if wrong:
        yield (
            Trust.NOISY,
            f"results were wrong at {_sizes(wrong)}: times of a wrong answer mean nothing",
        )
    tailed = [p for p in points if p.mean_us > _TAILED * p.latency_us]
    if len(tailed) >= 0.25 * len(points):  # fewer are no reason for doubt
        yield (
            Trust.FAIR,
            f"at {_sizes(tailed)} the mean is more than {_TAILED:g} times the median: a few "
            "iterations took far longer than the rest. Compare medians, not means",
        )
    spread = statistics.median(p.spread for p in points)
    vague = [p for p in points if not p.precise]
    if spread > 0.25:  # then hardly two sizes can be told apart
        yield Trust.NOISY, f"half of the medians have an error of ±{spread:.0%} or more"
    elif len(vague) > 0.5 * len(points):
        yield (
            Trust.FAIR,
            f"at {_sizes(vague)} the time budget ran out before the medians were precise enough. "
            "Try a larger --budget",
        )


def _sizes(points: Sequence[BenchPoint]) -> str:
    """``4 B``, ``4 B, 16 B and 1 KiB``, ``7 sizes from 4 B to 1 MiB``."""
    named = list(dict.fromkeys(format_bytes(p.size_bytes) for p in points))
    *most, last = named
    if len(most) >= 3:
        return f"{len(named)} sizes from {most[0]} to {last}"
    return f"{', '.join(most)} and {last}" if most else last


# -- in sentences ------------------------------------------------------------------------


def notes(run: BenchRun) -> tuple[str, ...]:
    """Return what the reader should know, in one or two sentences each; wrong results first."""
    sentences: list[str] = []
    curves, on_gpu = run.curves, run.device.startswith("cuda")
    for curve in curves:
        where = f"{curve.name}: " if len(curves) > 1 else ""
        noisy = run.trust is Trust.NOISY
        sentences += [where + text for text in _of_curve(curve, noisy=noisy)]
        if on_gpu and (bound := _bound_by_host(curve)):
            sentences.append(where + bound)
    sentences += _buckets(run)
    if run.links:
        sentences.append(_limit(run))
    if len(curves) == 1 and curves[0].world_size == 1:
        sentences.append("One rank sends nothing: these are the times of the call alone.")
    return tuple(sentences)


def _of_curve(curve: Curve, *, noisy: bool) -> Iterable[str]:
    wrong = [p for p in curve.points if p.wrong]
    if wrong:
        first = wrong[0]
        yield (
            f"{curve.op} gave wrong results: {first.wrong:,} elements at "
            f"{format_bytes(first.size_bytes)}"
            + (f", and more at {_sizes(wrong[1:])}." if len(wrong) > 1 else ".")
        )
    if curve.straggler is not None:
        yield (
            f"Rank {curve.straggler} joins {duration(curve.straggler_late_us / 1e6)} after the "
            "others at most sizes: they wait for it, so this measures its delay."
        )
    if curve.fit is not None:
        yield "Roughly, as the run was noisy: " * noisy + _explained(curve.fit)
    elif curve.no_fit and curve.world_size > 1:
        yield f"No latency/bandwidth estimate: {curve.no_fit}."
    if not curve.operation.sized and curve.points:
        yield f"A barrier takes {duration(curve.points[0].latency_us / 1e6)}."


def _buckets(run: BenchRun) -> Iterable[str]:
    """Say what each bucket of the ranks' own models costs, by the fit of a lone all_reduce."""
    fit = run.curves[0].fit if [curve.op for curve in run.curves] == ["all_reduce"] else None
    sizes = run.bucket_bytes
    if fit is not None and sizes:
        each = (f"{duration(fit.predict(size))} ({format_bytes(size)})" for size in sizes[-6:])
        beyond = sizes[-1] > fit.to_bytes
        far = f" (beyond {format_bytes(fit.to_bytes)} nothing was measured)" if beyond else ""
        yield f"By that, the buckets of your models take {', '.join(each)}{far}."


def _bound_by_host(curve: Curve) -> str:
    """Say up to which size a GPU waits for the host to issue; empty if it does at no size."""
    # A GPU's times are those between its events. Where it is done before the host has issued the
    # next collective, they tell how fast the host issues, whatever the links could carry.
    bound = [p for p in curve.points if p.latency_us <= _NEAR_ISSUE * max(p.issue_us, default=0)]
    if not bound:
        return ""
    issue = duration(statistics.median(max(p.issue_us) for p in bound) / 1e6)
    return (
        f"Up to {format_bytes(bound[-1].size_bytes)} the host is the limit, not the GPUs: "
        f"issuing one takes {issue}, about as long as running it."
    )


def _limit(run: BenchRun) -> str:
    """Say what joins the GPUs, and how much of that the run has used."""
    if not run.limit_gb_per_s:
        return f"{run.links}."
    reached = max((p.busbw_gb_per_s for curve in run.curves for p in curve.points), default=0.0)
    return (
        f"{run.links}: a GPU sends at most {run.limit_gb_per_s:.3g} GB/s, and the highest bus "
        f"bandwidth is {reached / run.limit_gb_per_s:.0%} of it. (Where the switch adds up, NVLS, "
        "all_reduce may be above.)"
    )


def _explained(fit: Fit) -> str:
    latency, bandwidth = duration(fit.latency_s), fit.bandwidth_bytes_per_s / 1e9
    # Below an eighth of the half-bandwidth size the bytes add at most an eighth to the latency.
    flat = fit.half_bandwidth_bytes / 8
    if flat > 2 * fit.from_bytes:
        power = 1 << (int(flat).bit_length() - 1)
        words = f"Below {format_bytes(power)} you pay {latency} however little you send, and "
    else:
        words = f"Even the smallest costs {latency}, and "
    per_mib = duration(2**20 / fit.bandwidth_bytes_per_s)
    words += f"each MiB more costs {per_mib}: {bandwidth:.3g} GB/s"
    if fit.half_bandwidth_bytes <= fit.to_bytes:
        half = format_bytes(round_bytes(fit.half_bandwidth_bytes))
        words += f", half of it at {half}"
    return f"{words} (median fit error {fit.median_error:.0%})."


def round_bytes(size: float) -> int:
    """Return a computed size, to about two digits of its unit."""
    unit = 1
    while size / unit >= 1024 and unit < 2**30:
        unit *= 1024
    return max(1, round(size / unit)) * unit
