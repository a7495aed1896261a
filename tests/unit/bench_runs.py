"""Benchmarks as ranks would have told them, for tests of what is made of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.result import BenchRun, Conditions
from ddp_notebook.bench.stats import summarise
from ddp_notebook.launch.gpu_links import Links

QUIET = {"host": "a", "seconds": 10.0, "cpu_s": 5.0, "host_cpu_s": 5.0}
"""What a rank says at the end of a run in which it was alone; two of them."""


def visits(
    plan: Plan,
    world_size: int,
    *,
    latency_s: float = 300e-6,
    bytes_per_s: float = 2e9,
    noise: float = 0.02,
    drift: float = 0.0,
    slower: float = 1.0,
    rounds: int = 5,
    iterations: int = 20,
    late: Mapping[int, float] | None = None,
    wrong: Mapping[int, int] | None = None,
    seed: int = 0,
) -> dict[int, list[dict[str, Any]]]:
    """What each rank measured: times by a latency and a bandwidth, with noise.

    `drift` is how much the rounds differ; `late` is how many seconds a rank is late with its
    part; `wrong` counts wrong elements, by size, on rank 0.
    """
    chance = random.Random(seed)
    found: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(world_size)}
    for number, curve in enumerate(plan.curves(world_size)):
        for size in curve.sizes(plan.sizes()):
            for _ in range(rounds):
                moment = chance.gauss(1, drift) if drift else 1.0
                true_s = (latency_s + size / bytes_per_s) * slower * moment
                true_s += max((late or {}).values(), default=0.0)
                times = [
                    round(true_s * max(0.2, chance.gauss(1, noise)) * 1e9)
                    for _ in range(iterations)
                ]
                for rank in range(curve.world_size):
                    found[rank].append(
                        {
                            "number": len(found[0]) - (rank > 0),
                            "curve": number,
                            "size_bytes": size,
                            "times_ns": [t - rank * 100 for t in times],
                            "issue_ns": [30_000 + round((late or {}).get(rank, 0.0) * 1e9)] * 3,
                            "wrong": (wrong or {}).get(size, 0) if rank == 0 else 0,
                        }
                    )
    return found


def bench_run(
    plan: Plan | None = None,
    world_size: int = 2,
    *,
    cores: int = 8,
    answers: Sequence[Mapping[str, Any]] = (QUIET, QUIET),
    ended: str = "",
    gpus: Links | None = None,
    **told: Any,
) -> BenchRun:
    """A run of `plan`, as `visits` makes it of what is `told`; on `gpus` with NCCL."""
    plan = plan or Plan(factor=4)
    said = dict(enumerate(answers))
    about = BenchRun(
        backend="gloo" if gpus is None else "nccl",
        device="cpu" if gpus is None else "cuda",
        links="" if gpus is None else gpus.text,
        limit_gb_per_s=0.0 if gpus is None else gpus.limit_gb_per_s,
        conditions=Conditions(cores=cores),
        ended=ended,
        started="2026-01-01T00:00:00+00:00",
        versions={"torch": "2.13.0"},
    )
    told_by = visits(plan, world_size, **told)
    return summarise(about, plan, tuple(range(world_size)), told_by, said)
