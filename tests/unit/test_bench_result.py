"""What `%ddp_bench` returns: kept, read back, and written for other tools."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_runs import bench_run
from step_results import ABOUT, plan, ranks, summarise

from ddp_notebook.bench.plan import Plan
from ddp_notebook.errors import UsageMistake
from ddp_notebook.session import BenchResult
from ddp_notebook.session.tools.bench_result import check_export, save_steps


def result(**told: Any) -> BenchResult:
    """A result of a made-up run."""
    return BenchResult.of(bench_run(**told))


def test_a_result_is_kept_in_a_file_and_read_back_whole(tmp_path: Path) -> None:
    made = result()
    made.to_json(tmp_path / "run.json")
    again = BenchResult.read(tmp_path / "run.json")
    assert again == made
    assert again.points[0].samples is not None


def test_samples_can_be_left_out(tmp_path: Path) -> None:
    made = result()
    short = made.to_json(samples=False)
    assert len(short) < len(made.to_json()) / 2
    (tmp_path / "run.json").write_text(short)
    assert BenchResult.read(tmp_path / "run.json").points[0].samples is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is not a result of %ddp_bench"),
        ('{"kind": "other"}', "is not a result of %ddp_bench"),
        ('{"kind": "ddp_notebook bench", "version": 99}', "has format version 99"),
        ('{"kind": "ddp_notebook bench", "version": 1, "run": {"curves": 3}}', "is damaged"),
        ('{"kind": "ddp_notebook bench", "version": 1}', "is damaged"),
    ],
)
def test_a_file_that_is_no_result_says_so(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageMistake, match=message):
        BenchResult.read(path)


def test_a_baseline_is_kept_and_one_that_has_nothing_in_common_is_noted() -> None:
    before = bench_run(noise=0.01)
    assert BenchResult.of(bench_run(slower=1.2), before).baseline is before
    other = BenchResult.of(bench_run(world_size=3), before)
    assert other.baseline is None
    assert other.notes[0].startswith("No baseline is shown: it has no operation, dtype, mode and")
    elsewhere = BenchResult.of(bench_run(), replace(before, backend="nccl", device="cuda:0"))
    assert elsewhere.baseline is not None, "NCCL beside gloo is what a baseline is good for"


def test_a_file_of_the_first_release_is_read(tmp_path: Path) -> None:
    """It says more: of the machine's limits, of a thread's CPU time, of the fit's intervals."""
    wire = json.loads(result().to_json())
    run = wire["run"]
    run["conditions"]["loop_cpu"] = 0.5
    run["plan"]["tune"] = True
    run["floors"] = [{"what": "loopback TCP", "latency_us": 20.0, "source": "a plain socket"}]
    run["curves"][0] |= {"tuned": False}
    run["curves"][0]["fit"] |= {"latency_interval_s": [1e-4, 2e-4], "max_error": 0.1}
    (tmp_path / "old.json").write_text(json.dumps(wire))
    assert BenchResult.read(tmp_path / "old.json").curves == result().curves


def test_csv_has_a_line_for_each_size_of_each_curve() -> None:
    made = result(plan=Plan(ops=("all_reduce", "broadcast"), factor=16))
    lines = list(csv.DictReader(io.StringIO(made.to_csv())))
    assert len(lines) == len(made.rows()) == 2 * len(Plan(factor=16).sizes())
    assert lines[0]["op"] == "all_reduce"
    assert float(lines[0]["latency_us"]) == made.points[0].latency_us


def test_a_dataframe_has_a_row_for_each_size() -> None:
    measured = result()
    frame = measured.dataframe()
    assert list(frame.columns) == list(measured.rows()[0])
    assert frame.to_dict("records") == measured.rows()


def test_a_dataframe_without_pandas_says_what_else_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageMistake, match=r"pip install pandas.*result\.rows\(\)"):
        result().dataframe()


# -- nccl-tests' forms -------------------------------------------------------------------


def test_nccls_json_holds_what_its_readers_look_for() -> None:
    told = json.loads(result(world_size=3).to_nccl_json())
    assert told["version"] == 2
    assert told["config"]["step_factor"] == 4
    first = told["results"][0]
    assert (first["size"], first["count"], first["type"], first["redop"]) == (4, 1, "float", "sum")
    each = first["in_place_per_iter"]
    rows = each["per_process_max_times_us"]
    assert len(rows) == 3
    assert each["times_us"] == pytest.approx([max(column) for column in zip(*rows, strict=True)])
    assert each["min_us"] <= each["p50_us"] <= each["p95_us"] <= each["p99_us"] <= each["max_us"]
    assert first["in_place"]["time"] == pytest.approx(each["avg_us"])
    assert told["out_of_bounds"] == {"count": 0, "okay": "true"}


def test_what_has_a_tensor_of_its_own_to_receive_is_out_of_place() -> None:
    told = json.loads(result(plan=Plan(ops=("all_gather", "all_to_all"), factor=16)).to_nccl_json())
    assert all("out_of_place" in r and "in_place" not in r for r in told["results"])
    assert told["results"][0]["redop"] == "none"
    assert {r["experiment_name"].split()[0] for r in told["results"]} == {"all_gather", "alltoall"}


def test_training_steps_are_told_to_the_readers_of_nccls_json(tmp_path: Path) -> None:
    measured = summarise(ABOUT, ranks(plan((8, 32)), 4))
    assert "2 points" in save_steps(measured, tmp_path / "steps.nccl.json")
    told = json.loads((tmp_path / "steps.nccl.json").read_text())
    assert [each["size"] for each in told["results"]] == [ABOUT.gradient_bytes] * 2
    first, point = told["results"][0], measured.points[0]
    assert "batch 8, default bucket" in first["experiment_name"]
    each = first["in_place_per_iter"]
    assert each["p50_us"] == pytest.approx(point.step_us, abs=0.01)
    assert each["times_us"] == pytest.approx(point.times_us, abs=0.01)
    assert "per_process_max_times_us" not in each, "only the slowest rank's times are known"
    assert first["in_place"]["bus_bw"] == pytest.approx(
        1.5 * ABOUT.gradient_bytes / first["in_place"]["time"] / 1e3
    )


# -- files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.nccl.json", "a.png", "a.svg", "a.pdf"])
def test_a_result_is_written_in_the_form_of_its_name(tmp_path: Path, name: str) -> None:
    assert check_export(tmp_path / name) == ""
    assert name in result().save(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 500


def test_a_name_without_a_form_and_a_folder_that_is_not_there_are_refused(tmp_path: Path) -> None:
    assert "use .json" in check_export(tmp_path / "result.xlsx")
    assert "does not exist" in check_export(tmp_path / "none" / "a.json")
    with pytest.raises(UsageMistake, match="the ending chooses the format"):
        result().save(tmp_path / "result.xlsx")
    with pytest.raises(UsageMistake, match="does not exist"):
        result().save(tmp_path / "none" / "a.json")
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UsageMistake, match="cannot be written"):
        result().save(tmp_path / "a.json")
