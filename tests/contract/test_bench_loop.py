"""The loop on two real gloo ranks. This file is also the program that each rank runs."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ddp_notebook
from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.stats import summarise

WORLD_SIZE = 2
BAD_SIZE = 1024
"""The size that rank 1 gets wrong in the broken job."""
PLAN = Plan(max_bytes=4 * 2**20, budget_s=1.0, rounds=2, min_iterations=4, max_iterations=20)
"""4 MiB is more than is filled and checked at a time."""
DEADLINE_S = 90

Said = dict[str, Any]
"""What one rank wrote: see `run_rank`."""


# --------------------------------------------------------------------------- on the rank


def run_rank(rank: int, directory: Path) -> None:
    """A healthy benchmark, then one in which rank 1 corrupts results; writes what came of it."""
    import torch.distributed as dist

    store = f"file://{directory / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    before = torch_state()
    reports: list[list[Any]] = []
    healthy = measure_with(reports)
    said = {
        "healthy": healthy,
        "reports": reports,
        "state_before": before,
        "state_after": torch_state(),
    }
    if rank == 1:
        corrupt_all_reduce()
    said["broken"] = measure_with([])
    (directory / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def measure_with(reports: list[list[Any]]) -> dict[str, Any]:
    """One benchmark by `PLAN`; its reports are added to `reports`."""
    from ddp_notebook.bench.loop import measure

    return measure(
        PLAN.to_json(), "cpu", lambda done, total, value: reports.append([done, total, value])
    )


def corrupt_all_reduce() -> None:
    """From now on this rank's tensors of `BAD_SIZE` come out of all_reduce one too large."""
    import torch
    import torch.distributed as dist

    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        done = real(tensor, *args, **kwargs)
        if tensor.nbytes == BAD_SIZE:
            tensor[-1] += 1
        return done

    dist.all_reduce = all_reduce


def torch_state() -> dict[str, Any]:
    """What a benchmark must leave as it was."""
    import torch

    gc.collect()
    return {
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "torch_rng": torch.get_rng_state().tolist(),
        "python_rng": repr(random.getstate()),
    }


# --------------------------------------------------------------------------- in the test


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    """What the ranks of one job wrote, by rank."""
    directory = tmp_path_factory.mktemp("job")
    run_ranks(directory)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def run_ranks(directory: Path) -> None:
    """Runs every rank to its end, which must be a good one; no process outlives this."""
    home = Path(next(iter(ddp_notebook.__path__))).parent
    env = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(directory)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, f"rank {rank}: {errors}"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_every_rank_says_who_it_is_and_what_it_ran_on(job: list[Said]) -> None:
    for rank, said in enumerate(job):
        healthy = said["healthy"]
        assert (healthy["rank"], healthy["world_size"]) == (rank, WORLD_SIZE)
        assert healthy["backend"] == "gloo"


def test_every_size_is_timed_on_every_rank(job: list[Said]) -> None:
    for said in job:
        times_ns = said["healthy"]["times_ns"]
        assert list(times_ns) == [str(size) for size in PLAN.sizes()]
        assert all(isinstance(t, int) and t > 0 for times in times_ns.values() for t in times)


def test_all_ranks_agree_on_how_often_they_measure(job: list[Said]) -> None:
    counts = [
        {size: len(times) for size, times in said["healthy"]["times_ns"].items()} for said in job
    ]
    assert counts[0] == counts[1]
    least, most = PLAN.rounds * PLAN.min_iterations, PLAN.rounds * PLAN.max_iterations
    assert all(least <= count <= most for count in counts[0].values())


def test_a_healthy_job_gets_every_sum_exactly_right(job: list[Said]) -> None:
    for said in job:
        assert said["healthy"]["wrong"] == {str(size): 0 for size in PLAN.sizes()}


def test_a_rank_that_gets_wrong_results_says_so_for_the_size_it_happened_at(
    job: list[Said],
) -> None:
    for said in job:
        wrong = said["broken"]["wrong"]
        assert {size for size, count in wrong.items() if count} == {str(BAD_SIZE)}


def test_one_wrong_sum_per_round_is_rank_1s_and_wrong_zeros_reach_both(job: list[Said]) -> None:
    assert job[0]["broken"]["wrong"][str(BAD_SIZE)] == PLAN.rounds
    assert job[1]["broken"]["wrong"][str(BAD_SIZE)] == 2 * PLAN.rounds


def test_every_measurement_is_reported(job: list[Said]) -> None:
    total = PLAN.rounds * len(PLAN.sizes())
    for said in job:
        assert said["reports"] == [[done + 1, total, {}] for done in range(total)]


def test_nothing_of_torch_is_changed_and_no_tensor_is_left(job: list[Said]) -> None:
    for said in job:
        assert said["state_after"] == said["state_before"]


def test_what_the_ranks_return_can_be_summarised(job: list[Said]) -> None:
    result = summarise([said["healthy"] for said in job], "cpu")
    assert [p.size_bytes for p in result.points] == list(PLAN.sizes())
    assert all(p.wrong == 0 and p.latency_us > 0 for p in result.points)
    broken = summarise([said["broken"] for said in job], "cpu")
    assert {p.size_bytes: p.wrong for p in broken.points}[BAD_SIZE] == 3 * PLAN.rounds


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
