"""Wrong input gets a clear error with the call to type, and nothing is lost. In a real shell."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import UsageError
from results import said

from ddp_notebook.magics import register

INIT = "%ddp_init --world-size 4"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "%ddp_init --world-size 0",
            f"UsageError: World size 0 is too small: it must be 1 or more. Type: {INIT}",
        ),
        (
            "%ddp_init --world-size -1",
            f"UsageError: World size -1 is too small: it must be 1 or more. Type: {INIT}",
        ),
        (
            "%ddp_init --world-size four",
            "UsageError: --world-size needs a whole number, not 'four'. "
            f"For example: {INIT}   (all options: %ddp_init -h)",
        ),
        (
            "%ddp_init --world-size 10000",
            "UsageError: World size 10,000 is too large: one machine runs at most 256 ranks. "
            f"Type: {INIT}",
        ),
        (
            "%ddp_init --backend nccl --device cpu",
            "UsageError: NCCL moves data between GPUs only, so --backend nccl does not go with "
            "--device cpu. Type: %ddp_init --world-size 4 --backend gloo --device cpu",
        ),
        (
            "%ddp_init --master-port 70000",
            "UsageError: --master-port 70000 is not a port: ports are 1 to 65535. "
            "Leave it out and a free one is chosen.",
        ),
        (
            "%ddp_init --wrld-size 4",
            "UsageError: %ddp_init has no option --wrld-size 4. "
            f"Did you mean: {INIT}   (all options: %ddp_init -h)",
        ),
        (
            "%ddp_init --master-addr 127.0.0.1:29500",
            "UsageError: --master-addr is an address without a port. Type: --master-addr 127.0.0.1 "
            "--master-port 29500",
        ),
        (
            "%ddp_init --hosts a:2,b:2 --world-size 3",
            "UsageError: 3 ranks cannot be placed on 2 hosts that are to have 4 in all. "
            "Type: --world-size 4",
        ),
        (
            "%ddp_init --hosts=-oProxyCommand=x",
            "UsageError: '-oProxyCommand=x' is no host: a name that ssh knows",
        ),
        (
            "%ddp_init --hosts a --hostfile b",
            "UsageError: Name the hosts by --hosts or by --hostfile: one of the two.",
        ),
        (
            "%ddp_init --hostfile /nowhere/hosts",
            "UsageError: --hostfile /nowhere/hosts: No such file or directory.",
        ),
        (
            "%ddp_init --python /usr/bin/python3",
            "UsageError: --python is for other hosts: it goes with --hosts.",
        ),
        ("%ddp_init --timeout 0", "UsageError: --timeout is in seconds and must be more than 0"),
        (
            "%%ddp\nx = 1",
            f"UsageError: %%ddp needs ranks, and none are running. Start them first: {INIT}",
        ),
        (
            "%ddp_pull x",
            f"UsageError: %ddp_pull needs ranks, and none are running. Start them first: {INIT}",
        ),
        (
            "%ddp_restart --ranks 1",
            f"UsageError: %ddp_restart needs ranks, and none are running. Start them first: {INIT}",
        ),
        (
            "%ddp_bench",
            f"UsageError: %ddp_bench needs ranks, and none are running. Start them first: {INIT}",
        ),
    ],
)
def test_a_wrong_call_without_ranks_says_what_to_type(
    shell: Any, capsys: pytest.CaptureFixture[str], call: str, expected: str
) -> None:
    assert said(shell, capsys, call).startswith(expected)


def test_an_unknown_category_is_answered_with_the_likely_one(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(shell, capsys, "%ddp_why --explain shape-mismach")
    assert "There is no category 'shape-mismach'" in text
    assert "Did you mean shape-mismatch" in text and "Category." not in text
    assert "There are env-mismatch, env-invalid, " in said(shell, capsys, "%ddp_why --explain xyz")


@pytest.mark.usefixtures("no_current_folder")
def test_a_current_folder_that_is_gone_is_said_by_every_verb() -> None:
    parser = SimpleNamespace(read=lambda _: SimpleNamespace())
    verb: Any = SimpleNamespace(
        name="ddp_where",
        parser=parser,
        run=lambda *_: Path.cwd(),
        summary="",
        examples=[("", "")],
        help_page=str,
        is_python=True,
    )
    runs = SimpleNamespace(announce_end=lambda: None)
    ui: Any = SimpleNamespace(runs=runs, attached=None)
    with pytest.raises(UsageError, match=r"current folder was removed.*%cd ~"):
        register._magic(ui, verb)("")


def test_a_launcher_before_the_script_and_an_option_behind_it_are_told_where_they_belong(
    shell2: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; print('trained with', sys.argv[1:])")
    for launcher, name in (
        ("torchrun --nproc_per_node 2", "torchrun"),
        ("accelerate launch --num_processes 2", "accelerate"),
        ("mpirun -np 2 python", "mpirun"),
        ("deepspeed --num_gpus 2", "deepspeed"),
        ("-m torch.distributed.launch --nproc_per_node=2", "-m torch.distributed.launch"),
        ("-m torch.distributed.run", "-m torch.distributed.run"),
        ("python", "python"),
    ):
        text = said(shell2, capsys, f"%ddp_run {launcher} train.py --epochs 2")
        assert f"the launcher. Leave {name} out: %ddp_run train.py --epochs 2" in text
    text = said(shell2, capsys, "%ddp_run train.py --detach", ok=True)
    assert "so the script gets it" in text and "come first: %ddp_run --detach train.py" in text
    assert "trained with ['--detach']" in text
    assert "the script gets it" not in said(shell2, capsys, "%ddp_run train.py --lr 1", ok=True)


def test_ranks_at_lines_need_ranks(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for call in ("break 3", "step", "print x", "set x = 1", "frame", "where"):
        none = f"UsageError: %ddp_{call.split()[0]} needs ranks, and none are running. Start them"
        assert said(shell, capsys, f"%ddp_{call}").startswith(none)


def test_nccl_without_a_gpu_says_what_can_be_done(
    shell: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = said(shell, capsys, "%ddp_init --world-size 2 --backend nccl")
    assert text.startswith("UsageError: --backend nccl needs GPUs, and none is visible here")
    assert text.endswith("The ranks can run on CPUs: %ddp_init --world-size 2 --backend gloo")


def test_help_is_shown_and_nothing_is_done(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert shell.run_cell("%ddp_init -h").success
    text = capsys.readouterr().out
    assert "usage: %ddp_init" in text
    for option in ("--world-size", "--backend", "--master-port", "--gpus", "--threads-per-rank"):
        assert option in text


def test_wrong_calls_with_ranks_lose_nothing(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.run_cell("%ddp_init --world-size 2 --device cpu").success
    assert shell.run_cell("%%ddp\nkept = 10 + rank").success
    # Run All, once more:
    capsys.readouterr()
    assert shell.run_cell("%ddp_init --world-size 2 --device cpu").success
    again = "2 ranks run already, and keep their variables. Fresh ranks: %ddp_restart"
    assert again in capsys.readouterr().out
    shell.user_ns["gen"] = (i for i in range(3))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        for call, expected in (
            ("%ddp_init --world-size 4", "UsageError: 2 ranks are running already. Fresh ranks: "),
            (
                "%%ddp --ranks 7\nx = 1",
                "UsageError: Rank 7 does not exist: world size is 2, so ranks are 0 to 1.",
            ),
            (
                "%%ddp --ranks two\nx = 1",
                "UsageError: 'two' is not a set of ranks: write 0, 0,2, 1-3 or all.",
            ),
            (
                "%%ddp\nkept = 0\nfor x in\n",
                "CellSyntaxError: invalid syntax (cell line 3); no rank ran the cell",
            ),
            ("%ddp_push gen", "UsageError: gen is a generator, which cannot be sent to the ranks"),
            ("%ddp_push gen, nothing", "UsageError: The notebook has no variable 'nothing'."),
            ("rank = 9\n%ddp_push rank", "UsageError: rank is set by each rank's own setup"),
            ("%ddp_push nothing", "UsageError: The notebook has no variable 'nothing'."),
            ("%ddp_push x = 3", "UsageError: %ddp_push takes names: assign the variable in a line"),
            (
                "%ddp_push",
                "UsageError: %ddp_push needs names. For example: %ddp_push batch",
            ),
            (
                "%ddp_pull nothing",
                "UsageError: nothing cannot be pulled (ranks 0 and 1: there is no",
            ),
            ("%ddp_bench --max 1X", "UsageError: "),
            ("%ddp_restart --ranks 5", "UsageError: Rank 5 does not exist: world size is 2"),
            ("%ddp_mesh --ranks 5", "UsageError: Rank 5 does not exist: world size is 2"),
            ("%ddp_mesh --ranks dp=0", "UsageError: "),
            (
                "%ddp_mesh",
                "UsageError: The ranks have no device mesh, and no model with parameters.",
            ),
        ):
            text = said(shell, capsys, call)
            assert text.startswith(expected), f"{call}: {text}"
    assert shell.run_cell("%ddp_pull kept").success
    assert shell.user_ns["kept"] == {0: 10, 1: 11}
    assert shell.run_cell("%%ddp\nmodel = torch.nn.Linear(2, 2)").success
    assert shell.run_cell("%ddp_mesh").result.bytes == {0: 24, 1: 24}


def test_a_cell_that_fails_on_a_rank_fails_in_the_notebook(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.run_cell("%ddp_init --world-size 2 --device cpu").success
    capsys.readouterr()
    result = shell.run_cell("%%ddp\nif rank == 1:\n    raise ValueError('boom')\nprint('fine')")
    assert not result.success
    shown = capsys.readouterr().out
    assert shown.index("── rank 1 ──") < shown.index("fine"), "the traceback comes first"
    assert "CellFailed: rank 1 raised ValueError (cell line 3); rank 0 finished." in shown
