"""From all ranks' visits and answers to the whole result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.bench import notes, trust
from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.results import BenchRun, Conditions, Floor
from ddp_notebook.bench.stats import curve_of
from ddp_notebook.model import codec


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a plan was run."""

    plan: Plan
    ranks: tuple[int, ...]
    backend: str
    device: str
    cores: int
    """CPU cores the ranks of one host may use; 0 when that is not known."""
    started: str
    versions: Mapping[str, str]
    buckets_bytes: tuple[int, ...] = ()


def summarise(
    setting: Setting,
    visits: Mapping[int, Sequence[Mapping[str, Any]]],
    answers: Mapping[int, Mapping[str, Any]],
    ended: str = "",
    *,
    fitted: bool = True,
) -> BenchRun:
    """What all ranks measured together.

    `visits` are those received, by rank; `answers` are the answers to `calls.BENCH` of the ranks
    that finished. `ended` says why the run was cut short. A fit takes 50 ms, which would disturb a
    run in progress: then it is not `fitted`.
    """
    plans = setting.plan.curves(len(setting.ranks))
    curves = []
    for number, plan in enumerate(plans):
        ranks = setting.ranks[: plan.world_size]
        measured_by = [[v for v in visits.get(r, ()) if v["curve"] == number] for r in ranks]
        curves.append(curve_of(plan, ranks, measured_by, setting.plan, fitted=fitted))
    measured = tuple(curve for curve in curves if curve.points)
    conditions = _conditions(setting, visits, answers)
    badge, reasons = trust.judge(measured, conditions)
    floors = tuple(Floor(**floor) for answer in answers.values() for floor in answer["floors"])
    return BenchRun(
        backend=setting.backend,
        device=setting.device,
        world_size=len(setting.ranks),
        curves=measured,
        trust=badge,
        reasons=reasons,
        notes=notes.notes(measured, conditions, floors),
        floors=floors,
        conditions=conditions,
        ended=ended,
        buckets_bytes=setting.buckets_bytes,
        started=setting.started,
        plan=codec.encode(setting.plan),
        versions=dict(setting.versions),
    )


def _conditions(
    setting: Setting,
    visits: Mapping[int, Sequence[Mapping[str, Any]]],
    answers: Mapping[int, Mapping[str, Any]],
) -> Conditions:
    """The load during the run by the ranks' clocks, on the host with the most measurements."""
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers.values():
        hosts.setdefault(answer["host"], []).append(answer)
    others = [other for here in hosts.values() if (other := _others(here)) is not None]
    return Conditions(
        cores=setting.cores,
        ranks_per_host=max(map(len, hosts.values()), default=len(setting.ranks)),
        others_cpu=max(others, default=None),
        loop_cpu=_loop_cpu(visits),
        seconds=max((answer["seconds"] for answer in answers.values()), default=0.0),
    )


def _loop_cpu(visits: Mapping[int, Sequence[Mapping[str, Any]]]) -> float | None:
    """Cores that gloo's loop threads kept busy at small sizes, on the rank with the most."""
    shares = [
        [v["loop_cpu"] for v in own if v["size_bytes"] <= notes.SMALL_BYTES and v["loop_cpu"]]
        for own in visits.values()
    ]
    return max((statistics.median(share) for share in shares if share), default=None)


def _others(here: Sequence[Mapping[str, Any]]) -> float | None:
    """Cores kept busy by other processes on one host; None if not known."""
    seconds, busy_s = here[0]["seconds"], here[0]["host_cpu_s"]
    if busy_s is None or not seconds:
        return None
    return max(0.0, float((busy_s - sum(answer["cpu_s"] for answer in here)) / seconds))
