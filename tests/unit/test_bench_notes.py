"""How far a run is believed, and what it means in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_runs import QUIET, bench_run

from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.result import BenchRun, Trust, duration
from ddp_notebook.bench.trust import notes, round_bytes
from ddp_notebook.launch.gpu_links import GpuState, Links, Pair
from ddp_notebook.model import codec

BUSY = {**QUIET, "host_cpu_s": 45.0}
"""The host was busy for 45 core-seconds of 10 s, 10 of which were the two ranks'."""


# -- the badge ---------------------------------------------------------------------------


def test_a_quiet_run_is_good() -> None:
    run = bench_run()
    assert (run.trust, run.reasons) == (Trust.GOOD, ())


def test_load_from_other_processes_lowers_the_badge_and_says_how_much() -> None:
    run = bench_run(answers=(BUSY, BUSY))
    assert run.trust is Trust.NOISY
    assert run.reasons[0] == "other processes used 3.5 of 8 cores during the run"
    fair = {**QUIET, "host_cpu_s": 20.0}
    assert bench_run(answers=(fair, fair)).trust is Trust.FAIR


def test_fewer_than_two_cores_per_rank_deserve_a_warning() -> None:
    run = bench_run(cores=2)
    assert run.trust is Trust.FAIR
    assert "2 ranks on 2 cores: with fewer than 2 cores per rank" in run.reasons[0]
    assert bench_run(cores=4).trust is Trust.GOOD
    assert bench_run(cores=0).trust is Trust.GOOD  # not known


def test_wrong_results_make_all_times_meaningless() -> None:
    run = bench_run(wrong={4: 2, 16: 1})
    assert run.trust is Trust.NOISY
    assert run.reasons[0].startswith("results were wrong at 4 B and 16 B")
    assert run.notes[0] == "all_reduce gave wrong results: 10 elements at 4 B, and more at 16 B."


def test_medians_that_are_hardly_known_say_nothing() -> None:
    run = bench_run(drift=0.5, seed=1)
    assert run.trust is Trust.NOISY
    assert any("of the medians have an error of" in reason for reason in run.reasons)


def test_medians_that_are_not_known_well_enough_ask_for_more_time() -> None:
    run = bench_run(drift=0.08, seed=1)
    assert run.trust is Trust.FAIR
    assert any("--budget" in reason for reason in run.reasons)


def test_a_long_tail_is_said() -> None:
    plan = Plan(factor=4)
    run = bench_run(plan, noise=0.01)
    assert not any("mean" in reason for reason in run.reasons)
    tailed = bench_run(plan, noise=8.0, seed=2)
    assert any("the mean is more than 2 times the median" in reason for reason in tailed.reasons)


# -- in words ----------------------------------------------------------------------------


def test_a_fit_is_told_in_words() -> None:
    text = bench_run(noise=0.005).notes[0]
    assert text.startswith("Below 64 KiB you pay 30")
    assert "µs however little you send, and each MiB more costs 52" in text
    assert "GB/s, half of it at 58" in text or "GB/s, half of it at 59" in text
    assert text.endswith("(median fit error 0%).")
    busy = bench_run(noise=0.005, answers=(BUSY, BUSY)).notes[0]
    assert busy.startswith("Roughly, as the run was noisy: Below 64 KiB")


def test_the_users_buckets_have_the_times_that_the_fit_gives() -> None:
    run = replace(bench_run(noise=0.005), bucket_bytes=(2**20, 2**30))
    said = next(note for note in notes(run) if "buckets of your models" in note)
    fit = run.curves[0].fit
    assert fit is not None
    for size, name in ((2**20, "1 MiB"), (2**30, "1 GiB")):
        assert f"{duration(fit.predict(size))} ({name})" in said
    assert "beyond 64 MiB nothing was measured" in said
    several = bench_run(Plan(ops=("all_reduce", "broadcast"), factor=16))
    assert not any("buckets" in note for note in notes(replace(several, bucket_bytes=(2**20,))))


def test_a_straggler_is_named_in_words() -> None:
    notes = bench_run(world_size=4, late={3: 2e-3}).notes
    assert any(n.startswith("Rank 3 joins 2 ms after the others") for n in notes)


def test_one_rank_is_told_that_its_times_are_not_of_communication() -> None:
    assert "One rank sends nothing" in bench_run(world_size=1).notes[-1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(280e-6, "280 µs"), (1.234e-3, "1.23 ms"), (2.0, "2 s"), (0.0, "0 µs"), (0.9999e-3, "1 ms")],
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_computed_sizes_are_rounded_for_people() -> None:
    assert round_bytes(525_432.7) == 513 * 1024
    assert round_bytes(0.3) == 1


# -- on GPUs: what the driver says is a stand-in's -----------------------------------------------

NVLINKS = Links(
    tuple(GpuState(gpu, links=18, link_gb_per_s=26.562) for gpu in "01"),
    (Pair(("0", "1"), path=50, direct=True, nvlink=True),),
)


def test_what_joins_the_gpus_and_its_limit_stand_beside_what_was_reached() -> None:
    run = bench_run(gpus=NVLINKS, latency_s=20e-6, bytes_per_s=239e9)
    assert run.notes[-1] == (
        "NVLink joins every two (18 links of 26.6 GB/s each way per GPU): a GPU sends at most 478 "
        f"GB/s, and the highest bus bandwidth is {run.points[-1].busbw_gb_per_s / 478.116:.0%} of "
        "it. (Where the switch adds up, NVLS, all_reduce may be above.)"
    )
    unknown = Links(NVLINKS.states, (Pair(("0", "1"), path=30),))
    assert bench_run(gpus=unknown).notes[-1] == "PCIe, through a PCIe host bridge (PHB)."
    assert codec.decode(BenchRun, codec.encode(run)) == run


def test_where_the_host_issues_as_slowly_as_the_gpus_are_done_the_host_is_the_limit() -> None:
    # The host takes 30 us to issue one; a collective of 64 KiB or less takes less than 45.
    run = bench_run(gpus=Links(), latency_s=35e-6, bytes_per_s=10e9)
    (said,) = [note for note in run.notes if "the host is the limit" in note]
    assert said == (
        "Up to 64 KiB the host is the limit, not the GPUs: issuing one takes 30 µs, about as "
        "long as running it."
    )
    slow = bench_run(gpus=Links(), latency_s=300e-6)
    cpus = bench_run(latency_s=35e-6, bytes_per_s=10e9)
    assert not [note for note in (*slow.notes, *cpus.notes) if "the host is" in note]
