"""`%ddp_bench` in a real shell."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from kernels import Kernel

from ddp_notebook.bench.plan import Plan
from ddp_notebook.magics.verbs.bench import BENCH
from ddp_notebook.session import BenchResult

QUICK = "%ddp_bench --max 4K --step 8 --budget 0s"


def test_options_reach_the_plan(shell2: Any) -> None:
    line = f"{QUICK} --op broadcast,barrier --dtype bfloat16 --mode pipelined --world-sizes 1,2"
    result = shell2.run_cell(line).result
    assert isinstance(result, BenchResult)
    assert {(c.op, c.mode, c.world_size) for c in result.curves} == {
        ("broadcast", "pipelined", 1),
        ("broadcast", "pipelined", 2),
        ("barrier", "blocking", 1),
        ("barrier", "blocking", 2),
    }
    assert {c.dtype for c in result.curves} == {"bfloat16"}
    assert [p.size_bytes for p in result.points] == [4, 32, 256, 2048]


def test_a_dtype_of_more_than_4_bytes_begins_with_one_element(shell2: Any) -> None:
    assert shell2.run_cell(f"{QUICK} --dtype float64").result.points[0].size_bytes == 8


def test_a_run_is_exported_and_is_the_next_ones_baseline(
    shell2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "before.json"
    shell2.run_cell(f"{QUICK} --export {kept}")
    assert f"sizes → {kept}" in capsys.readouterr().out
    assert BenchResult.read(kept).points
    result = shell2.run_cell(f"{QUICK} --baseline {kept}").result
    assert result.baseline.points == BenchResult.read(kept).points
    assert "baseline (µs)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--max 1X", "'1X' is not a number of bytes"),
        ("--min 6", "must be a multiple of 4 bytes"),
        (
            "--min 1M --max 1K",
            "largest size, 1 KiB, is less than the smallest, 1 MiB: give a larger --max",
        ),
        ("--step 1", "--step is 1: it must be at least 2"),
        ("--op allreduce", "'allreduce' is no operation: there are all_reduce, broadcast"),
        ("--dtype fp32", "'fp32' is no dtype: there are float32"),
        ("--mode fast", "'fast' is no mode"),
        ("--budget soon", "'soon' is not a time: write 30s or 2m"),
        ("--world-sizes two", "write numbers of ranks, such as 2,4"),
        ("--world-sizes 9", "--world-sizes 9: there are 2 ranks to take part"),
        ("--ranks 7", "Rank 7 does not exist"),
        ("--backend mpi", "not 'mpi'"),
        ("--backend nccl", "NCCL moves data between GPUs only"),
        ("--max 100000G", "What fits: --max "),
        ("--export table.xlsx", "the ending chooses the format"),
        ("--export /nowhere/at/all.json", "folder /nowhere/at does not exist"),
        ("--baseline /nowhere/at/all.json", "cannot be read"),
    ],
)
def test_bad_input_says_what_is_wrong_and_what_to_type(
    shell2: Any, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    capsys.readouterr()
    assert not shell2.run_cell(f"%ddp_bench {options}").success
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
    assert "Traceback" not in shown.out + shown.err
    ours = {field.name for field in fields(Plan) if "_" in field.name} | {"factor"}
    assert not ours & set(re.findall(r"\w+", shown.out + shown.err)), "a name of our code"


def test_every_mode_in_the_help_can_be_typed(shell2: Any) -> None:
    mode = next(option for option in BENCH.options if option.names == ["--mode"])
    named = re.findall(r"([\w,]+)(?=: | for each)", mode.help)
    assert named == ["blocking", "pipelined", "blocking,pipelined"]
    for names in named:
        assert shell2.run_cell(f"{QUICK} --op barrier --mode {names}").success


def test_the_points_so_far_are_shown_and_an_interrupt_keeps_what_is_measured() -> None:
    with Kernel() as kernel:
        kernel.init(2)
        sent = kernel.send("result = %ddp_bench --budget 300s")
        points = kernel.amounts_shown(sent, "B ")
        assert points == sorted(points)
        kernel.manager.interrupt_kernel()
        reply = kernel.finish(sent)
        assert reply.status == "ok", reply.evalue
        assert kernel.ask("result.ended") == "it was interrupted"
        assert kernel.ask("len(result.points)") >= max(points)
        kernel.run_well("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x == 2")
