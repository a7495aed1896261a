"""`%ddp_bench --model`: in a real shell."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from kernels import Kernel
from results import said

from ddp_notebook.bench.steps import StepBenchResult
from ddp_notebook.magics.verbs.bench import BENCH, wants_steps


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("", False),
        ("--max 4M --budget 5", False),
        ("--model net", True),
        ("--batch 8,16", True),
        ("--bucket-mb 1,default", True),
    ],
)
def test_options_about_a_model_ask_for_training_steps(line: str, steps: bool) -> None:
    assert wants_steps(BENCH.parser.read(line)) is steps


def test_training_steps_without_ranks_say_what_to_type(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "UsageError: %ddp_bench needs ranks, and none are running. Start them first: "
    assert said(shell, capsys, "%ddp_bench --model net").startswith(expected)


def test_training_steps_are_measured_shown_returned_and_exported(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert shell.run_cell("%ddp_init --world-size 2 --device cpu").success
    for call, expected in (
        ("%ddp_bench --batch 8,x", "UsageError: '8,x' is not a list of batch sizes"),
        ("%ddp_bench --bucket-mb 0", "UsageError: '0' is not a list of bucket sizes"),
        ("%ddp_bench --model no-name", "UsageError: 'no-name' is not the name of a variable."),
        (
            "%ddp_bench --model net",
            "UsageError: net cannot be measured (ranks 0 and 1: this rank has no",
        ),
        (
            "%ddp_bench --model net --op broadcast",
            "UsageError: --op is for collectives, and this call measures training steps",
        ),
    ):
        assert said(shell, capsys, call).startswith(expected), call
    assert shell.run_cell("%%ddp\nnet = torch.nn.Linear(6, 3)").success
    capsys.readouterr()
    call = "%ddp_bench --model net --batch 4 --bucket-mb 1,default --budget 0.1"
    result = shell.run_cell(call)
    assert result.success
    shown = capsys.readouterr().out
    assert "Training steps of net: 21 parameters" in shown
    assert isinstance(result.result, StepBenchResult)
    assert result.result.buckets == ("1", "default")
    assert result.result.batches == (4,)
    for form in ("csv", "json", "svg"):
        path = tmp_path / f"steps.{form}"
        assert f"→ {path}" in said(shell, capsys, f"{call} --ranks 1 --export {path}", ok=True)
    rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
    wire = json.loads((tmp_path / "steps.json").read_text())
    assert [row["bucket"] for row in rows] == [p["bucket"] for p in wire["points"]]
    assert (wire["model"], wire["world_size"], rows[0]["world_size"]) == ("net", 1, "1")
    assert "</svg>" in (tmp_path / "steps.svg").read_text()
    said_so = said(shell, capsys, f"{call} --export {tmp_path}/steps.txt")
    assert "use .json, .csv, .png" in said_so


def test_the_steps_so_far_are_shown_while_they_are_measured() -> None:
    with Kernel() as kernel:
        kernel.init(2)
        sent = kernel.send("steps = %ddp_bench --model mlp --batch 2,4,8 --budget 300s")
        bars = kernel.amounts_shown(sent, "ms a step")
        assert bars == sorted(bars)
        kernel.manager.interrupt_kernel()
        reply = kernel.finish(sent)
        assert reply.status == "ok", reply.evalue
        assert kernel.ask("steps.problem") == "The benchmark was interrupted."
        assert kernel.ask("steps.points[0].steps") > 0
