"""Cells on four real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_notebook.errors import CellFailed, CellSyntaxError, UsageMistake
from ddp_notebook.model import OutputGroup
from ddp_notebook.session import Session


def shown(groups: tuple[OutputGroup, ...]) -> dict[tuple[int, ...], list[str]]:
    """Texts by the ranks they are shown for."""
    return {
        g.ranks: [item.text or item.data.get("text/plain", "") for item in g.items] for g in groups
    }


def outputs(session: Session, source: str, **how: Any) -> dict[tuple[int, ...], list[str]]:
    result = session.run_cell(source, **how)
    result.raise_for_error()
    return shown(result.outputs)


def test_the_usual_names_are_there(ranks4: Session) -> None:
    source = "(world_size, str(device), torch.__name__, dist.get_world_size(), DDP.__name__)"
    expected = "(4, 'cpu', 'torch', 4, 'DistributedDataParallel')"
    assert outputs(ranks4, source) == {(0, 1, 2, 3): [expected]}


def test_equal_output_is_shown_once_and_the_last_value_per_rank(ranks4: Session) -> None:
    assert outputs(ranks4, "print('hello')\nrank // 2") == {
        (0, 1): ["hello\n", "0"],
        (2, 3): ["hello\n", "1"],
    }


def test_a_semicolon_keeps_the_last_value_quiet(ranks4: Session) -> None:
    assert outputs(ranks4, "rank;") == {}


def test_the_last_value_is_underscore(ranks4: Session) -> None:
    outputs(ranks4, "41")
    assert outputs(ranks4, "_ + 1") == {(0, 1, 2, 3): ["42"]}


def test_a_cell_runs_on_the_ranks_it_is_for(ranks4: Session) -> None:
    assert outputs(ranks4, "print(rank)", ranks=(0, 2)) == {(0,): ["0\n"], (2,): ["2\n"]}


def test_variables_live_on_from_cell_to_cell(ranks4: Session) -> None:
    outputs(ranks4, "kept = rank * 10")
    assert outputs(ranks4, "kept", ranks=(3,)) == {(3,): ["30"]}


def test_magics_and_the_shell_work_on_ranks(ranks4: Session) -> None:
    source = "!echo from the shell\nlines = !echo two\n%env DDP_NOTEBOOK_MARK=1\nlines[0]"
    got = outputs(ranks4, source, ranks=(1,))[(1,)]
    assert "from the shell" in got[0]
    assert got[-1] == "'two'"


def test_a_loop_for_windows_is_refused_and_the_rank_takes_the_next_cell(ranks4: Session) -> None:
    (said,) = outputs(ranks4, "%gui tk")[0, 1, 2, 3]
    assert "A rank has no display" in said
    assert outputs(ranks4, "%gui asyncio\nprint('here')") == {(0, 1, 2, 3): ["here\n"]}


def test_top_level_await_works_on_ranks(ranks4: Session) -> None:
    source = "import asyncio\nasync def f():\n    return rank\nawait asyncio.sleep(0)\nawait f()"
    assert outputs(ranks4, source, ranks=(0, 1)) == {(0,): ["0"], (1,): ["1"]}


def test_an_error_in_an_awaited_cell_is_told_like_any_other(ranks4: Session) -> None:
    result = ranks4.run_cell("import asyncio\nawait asyncio.sleep(0)\n1 / 0", ranks=(2,))
    assert str(result.error) == "rank 2 raised ZeroDivisionError: division by zero (cell line 4)."


def test_stderr_warnings_and_subprocesses_are_seen(ranks4: Session) -> None:
    source = (
        "import os, subprocess, sys, warnings\n"
        "print('to stderr', file=sys.stderr)\n"
        "warnings.warn('careful')\n"
        "subprocess.run(['echo', 'a child'])\n"
        "os.write(2, b'from C\\n');"
    )
    got = "".join(outputs(ranks4, source, ranks=(0,))[(0,)])
    for part in ("to stderr", "UserWarning: careful", "a child", "from C"):
        assert part in got


def test_output_of_forked_workers_is_seen(ranks4: Session) -> None:
    source = (
        "from torch.utils.data import DataLoader\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i):\n"
        "        print('worker item', i, flush=True)\n"
        "        return i\n"
        "sum(int(b) for b in DataLoader(Data(), num_workers=1))"
    )
    got = outputs(ranks4, source, ranks=(0,))[(0,)]
    assert "worker item 1" in "".join(got)
    assert got[-1] == "1"


def test_a_progress_bar_leaves_one_line(ranks4: Session) -> None:
    source = (
        "import sys\nfor i in range(4):\n    print(f'\\r{i}/3', end='', file=sys.stderr)\nprint()"
    )
    assert outputs(ranks4, source, ranks=(0,))[(0,)][0] == "3/3"


def test_tqdm_writes_text_on_ranks(ranks4: Session) -> None:
    source = "from tqdm.auto import tqdm\nfor _ in tqdm(range(3), ascii=True):\n    pass"
    got = outputs(ranks4, source, ranks=(0,))[(0,)]
    assert "100%|##########| 3/3" in got[0]


def test_figures_are_shown_as_figures(ranks4: Session) -> None:
    result = ranks4.run_cell("import matplotlib.pyplot as plt\nplt.plot([1, 2]);", (0,))
    result.raise_for_error()
    items = [item for g in result.outputs for item in g.items]
    assert [item.data["image/png"][:8] for item in items if "image/png" in item.data] == [
        "iVBORw0K"
    ]


def test_rich_displays_keep_their_html_and_can_be_updated(ranks4: Session) -> None:
    source = (
        "from IPython.display import HTML, display\n"
        "handle = display(HTML('<b>one</b>'), display_id=True)\n"
        "handle.update(HTML('<b>two</b>'))"
    )
    result = ranks4.run_cell(source)
    result.raise_for_error()
    assert [(g.ranks, [i.data["text/html"] for i in g.items]) for g in result.outputs] == [
        ((0, 1, 2, 3), ["<b>two</b>"])
    ]


def test_an_error_on_one_rank_names_it_and_the_others_finish(ranks4: Session) -> None:
    result = ranks4.run_cell("done = 0\nif rank == 2:\n    raise ValueError('bad batch')\ndone = 1")
    assert isinstance(result.error, CellFailed)
    assert result.error.ranks == (2,)
    assert str(result.error) == (
        "rank 2 raised ValueError: bad batch (cell line 4); ranks 0, 1 and 3 finished."
    )
    assert outputs(ranks4, "done") == {(0, 1, 3): ["1"], (2,): ["0"]}


def test_each_distinct_traceback_is_shown_once_with_its_source_line(ranks4: Session) -> None:
    source = "def train():\n    raise KeyError(rank // 2)\n\ntrain()"
    result = ranks4.run_cell(source, number=12, magic_line="%%ddp --ranks all")
    assert [g.ranks for g in result.tracebacks] == [(0, 1), (2, 3)]
    traceback = result.tracebacks[0].items[0].text
    for part in ("In[12]", "raise KeyError(rank // 2)", "%%ddp --ranks all"):
        assert part in plain(traceback)


def plain(text: str) -> str:
    from ddp_notebook.views.ansi import strip_ansi

    return strip_ansi(text)


def test_tracebacks_name_the_same_file_on_all_ranks(ranks4: Session) -> None:
    source = "import sys\nsys._getframe().f_code.co_filename"
    assert outputs(ranks4, source, number=5) == {(0, 1, 2, 3): ["'<ddp cell 5>'"]}


def test_a_cell_is_one_code_object(ranks4: Session) -> None:
    source = "import sys\na = sys._getframe().f_code\nb = sys._getframe().f_code\na is b"
    assert outputs(ranks4, source) == {(0, 1, 2, 3): ["True"]}


def test_sys_exit_ends_the_cell_and_not_the_rank(ranks4: Session) -> None:
    result = ranks4.run_cell("import sys\nsys.exit(3)", ranks=(1,))
    assert "rank 1 raised SystemExit: 3" in str(result.error)
    assert outputs(ranks4, "rank", ranks=(1,)) == {(1,): ["1"]}


def test_a_syntax_error_is_said_before_any_rank_runs(ranks4: Session) -> None:
    with pytest.raises(CellSyntaxError, match="cell line 3"):
        ranks4.run_cell("touched = True\nfor x in\n")
    assert outputs(ranks4, "'touched' in globals()") == {(0, 1, 2, 3): ["False"]}


def test_a_rank_that_does_not_exist_is_refused(ranks4: Session) -> None:
    with pytest.raises(UsageMistake, match="Rank 7 does not exist: world size is 4"):
        ranks4.run_cell("x = 1", ranks=(7,))


def test_an_empty_cell_does_nothing(ranks4: Session) -> None:
    assert outputs(ranks4, "\n  \n") == {}


def test_too_much_output_is_cut_and_can_be_had(ranks4: Session) -> None:
    source = "for i in range(60_000):\n    print('a line of output, number', i)"
    result = ranks4.run_cell(source, ranks=(0,))
    result.raise_for_error()
    text = result.outputs[0].items[0].text
    assert len(text) <= 1_001_000
    assert result.withheld_bytes[0] > 500_000
    assert text.endswith("number 59999\n")
    whole = ranks4.output(0)
    assert whole.splitlines()[30_000] == "a line of output, number 30000"
    assert len(whole.splitlines()) == 60_000


def test_what_a_rank_keeps_of_earlier_cells_has_bounds(ranks4: Session) -> None:
    ranks4.run_cell(
        "from ddp_notebook.rank import engine_private\n"
        "from ddp_notebook.rank.collectives import call_sites\n"
        "kept, engine_private.INPUTS = engine_private.INPUTS, 3\n"
        "call_sites._MOST_BETWEEN_RUNS = 3"
    ).raise_for_error()
    ranks4.run_cell("def one():\n    return 1").raise_for_error()
    for _ in range(16):
        ranks4.run_cell("print(one())\ndist.all_reduce(torch.ones(1))").raise_for_error()
    ranks4.run_cell(
        "import gc, inspect, linecache\n"
        "shell = get_ipython()\n"
        "sources = [name for name in linecache.cache if name.startswith('<ddp cell')]\n"
        "inputs = [name for name in globals() if name.startswith('_i') and name[2:].isdigit()]\n"
        "(sites,) = (o for o in gc.get_objects() if type(o).__name__ == 'CallSites')\n"
        "counts = [len(shell.history_manager.input_hist_raw), len(inputs), len(sites._codes)]\n"
        "texts = sum(map(len, shell.history_manager.outputs.values()))\n"
        "here = inspect.getsource(one)\n"
        "engine_private.INPUTS, call_sites._MOST_BETWEEN_RUNS = kept, 100"
    ).raise_for_error()
    assert max(ranks4.pull("counts")[0]) <= 8
    assert len(ranks4.pull("sources")[0]) <= 8, "and those that define functions"
    assert ranks4.pull("texts")[0] == 0, "what was printed is the notebook's to keep"
    assert ranks4.pull("here")[0] == "def one():\n    return 1\n"


def test_values_are_pushed_and_pulled(ranks4: Session) -> None:
    ranks4.push({"table": {"a": [1, 2]}}, ranks=(0, 1))
    assert outputs(ranks4, "table['a'][1] + rank", ranks=(0, 1)) == {(0,): ["2"], (1,): ["3"]}
    assert ranks4.pull("table", (1,)) == {1: {"a": [1, 2]}}


def test_tensors_arrive_as_numpy_arrays(ranks4: Session) -> None:
    outputs(ranks4, "t = {'w': torch.ones(2) * rank, 'b': [torch.zeros(1, dtype=torch.bfloat16)]}")
    values = ranks4.pull("t")
    assert values[3]["w"].tolist() == [3.0, 3.0]
    assert values[0]["b"][0].tolist() == [0.0]
    assert type(values[0]["w"]).__module__ == "numpy"


class Rude:
    """Sent as `made_of` says, or not at all."""

    def __init__(self, made_of: tuple[Any, ...] | None) -> None:
        self.made_of = made_of

    def __reduce__(self) -> tuple[Any, ...]:
        if self.made_of is None:
            raise RuntimeError("no pickle")
        return self.made_of


def test_what_cannot_be_sent_is_said(ranks4: Session) -> None:
    with pytest.raises(UsageMistake, match=r"gen is a generator, which cannot be sent.*%%ddp"):
        ranks4.push({"gen": (i for i in range(3))})
    with pytest.raises(UsageMistake, match=r"bad is a Rude, which cannot be sent.*: no pickle\."):
        ranks4.push({"bad": Rude(None)})
    with pytest.raises(UsageMistake, match=r"A rank cannot take worse: ValueError: invalid"):
        ranks4.push({"worse": Rude((int, ("x",)))})
    with pytest.raises(UsageMistake, match=r"A rank cannot take worse: ValueError: invalid"):
        ranks4.push({"worse": Rude((int, ("x",)))}, ranks=(1,))
    outputs(ranks4, "class Own: pass\nown = Own()")
    with pytest.raises(UsageMistake, match=r"own cannot be made in the notebook: AttributeError"):
        ranks4.pull("own")
    outputs(ranks4, "empty = torch.ones(1, device='meta')")
    with pytest.raises(UsageMistake, match=r"ranks 0-3: a Tensor cannot be sent: Cannot copy"):
        ranks4.pull("empty")
    outputs(ranks4, "stream = (i for i in range(3))")
    with pytest.raises(UsageMistake, match=r"ranks 0-3: a generator cannot be sent"):
        ranks4.pull("stream")
    with pytest.raises(UsageMistake, match=r"ranks 0-3: there is no such variable"):
        ranks4.pull("nothing_of_that_name")
    with pytest.raises(UsageMistake, match="is not the name of a variable"):
        ranks4.pull("a b")


def test_ddp_trains_and_replicas_stay_equal(ranks4: Session) -> None:
    source = (
        "torch.manual_seed(0)\n"
        "model = DDP(torch.nn.Linear(4, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    torch.manual_seed(100 * rank + step)\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(8, 4)).pow(2).mean().backward()\n"
        "    optimizer.step()\n"
        "[p.sum().item() for p in model.parameters()]"
    )
    assert list(outputs(ranks4, source)) == [(0, 1, 2, 3)]
