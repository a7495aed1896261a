"""`--detach` and `%ddp_wait` as a notebook shows them, in a real kernel and in a plain shell."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kernels import Kernel, Reply, seen_in
from support import GATE, HANG, begun, ipython_shell, session_of

from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.views import board as board_view

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def kernel(nothing_left_behind_by_the_module: None) -> Iterator[Kernel]:
    """A notebook with two ranks."""
    with Kernel() as made:
        made.init(2)
        yield made


@pytest.fixture
def shell(shell2: Any) -> Iterator[Any]:
    """The shell; afterwards its ranks are free."""
    yield shell2
    session = session_of(shell2)
    if not session.record.snapshot.ready:
        session.abort()


@dataclass(frozen=True)
class Region:
    """A display of an earlier cell, and what it showed when the cell ended."""

    name: str
    shown: str


def updates(kernel: Kernel, region: Region, wanted: str, within_s: float = 60) -> str:
    """Read until the region of an earlier cell shows `wanted`; what it shows then."""
    if wanted in region.shown:
        return region.shown
    deadline = time.monotonic() + within_s
    while (left_s := deadline - time.monotonic()) > 0:
        message: Mapping[str, Any] = kernel.client.get_iopub_msg(timeout=left_s)
        shown_in = message["content"].get("transient", {}).get("display_id")
        if message["msg_type"] == "update_display_data" and shown_in == region.name:
            shown = seen_in(message)
            if wanted in shown:
                return shown
    raise AssertionError(f"{wanted!r} did not appear within {within_s:g} s")


def region_of(reply: Reply) -> Region:
    """The last display of a cell that has ended."""
    displays = [each for each in reply.messages if each["msg_type"].endswith("display_data")]
    last = displays[-1]
    return Region(last["content"]["transient"]["display_id"], seen_in(last))


def detach(kernel: Kernel, cell: str, first_line: str) -> Region:
    """Run a cell that is detached; the region that shows it from then on."""
    reply = kernel.run_well(cell)
    assert first_line in reply.text
    assert "in the background" in reply.text and "%ddp_wait" in reply.text
    return region_of(reply)


def test_a_detached_cell_is_shown_where_it_was_started_until_it_ends(
    kernel: Kernel, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    region = detach(
        kernel, f"%%ddp --detach\n{GATE.format(gate=str(gate))}", "is running on ranks 0 and 1"
    )
    assert "begun" in updates(kernel, region, "begun")
    assert kernel.ask("1 + 1") == 2
    reply = kernel.run("%%ddp\nx = 1")
    assert "still in an earlier cell" in reply.evalue and "%ddp_wait" in reply.evalue
    gate.touch()
    shown = updates(kernel, region, "has finished")
    assert "after the gate" in shown
    reply = kernel.run_well("result = %ddp_wait\nprint('pending', result.pending)")
    assert "── ranks 0 and 1 ──\nbegun\nafter the gate\npending ()" in reply.text


def test_a_hang_is_explained_in_the_cell_that_was_detached_and_again_when_waited_for(
    kernel: Kernel,
) -> None:
    region = detach(kernel, f"%%ddp --detach\n{HANG}", "is running on ranks 0 and 1")
    shown = updates(kernel, region, "fix:")
    assert "all_reduce" in shown
    assert "rank 1" in kernel.run_well("%ddp_why").text
    reply = kernel.run("%ddp_wait")
    assert reply.ename == "Stuck"
    assert "fix:" in reply.text
    kernel.run_well("%ddp_abort")


def test_a_cell_that_was_stepped_shows_its_output_and_its_end_where_it_was_started(
    kernel: Kernel,
) -> None:
    cell = "%%ddp --step collective\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', x)"
    region = region_of(kernel.run_well(cell))
    assert "paused" in region.shown and "%ddp_step" in region.shown
    assert "since" not in region.shown, "no clock that stands still"
    kernel.send("%ddp_step --to end")  # what the other cell shows is read with its messages
    shown = updates(kernel, region, "has finished")
    kernel.client.get_shell_msg(timeout=60)
    assert "sum tensor([2.])" in shown
    assert "paused" not in shown
    # So it is with one that is aborted.
    region = region_of(kernel.run_well(cell))
    kernel.send("%ddp_abort")
    assert "paused" not in updates(kernel, region, "did not finish")
    kernel.client.get_shell_msg(timeout=60)


def test_a_set_up_that_was_stepped_is_complete_where_it_was_started(kernel: Kernel) -> None:
    region = region_of(kernel.run_well("%ddp_init -n 2 --step --replace --board off"))
    assert "paused" in region.shown and "%ddp_step" in region.shown
    kernel.send("%ddp_step --to verified")
    shown = updates(kernel, region, "Setup is complete")
    assert "paused" not in shown and "%ddp_step" not in shown and "<table" not in shown
    kernel.client.get_shell_msg(timeout=60)


def test_an_interrupt_of_the_waiting_stops_the_ranks(kernel: Kernel) -> None:
    detach(kernel, "%%ddp --detach\nimport time\ntime.sleep(600)", "is running on ranks 0 and 1")
    message = kernel.send("%ddp_wait")
    kernel.wait_for_text(message, "running")
    kernel.manager.interrupt_kernel()
    reply = kernel.finish(message)
    assert reply.ename == "CellInterrupted"
    assert "ranks 0 and 1 stopped" in reply.evalue
    kernel.run_well("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)")


def test_a_look_gives_control_back_and_says_what_goes_on(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    shell.run_cell(f"%%ddp --detach\n{GATE.format(gate=str(gate))}")
    begun(session_of(shell))
    capsys.readouterr()
    result = shell.run_cell("%ddp_wait --timeout 0").result
    assert isinstance(result, CellResult)
    assert result.pending == (0, 1)
    shown = capsys.readouterr().out
    assert shown.startswith("── ranks 0 and 1 ──\nbegun\n"), shown
    assert "is still running on ranks 0 and 1. Continue to wait: %ddp_wait." in shown
    assert shell.run_cell("%ddp_output --ranks 1").success
    assert capsys.readouterr().out == "── rank 1 ──\nbegun\n"
    gate.touch()
    assert shell.run_cell("%ddp_wait").success


def test_the_next_verb_tells_of_the_end_where_no_notebook_shows_it(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell(f"%%ddp --detach\n{HANG}")
    session_of(shell).runs.detached.ended.result(60)
    capsys.readouterr()
    shell.run_cell("board = %ddp_status")
    first = capsys.readouterr().out.splitlines()[0]
    assert "Cell 1 did not finish." in first and "%ddp_wait" in first
    shell.run_cell("board = %ddp_status")
    assert "did not finish" not in capsys.readouterr().out
    result = shell.run_cell("%ddp_wait")
    assert type(result.error_in_exec).__name__ == "Stuck"


STORE = """from torch.distributed.distributed_c10d import _get_default_store
if rank == 1:
    _get_default_store().get('never/set')"""


@pytest.mark.parametrize(
    ("cell", "headline", "doing", "note"),
    [
        (
            HANG,
            "rank 1 finished; rank 0 waiting",
            "all_reduce of",
            "• Rank 0 is waiting for rank 1",
        ),
        (
            STORE,
            "rank 0 finished; rank 1 waiting",
            "waiting for the store's key 'never/set'",
            "• Rank 1 is waiting",
        ),
    ],
)
def test_the_status_of_ranks_that_hang_says_who_waits_and_what_to_type(
    cell: str, headline: str, doing: str, note: str, shell: Any
) -> None:
    shell.run_cell(f"%%ddp --detach\n{cell}")
    session_of(shell).runs.detached.ended.result(60)
    shown = board_view.text(shell.run_cell("%ddp_status").result)
    assert headline in shown
    assert doing in shown and note in shown and "%ddp_why" in shown
    shell.run_cell("board = %ddp_abort")
    shown = board_view.text(shell.run_cell("%ddp_status").result)
    assert shown.splitlines()[0].endswith(": ready") and "%ddp_why" not in shown


def test_a_script_is_held_stepped_and_detached(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "print('past the barrier', sys.argv[1:])\n"
        "dist.destroy_process_group()\n"
    )
    assert shell.run_cell(f"%ddp_run --step collective {path} --detach").success
    assert "Ranks are paused before their next collective." in capsys.readouterr().out
    table = shell.run_line_magic("ddp_step", "")
    assert [row.state for row in table.rows] == ["done"]
    assert "past the barrier ['--detach']" in capsys.readouterr().out
    assert shell.run_cell(f"%ddp_run --detach {path} --epochs 2").success
    assert "job.py is running on ranks 0 and 1 in the background." in capsys.readouterr().out
    assert shell.run_cell("%ddp_wait").success
    shown = capsys.readouterr().out
    assert shown.startswith("── ranks 0 and 1 ──\npast the barrier ['--epochs', '2']\n")
    assert shown.count("past the barrier") == 1
    assert shell.run_cell("%ddp_wait").success  # as after %ddp_wait --timeout that saw its end
    assert "job.py is over. Its result again:\n" in capsys.readouterr().out
    assert shell.run_cell("%%ddp\ndist.barrier()").success


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("%ddp_wait", "UsageError: There is nothing to wait for: no cell or script"),
        ("%ddp_wait --timeout -1", "UsageError: --timeout is in seconds, 0 or more"),
        ("%ddp_wait --timeout nan", "UsageError: --timeout is in seconds, 0 or more"),
        ("%ddp_wait --timeout soon", "UsageError: --timeout needs a number"),
        ("%ddp_run --step line x.py", "UsageError: --step N and --json are for the ledger"),
        ("%ddp_run --json x.py", "UsageError: --step N and --json are for the ledger"),
        (
            "%ddp_run --python --ledger x.py",
            "UsageError: Ranks that a script starts itself do not pause",
        ),
        ("%%ddp --detach\nfor x in\n", "CellSyntaxError: invalid syntax"),
    ],
)
def test_a_wrong_call_says_what_to_type(
    shell: Any, capsys: pytest.CaptureFixture[str], call: str, expected: str
) -> None:
    assert shell.run_cell("%%ddp\npass").success  # the last run is not a detached one
    session = session_of(shell)
    if session.runs.detached is not None:
        session.runs.detached.reported = True
    capsys.readouterr()
    assert not shell.run_cell(call).success
    shown = capsys.readouterr()
    assert (shown.out + shown.err).strip().startswith(expected)


@pytest.mark.parametrize(
    ("call", "example"),
    [
        ("%ddp -h", "%%ddp --detach"),
        ("%ddp_run -h", "%ddp_run --step collective train.py"),
        ("%ddp_wait -h", "%ddp_wait --timeout 0"),
    ],
)
def test_the_help_has_an_example_that_can_be_typed(
    shell: Any, capsys: pytest.CaptureFixture[str], call: str, example: str
) -> None:
    capsys.readouterr()
    assert shell.run_cell(call).success
    assert example in " ".join(capsys.readouterr().out.split())


def test_unloading_the_extension_under_a_detached_cell_ends_it() -> None:
    with ipython_shell() as other:
        other.run_line_magic("ddp_init", "--world-size 2 --device cpu")
        session = session_of(other)
        assert other.run_cell("%%ddp --detach\nimport time\ntime.sleep(600)").success
    result = session.runs.detached.ended.result(30)
    assert str(result.error) == "The ranks were shut down. Start again: %ddp_init"


def test_without_ranks_there_is_nothing_to_wait_for(capsys: pytest.CaptureFixture[str]) -> None:
    from ddp_notebook.errors import NoSession
    from ddp_notebook.session import Session

    with pytest.raises(NoSession, match=r"%ddp_wait needs ranks.*%ddp_init"):
        Session().wait()


def test_a_ledger_is_the_value_of_the_cell_or_script_or_json(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train = (
        "from torch import nn\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "net = DistributedDataParallel(nn.Linear(4, 1))\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for i in range(3):\n    opt.zero_grad()\n    net(torch.randn(2, 4)).sum().backward()\n"
        "    opt.step()\n"
    )
    result = shell.run_cell(f"%%ddp --ledger\n{train}")
    assert result.success and result.result.rows[0].facts["held_by"] == "SGD, step 3, lr 0.1"
    assert "The last step of each optimizer on ranks 0 and 1: 2 param" in capsys.readouterr().out
    path = tmp_path / "train.py"
    path.write_text(f"import torch\ntorch.distributed.init_process_group('gloo')\n{train}")
    call = f"made = %ddp_run --ledger --step 2 {path}"
    assert shell.run_cell(call).success
    assert shell.user_ns["made"].rows[0].facts["held_by"] == "SGD, step 2, lr 0.1"
    capsys.readouterr()
    assert shell.run_cell(f"%ddp_run --ledger --json {path}").success
    shown = json.loads(capsys.readouterr().out)
    assert {"net.weight", "net.bias"} == {n for row in shown["rows"] for n in row["parameters"]}
    assert shell.run_cell(f"%ddp_run --detach --ledger {path}").success
    waited = shell.run_cell("%ddp_wait")
    assert waited.success and waited.result.ledger.rows
    assert "The last step of each optimizer" in capsys.readouterr().out


def test_a_ledger_is_shown_although_the_cell_failed(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "net = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    source += "net(torch.ones(1, 2)).sum().backward()\nopt.step()\n1 / 0"
    assert not shell.run_cell(f"%%ddp --ledger\n{source}").success
    assert "The last step of each optimizer on ranks 0 and 1" in capsys.readouterr().out
