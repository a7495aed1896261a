"""How far a benchmark's numbers can be trusted, and why not further."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ddp_notebook.bench.results import BenchPoint, Conditions, Curve, Trust
from ddp_notebook.model import counted, format_bytes

TAILED = 2.0
"""A size has a long tail when its mean is more than this times its median."""
_TAILED_SHARE = 0.25
"""Of the sizes; fewer are only noted."""
_OTHERS_FAIR = 0.10
_OTHERS_NOISY = 0.25
"""Of the cores, kept busy by processes that are not ranks."""
_CORES_PER_RANK = 2
_IMPRECISE_SHARE = 0.5
_SPREAD_NOISY = 0.25
"""Half of an interval, as a share of the median: with more nothing can be told apart."""
_SIZES_NAMED = 3

_ORDER = (Trust.GOOD, Trust.FAIR, Trust.NOISY)


def judge(curves: Sequence[Curve], conditions: Conditions) -> tuple[Trust, tuple[str, ...]]:
    """The badge, and every reason why it is not a better one, worst first."""
    points = [p for curve in curves for p in curve.points]
    load = from_load(conditions.ranks_per_host, conditions.cores, conditions.others_cpu)
    return worst_first([*load, *_from_points(points)])


def worst_first(judged: Sequence[tuple[Trust, str]]) -> tuple[Trust, tuple[str, ...]]:
    """The worst badge of all that was `judged`, and the reasons, its own first."""
    ordered = sorted(judged, key=lambda item: -_ORDER.index(item[0]))
    worst = ordered[0][0] if ordered else Trust.GOOD
    return worst, tuple(reason for _, reason in ordered)


def disturbed(conditions: Conditions) -> bool:
    """True when other processes took so much of the cores that the times are theirs as well."""
    taken, cores = conditions.others_cpu, conditions.cores
    return bool(cores) and taken is not None and taken / cores >= _OTHERS_NOISY


def from_load(
    ranks: int, cores: int | None, others_cpu: float | None
) -> Iterable[tuple[Trust, str]]:
    """What `ranks` on `cores` cores means, of which other processes kept `others_cpu` busy."""
    if cores and ranks > 1 and cores < _CORES_PER_RANK * ranks:
        yield (
            Trust.FAIR,
            f"{ranks} ranks on {counted(cores, 'core')}: with fewer than {_CORES_PER_RANK} cores "
            "per rank the ranks wait for each other's turn on a core, and small sizes say more "
            "about the machine's scheduler than about communication",
        )
    if cores and others_cpu is not None:
        share = others_cpu / cores
        if share >= _OTHERS_FAIR:
            yield (
                Trust.NOISY if share >= _OTHERS_NOISY else Trust.FAIR,
                f"other processes kept {others_cpu:.1f} of {counted(cores, 'core')} busy meanwhile",
            )


def _from_points(points: Sequence[BenchPoint]) -> Iterable[tuple[Trust, str]]:
    if not points:
        return
    wrong = [p for p in points if p.wrong]
    if wrong:
        yield (
            Trust.NOISY,
            f"results were wrong at {sizes(wrong)}: times of a wrong answer mean nothing",
        )
    tailed = [p for p in points if p.mean_us > TAILED * p.latency_us]
    if len(tailed) >= _TAILED_SHARE * len(points):
        yield (
            Trust.FAIR,
            f"at {sizes(tailed)} the mean is more than {TAILED:g} times the median: a few "
            "iterations took far longer than the rest. Compare medians, not means",
        )
    spread = statistics.median(p.spread for p in points)
    vague = [p for p in points if not p.precise]
    if spread > _SPREAD_NOISY:
        yield (
            Trust.NOISY,
            f"half of the medians are known no better than to ±{spread:.0%}",
        )
    elif len(vague) > _IMPRECISE_SHARE * len(points):
        yield (
            Trust.FAIR,
            f"at {sizes(vague)} the median was not known as well as was asked for when the "
            "budget ended. A larger --budget helps",
        )


def sizes(points: Sequence[BenchPoint]) -> str:
    """``4 B``, ``4 B, 16 B and 1 KiB``, ``7 sizes from 4 B to 1 MiB``."""
    named = list(dict.fromkeys(format_bytes(p.size_bytes) for p in points))
    *most, last = named
    if len(most) >= _SIZES_NAMED:
        return f"{len(named)} sizes from {most[0]} to {last}"
    return f"{', '.join(most)} and {last}" if most else last
