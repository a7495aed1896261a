"""The verbs of setup in a real shell: what they give, what they say, and every wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from results import said, shown_by
from support import shared_shell

from ddp_notebook.model import Board, Category, Diagnosis, Stage, Status, StepTable

Capture = pytest.CaptureFixture[str]

PROMPT = re.compile(r"^Out\[\d+\]: ", re.MULTILINE)
INIT = "%ddp_init --world-size 4"
SCRIPT = """\
import sys
import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        print("world size", int(x.item()), sys.argv[1:])
    dist.destroy_process_group()
"""


def well(shell: Any, capsys: Capture, source: str) -> tuple[Any, str]:
    """What a cell that must end well gives, and what it shows."""
    result, text = shown_by(shell, capsys, source)
    assert result.success, f"{source}\n{text}"
    return result.result, PROMPT.sub("", text)


def raised(shell: Any, capsys: Capture, source: str) -> str:
    """What the user reads of a cell that must fail, whose code may have raised."""
    result, text = shown_by(shell, capsys, source)
    assert not result.success, f"{source} should have failed"
    return text


def mistake(shell: Any, capsys: Capture, source: str) -> str:
    """What the user reads of a wrong call, which is no place for a stack."""
    text = said(shell, capsys, source)
    assert text.startswith("UsageError: "), text
    return text.removeprefix("UsageError: ")


def places(table: StepTable) -> list[tuple[str, str, tuple[int, ...]]]:
    """Of each row: the last stage passed, the state, for whom it waits."""
    return [(row.passed, row.state, row.waits_for) for row in table.rows]


# --------------------------------------------------------------------------- a shell of its own


def test_each_verb_needs_ranks_and_has_help(shell: Any, capsys: Capture) -> None:
    for call in ("step", "why", "abort", "run x.py", "wrap model", "fault wrong-port"):
        text = mistake(shell, capsys, f"%ddp_{call}")
        verb = f"%ddp_{call.split()[0]}"
        assert text == f"{verb} needs ranks, and none are running. Start them first: {INIT}"
    for name in ("init", "step", "why", "abort", "run", "wrap", "fault", "doctor"):
        assert well(shell, capsys, f"%ddp_{name} -h")[1].startswith(f"usage: %ddp_{name} [-h]")
    assert "usage:" in well(shell, capsys, "%ddp_run --store rank0 --help")[1]


def test_wrong_options_say_what_to_type(shell: Any, capsys: Capture) -> None:
    for call, expected in (
        (
            "%ddp_init --set MASTER_PORT=1",
            "--set 'MASTER_PORT=1' is not RANKS:NAME=value. Such as: --set 1:MASTER_PORT=23457 ",
        ),
        ("%ddp_init --set 1:2=3", "--set '1:2=3' is not RANKS:NAME=value."),
        (
            "%ddp_init -n 2 --set 2:RANK=0",
            "--set '2:RANK=0': Rank 2 does not exist: world size is 2, so ranks are 0 to 1.",
        ),
        ("%ddp_init --set one:RANK=0", "--set 'one:RANK=0': 'one' is not a set of ranks"),
        ("%ddp_init --store mine", "--store is session or rank0, not 'mine'"),
        ("%ddp_step --to nowhere", "--to nowhere: there is no such goal. A line: --to 42. Or one "),
        ("%ddp_step --to launched", "--to launched: there is no such goal. A line: --to 42. Or "),
        ("%ddp_why now", "%ddp_why does not take now. For example: %ddp_why "),
        ("%ddp_abort 1", "%ddp_abort does not take 1. For example: %ddp_abort "),
        (
            "%ddp_abort --rnks 1",
            "%ddp_abort has no option --rnks 1. Did you mean: %ddp_abort --ran",
        ),
        ("%ddp_run", "%ddp_run needs script. For example: %ddp_run train"),
        ("%ddp_run --store mine x.py", "--store is session or rank0, not 'mine'"),
        ("%ddp_wrap --cap", "%ddp_wrap has no option --cap. For example: %ddp_wrap model"),
        ("%ddp_wrap m --bucket-cap-mb x", "--bucket-cap-mb needs a number, not 'x'"),
        ("%ddp_fault --fix", "%ddp_fault has no option --fix. For example: %ddp_fault "),
        (
            "%ddp_fault duplicate-rnk",
            "There is no fault 'duplicate-rnk'. Did you mean duplicate-rank",
        ),
        ("%ddp_fault xyz", "There is no fault 'xyz'. The list: %ddp_fault"),
        ("%ddp_fault --repair", "%ddp_fault needs ranks, and none are running."),
    ):
        assert mistake(shell, capsys, call).startswith(expected), call


def test_the_lab_can_be_read_without_ranks(shell: Any, capsys: Capture) -> None:
    listing = well(shell, capsys, "%ddp_fault")[1]
    assert listing.startswith("The fault lab: %ddp_fault NAME, then %ddp_fault --repair")
    assert "duplicate-rank " in listing
    assert "rank 2: RANK=1" in well(shell, capsys, "%ddp_fault duplicate-rank --show")[1]
    script = well(shell, capsys, "%ddp_fault missing-rank --show")[1]
    assert "dist.init_process_group" in script
    assert "class Net" in well(shell, capsys, "%ddp_fault model-order --show")[1]
    assert "(Simulated: " in well(shell, capsys, "%ddp_fault other-version --show")[1]


def test_set_up_is_stepped_through_rank_by_rank(shell: Any, capsys: Capture) -> None:
    table, shown = well(shell, capsys, "%ddp_init -n 3 --device cpu --step")
    assert places(table) == [("launched", "paused", ())] * 3
    assert "next: %ddp_step" in shown
    assert Stage.ENVIRONMENT.about in shown
    assert Stage.ENVIRONMENT.link in shown

    table, _ = well(shell, capsys, "%ddp_step --ranks 0,2")
    assert [row.passed for row in table.rows] == ["environment", "launched", "environment"]

    table, shown = well(shell, capsys, "%ddp_step --ranks 0,2 --to process-group")
    assert places(table) == [
        ("store", "waiting", (1,)),
        ("launched", "paused", ()),
        ("store", "waiting", (1,)),
    ]
    assert "in rendezvous" in shown
    assert "next: %ddp_step --ranks 1" in shown

    diagnosis, shown = well(shell, capsys, "%ddp_why")
    (finding,) = diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.STRAGGLER, (1,))
    assert finding.waiting == (0, 2)
    assert finding.passing, "who is held by the user is not to blame"
    assert "%ddp_step --ranks 1" in finding.remedy
    assert "paused (by %ddp_step)" in shown
    value, printed = well(shell, capsys, "%ddp_why --json")
    assert value is None
    assert json.loads(printed)["findings"][0]["ranks"] == [1]

    assert mistake(shell, capsys, "%ddp_step --ranks 0") == (
        "Rank 0 is not paused; rank 1 can be stepped: %ddp_step"
    )
    no_rank_7 = "Rank 7 does not exist: world size is 3, so ranks are 0 to 2."
    assert mistake(shell, capsys, "%ddp_step --ranks 7") == no_rank_7
    assert mistake(shell, capsys, "%ddp_abort --ranks 7") == no_rank_7

    table, shown = well(shell, capsys, "%ddp_step --to verified")
    assert places(table) == [("verified", "done", ())] * 3, "also those that waited for rank 1"
    assert "Setup is complete: every rank is verified." in shown
    assert mistake(shell, capsys, "%ddp_step").startswith("There is nothing to step")
    assert well(shell, capsys, "%%ddp\ndist.get_world_size()")[1] == "── ranks 0-2 ──\n3"


def test_a_set_up_that_hangs_is_explained_given_up_and_done_again(
    shell: Any, capsys: Capture
) -> None:
    """With two ranks: one cannot find the store, then one is held back."""
    text = raised(shell, capsys, "%ddp_init -n 2 --device cpu --set 1:MASTER_PORT=1")
    finding, _, error = text.partition("SetupFailed: ")
    assert "✗ Rank 1 has `MASTER_PORT=1`" in finding
    assert "[env-mismatch]" in finding
    assert error.startswith("Rank 1 has `MASTER_PORT=1`, but ")
    assert "Fix: Do not set `MASTER_PORT` on rank 1: the launcher has set it." in error
    assert "Traceback" not in text
    diagnosis, _ = well(shell, capsys, "%ddp_why")
    assert isinstance(diagnosis, Diagnosis)
    assert [(f.category, f.ranks) for f in diagnosis.findings] == [(Category.ENV_MISMATCH, (1,))]

    board, _ = well(shell, capsys, "%ddp_abort")
    assert isinstance(board, Board)
    assert not board.snapshot.with_status(Status.SETTING_UP, Status.RUNNING, Status.DEAD)
    rank_0 = board.snapshot.ranks[0].pid

    table, _ = well(shell, capsys, "%ddp_init -n 2 --device cpu --step")
    assert [row.state for row in table.rows] == ["paused", "paused"]
    table, _ = well(shell, capsys, "%ddp_step --ranks 0 --to verified")
    assert table.rows[0].state == "waiting"
    board, _ = well(shell, capsys, "%ddp_abort --ranks 0")
    assert not board.snapshot.with_status(Status.SETTING_UP)
    board, _ = well(shell, capsys, "%ddp_init -n 2 --device cpu")
    assert board.snapshot.ready
    assert board.snapshot.ranks[0].pid == rank_0, "its process was kept all along"
    assert "needs 3 ranks, and there are 2" in raised(shell, capsys, "%ddp_fault duplicate-rank")


# --------------------------------------------------------------------------- a shell with ranks


@pytest.fixture(scope="module")
def ranks_up(nothing_left_behind_by_the_module: None) -> Iterator[Any]:
    """A shell with three ranks, shared by the tests below."""
    with shared_shell(3) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training script, in the folder the shell is in."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_gets_its_own_arguments(ranks_up: Any, capsys: Capture, script: Path) -> None:
    call = '%ddp_run --store rank0 train.py --epochs 2 -h --store x --name "two words"'
    value, shown = well(ranks_up, capsys, call)
    assert value is None
    assert shown == (
        "── rank 0 ──\nworld size 3 ['--epochs', '2', '-h', '--store', 'x', '--name', 'two words']"
    )
    shown = well(ranks_up, capsys, "%ddp_run --ranks 1-2 train.py")[1]
    assert shown == "── rank 1 ──\nworld size 2 []"
    board, _ = well(ranks_up, capsys, "%ddp_status")
    assert board.snapshot.ready
    assert well(ranks_up, capsys, "%%ddp\ndist.get_world_size()")[1].endswith("3")


def test_a_script_that_leaves_or_raises_is_shown_with_its_own_lines(
    ranks_up: Any, capsys: Capture, script: Path
) -> None:
    script.with_name("leave.py").write_text("import sys\n\nsys.exit(3)\n")
    assert raised(ranks_up, capsys, "%ddp_run leave.py").endswith(
        "CellFailed: ranks 0-2 raised SystemExit: 3 (leave.py, line 3)."
    )
    script.with_name("boom.py").write_text(
        "import os\n\n\ndef half(n):\n    return n / (2 - int(os.environ['RANK']))\n\n\nhalf(8)\n"
    )
    text = raised(ranks_up, capsys, "%ddp_run boom.py")
    assert "── rank 2 ──" in text
    assert f'File "{script.with_name("boom.py")}", line 8, in <module>\n    half(8)\n' in text
    assert 'boom.py", line 5, in half\n    return n / (2 - int(os.environ' in text
    assert text.endswith(
        "CellFailed: rank 2 raised ZeroDivisionError (boom.py, line 5); ranks 0 and 1 finished."
    )
    script.with_name("fine.py").write_text("import sys\n\nsys.exit(0)\n")
    assert well(ranks_up, capsys, "%ddp_run fine.py")[1] == ""


def test_a_script_that_cannot_be_run_is_not_begun(
    ranks_up: Any, capsys: Capture, script: Path
) -> None:
    text = mistake(ranks_up, capsys, "%ddp_run trian.py")
    assert text == f"There is no script 'trian.py' in {Path.cwd()}. Here are: train.py."
    assert mistake(ranks_up, capsys, "%ddp_run --ranks 4 train.py").startswith("Rank 4 does not")
    assert mistake(ranks_up, capsys, "%ddp_run --set 1 train.py").startswith(
        "--set '1' is not RANKS:NAME=value."
    )
    assert mistake(ranks_up, capsys, "%ddp_run --set 5:A=1 train.py").startswith(
        "--set '5:A=1': Rank 5 does not exist"
    )


def test_a_script_whose_set_up_hangs_ends_the_cell_and_ranks_are_freed(
    ranks_up: Any, capsys: Capture, script: Path
) -> None:
    text = raised(ranks_up, capsys, "%ddp_run --store rank0 --set 1:RANK=0 train.py")
    assert "[duplicate-rank]" in text
    assert "\nHang: no rank can continue. " in text and text.count("both have RANK=0") == 1
    assert text.endswith("Look closer: %ddp_why. Free them: %ddp_abort (variables stay)")
    diagnosis, _ = well(ranks_up, capsys, "%ddp_why")
    assert diagnosis.findings[0].category is Category.DUPLICATE_RANK
    board, _ = well(ranks_up, capsys, "%ddp_abort")
    assert board.snapshot.ready
    assert well(ranks_up, capsys, "%ddp_run train.py")[1].endswith("world size 3 []")
    assert well(ranks_up, capsys, "%ddp_why")[0].findings == ()


def test_a_fault_is_injected_found_and_repaired_and_variables_stay(
    ranks_up: Any, capsys: Capture
) -> None:
    well(ranks_up, capsys, "%%ddp\nmine = 10 * rank")
    diagnosis, shown = well(ranks_up, capsys, "%ddp_fault duplicate-rank")
    (finding,) = diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.DUPLICATE_RANK, (2,))
    assert shown.startswith("duplicate-rank: two processes say RANK=1\n")
    assert shown.index("%ddp_fault --repair") < shown.index(
        "✗ The processes launched as ranks 1 and 2 both "
    )
    assert mistake(ranks_up, capsys, "%ddp_fault wrong-port --repair").startswith(
        "--repair is for the last fault; leave out its name"
    )
    board, shown = well(ranks_up, capsys, "%ddp_fault --repair")
    assert shown.startswith("Repaired: two processes say RANK=1. Setup succeeded.")
    assert board.snapshot.ready
    assert well(ranks_up, capsys, "%ddp_pull mine")[0] == {0: 0, 1: 10, 2: 20}

    diagnosis, _ = well(ranks_up, capsys, "%ddp_fault model-dtype")
    assert diagnosis.findings[0].category is Category.PARAM_MISMATCH
    assert well(ranks_up, capsys, "%ddp_fault --repair")[0].snapshot.ready


def test_a_model_is_wrapped_at_once_or_step_by_step(ranks_up: Any, capsys: Capture) -> None:
    well(ranks_up, capsys, "%%ddp\nnet = torch.nn.Linear(4, 2)\nother = torch.nn.Linear(4, 2)")
    table, shown = well(ranks_up, capsys, "%ddp_wrap net")
    assert places(table) == [("reducer", "done", ())]
    for number, stage in enumerate(("parameters-verified", "broadcast", "buckets", "reducer"), 1):
        assert f"── stage {number}/4, {stage} ──" in shown
    assert "net has not run a step yet." in well(ranks_up, capsys, "%ddp_wrap net")[1]
    well(ranks_up, capsys, "%%ddp\nnet(torch.ones(1, 4)).sum().backward()")
    shown = well(ranks_up, capsys, "%ddp_wrap net --buckets")[1]
    assert "Gradients became ready in this order (ranks 0-2 alike):" in shown

    table, _ = well(ranks_up, capsys, "%ddp_wrap other --step --as wrapped")
    passed = [table.rows[0].passed]
    while table.next_call == "%ddp_step":
        table, shown = well(ranks_up, capsys, "%ddp_step")
        passed.append(table.rows[0].passed)
    assert passed == ["", "parameters-verified", "broadcast", "buckets", "reducer"]
    assert shown.startswith("wrapped is a DistributedDataParallel on ranks 0-2")
    kinds = well(ranks_up, capsys, "%%ddp\ntype(other).__name__, type(wrapped).__name__")[1]
    assert kinds.endswith("('Linear', 'DistributedDataParallel')")


def test_what_cannot_be_wrapped_says_why(ranks_up: Any, capsys: Capture) -> None:
    assert mistake(ranks_up, capsys, "%ddp_wrap").startswith("%ddp_wrap needs the name of a model")
    assert mistake(ranks_up, capsys, "%ddp_wrap absent") == (
        "absent cannot be wrapped (ranks 0-2: there is no such variable). Make it on all ranks: "
        "%%ddp, then absent = ..., then %ddp_wrap absent"
    )
    assert mistake(ranks_up, capsys, '%ddp_wrap "a b"') == "'a b' is not the name of a variable."
    well(ranks_up, capsys, "%%ddp\nfresh = torch.nn.Linear(4, 2)\nodd = torch.nn.Linear(4, 2)")
    assert mistake(ranks_up, capsys, "%ddp_wrap fresh --buckets").startswith(
        "fresh is not wrapped yet"
    )
    well(ranks_up, capsys, "%%ddp --ranks 1\nodd = torch.nn.Linear(4, 3)")
    shown = well(ranks_up, capsys, "%ddp_wrap odd")[1]
    assert "odd: stage 1/4, parameters-verified, was not passed" in shown
    assert "Fix: Make `odd` on rank 1 as it is on ranks 0 and 2" in shown


def test_the_doctor_asks_the_ranks(ranks_up: Any, capsys: Capture) -> None:
    report, shown = well(ranks_up, capsys, "%ddp_doctor")
    assert report.ok
    assert report.world_size == 3
    assert "versions on ranks" in shown
    assert shown.startswith("DDP can work here (3 ranks, backend auto): ")


def test_a_script_starts_the_ranks_it_is_to_run_on(
    shell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
    )
    shell.run_line_magic("ddp_run", f"--world-size 2 {script}")
    shell.run_cell("total = %ddp_pull total\nprint('total', total[1].item())")
    assert "total 2.0" in capsys.readouterr().out
    with pytest.raises(UsageError, match="2 ranks are running, not 3"):
        shell.run_line_magic("ddp_run", f"--world-size 3 {script}")
