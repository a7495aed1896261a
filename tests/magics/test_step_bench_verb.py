"""`%ddp_bench --model`: in a real shell."""

from __future__ import annotations

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


def test_training_steps_are_measured_shown_and_returned(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.run_cell("%ddp_init --world-size 2 --device cpu").success
    for call, expected in (
        ("%ddp_bench --batch 8,x", "UsageError: '8,x' is not a list of batch sizes"),
        ("%ddp_bench --bucket-mb 0", "UsageError: '0' is not a list of bucket sizes"),
        ("%ddp_bench --model no-name", "UsageError: 'no-name' is not the name of a variable."),
        ("%ddp_bench --model net", "UsageError: net cannot be measured (ranks 0-1: there is no"),
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
