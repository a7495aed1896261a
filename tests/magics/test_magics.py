"""The magics in a real shell: values come back, displays are native, nothing is shown twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter

from ddp_notebook.model import Board
from ddp_notebook.session import BenchResult
from ddp_notebook.views.ansi import strip_ansi


def test_loading_the_extension_returns_at_once_and_loads_no_torch() -> None:
    code = (
        "import sys, time\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "import ipykernel.zmqshell, jupyter_client\n"
        "shell = InteractiveShell.instance()\n"
        "began = time.perf_counter()\n"
        "shell.run_line_magic('load_ext', 'ddp_notebook')\n"
        "print(time.perf_counter() - began, 'torch' in sys.modules)\n"
        "shell.run_line_magic('unload_ext', 'ddp_notebook')\n"
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, first, last = shown.stdout.split("\n")[:-1]
    assert first.split()[1] == last == "False"


def test_python_may_end_at_once_after_loading_the_extension() -> None:
    """What is made ready in the background has not come far by then."""
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from ddp_notebook.session import session\n"
        "session._WARM_AFTER_S = 0\n"
        "InteractiveShell.instance().run_line_magic('load_ext', 'ddp_notebook')"
    )
    # IPython complains when the shell has another environment activated.
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_init_and_status_return_a_board_that_shows_itself(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    result = shell.run_cell("%ddp_init --world-size 2 --device cpu")
    assert isinstance(result.result, Board)
    assert "2 ranks, gloo" in capsys.readouterr().out
    board = shell.run_cell("b = %ddp_status\nb").result
    assert isinstance(board, Board)
    assert board.snapshot.ready
    assert capsys.readouterr().out.count("6/6 verified") == 2


def test_what_a_magic_displays_can_be_captured(shell: Any) -> None:
    publish = "get_ipython()._ddp_notebook_magics.output.publish({'text/plain': 'a finding'})"
    shell.run_cell(f"%%capture shown\n{publish}").raise_error()
    (captured,) = shell.user_ns["shown"].outputs
    assert captured.data == {"text/plain": "a finding"}


def test_a_cell_shows_equal_output_once(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%ddp_init --world-size 2 --device cpu")
    capsys.readouterr()
    assert shell.run_cell("%%ddp\nprint('hello')\nrank").success
    shown = capsys.readouterr().out
    assert shown == "── rank 0 ──\nhello\n0\n── rank 1 ──\nhello\n1\n"
    assert shell.run_cell("%%ddp\nprint('hello')").success
    assert capsys.readouterr().out == "── ranks 0 and 1 ──\nhello\n"


def test_a_traceback_has_the_number_of_the_notebooks_own_prompt(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in ("1", "2", "%ddp_init --world-size 1 --device cpu"):
        shell.run_cell(source, store_history=True)
    capsys.readouterr()
    shell.run_cell("%%ddp\n1 / 0", store_history=True)
    shown = capsys.readouterr().out
    assert "In[4]" in strip_ansi(shown) and "\x1b[" in shown
    # Its colours are those of the notebook, or none.
    shell.run_line_magic("colors", "nocolor")
    shell.run_cell("%%ddp\n1 / 0", store_history=True)
    shown = capsys.readouterr().out
    assert "ZeroDivisionError" in shown and "\x1b[" not in shown
    shell.run_line_magic("colors", "neutral")
    # What ends the ranks says so.
    shell.run_line_magic("reload_ext", "ddp_notebook")
    assert "1 rank was ended, and its variables are gone" in capsys.readouterr().out


def test_a_cell_magic_without_a_cell_says_so_and_has_help(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert shell.run_cell("%ddp -h").success
    assert "usage: %%ddp" in capsys.readouterr().out
    assert not shell.run_cell("%ddp --ranks 0").success
    assert "%%ddp takes a cell" in capsys.readouterr().err


def test_values_move_both_ways(shell: Any) -> None:
    shell.run_cell("%ddp_init --world-size 2 --device cpu")
    shell.run_cell("table = {'lr': 0.5}\n%ddp_push table")
    shell.run_cell("%%ddp\nlr = table['lr'] * (rank + 1)")
    assert shell.run_cell("%ddp_pull lr").result == {0: 0.5, 1: 1.0}
    assert shell.run_cell("%ddp_pull lr --ranks 1 --as second").result == 1.0
    assert shell.user_ns["second"] == 1.0


def test_bench_returns_a_result_that_shows_figure_and_table(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%ddp_init --world-size 2 --device cpu")
    capsys.readouterr()
    began = time.monotonic()
    result = shell.run_cell("%ddp_bench --max 64K --step 4 --budget 3s").result
    assert time.monotonic() - began < 60
    assert isinstance(result, BenchResult)
    assert [point.size_bytes for point in result.points][:2] == [4, 16]
    assert all(point.wrong == 0 for point in result.points)
    assert all(point.latency_us > 0 for point in result.points)
    shown = capsys.readouterr().out
    assert "all_reduce of float32, 2 ranks, gloo on cpu" in shown


def test_output_that_was_too_long_can_be_saved(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    shell.run_cell("%ddp_init --world-size 1 --device cpu")
    capsys.readouterr()
    shell.run_cell("%%ddp\nfor i in range(200_000):\n    print('number', i)")
    shown = capsys.readouterr().out
    assert "Rank 0 wrote" in shown
    assert "%ddp_output --ranks 0" in shown
    shell.run_cell(f"%ddp_output --ranks 0 --save {tmp_path}/all.txt")
    assert (tmp_path / "all.txt").read_text().count("\n") == 200_000
    shell.run_cell("%ddp_output --ranks 0 --tail 1")
    assert capsys.readouterr().out.endswith("number 199999\n")


def test_shutting_down_twice_is_fine(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%ddp_init --world-size 1 --device cpu")
    capsys.readouterr()
    assert shell.run_cell("%ddp_shutdown").success
    assert capsys.readouterr().out == "All ranks have ended.\n"
    assert shell.run_cell("%ddp_shutdown").success
    assert capsys.readouterr().out == "There were no ranks.\n"


def test_tab_completes_options_ranks_and_faults(shell: Any) -> None:
    def offered(source: str) -> list[str]:
        with provisionalcompleter():
            return [each.text for each in shell.Completer.completions(source, len(source))]

    assert offered("%ddp_init --worl") == ["--world-size"]
    assert offered("x = 1\n%ddp_init --backend g") == ["gloo"]
    assert offered("%ddp_fault duplicate-r") == ["duplicate-rank"]
    assert "all" in offered("%%ddp --ranks a")
    assert "all" not in offered("%%ddp\n%%ddp --ranks a"), "a cell's magic is on its first line"


def test_a_question_mark_shows_the_page_of_help(shell: Any) -> None:
    magic = shell.find_line_magic("ddp_init")
    page = shell.inspector.info(magic)["docstring"]
    assert page.startswith("usage: %ddp_init")
    assert "%ddp_init --world-size 4 --step stage by stage" in " ".join(page.split())
    assert "--master-port" in page


def test_the_tour_names_five_things(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%ddp_tour")
    assert "%ddp_fault duplicate-rank" in capsys.readouterr().out
