"""Which line, file or rank is meant: names that files share, edits, and who is only ahead."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from results import rows, values

from ddp_notebook.rank.calls import Breakpoint, How
from ddp_notebook.session import Session
from ddp_notebook.views import stacks


@pytest.fixture(autouse=True)
def nothing_set(ranks2: Session) -> Iterator[None]:
    """Each test begins without breakpoints and with idle ranks."""
    yield
    ranks2.breakpoints.clear()
    if any(not run.done for run in ranks2.runs.all):
        ranks2.abort()


def test_a_line_that_ranks_end_without_is_said_not_to_be_reached(ranks2: Session) -> None:
    ranks2.run_cell("breakpoint()\nif rank == 0:\n    x = 1\ny = 2\n")
    assert ranks2.step(to="4").title.endswith("Rank 1 did not reach line 4.")
    assert "reach" not in ranks2.step(to="end").title
    ranks2.run_cell("breakpoint()\nif rank > 1:\n    x = 1\ny = 2\n")
    assert ranks2.step(to="4").title.endswith("Ranks 0 and 1 did not reach line 4.")


def test_a_breakpoint_at_a_loop_that_begins_a_cell_stops_once_a_round(ranks2: Session) -> None:
    source = "for i in range(2):\n    a = i\n    b = a\n"
    ranks2.run_cell(source)
    ranks2.breakpoints.add("2", Breakpoint(0))
    assert "line 2: for i" in rows(ranks2.run_cell(source).steps)[(0, 1)]
    assert "line 4: b = a" in rows(ranks2.step(to="4"))[(0, 1)]
    assert "line 2: for i" in rows(ranks2.step(to="end"))[(0, 1)]
    ranks2.step(to="end")
    assert ranks2.wait(10).error is None
    (row,) = ranks2.breakpoints.rows()
    assert row.text.endswith("3 hits"), "the line is also passed when the loop ends"


def test_a_cell_that_was_edited_has_the_breakpoints_of_its_old_version(ranks2: Session) -> None:
    ranks2.run_cell("for i in range(3):\n    v = i\n    w = v\nz = 1\n")
    ranks2.breakpoints.add("4", Breakpoint(0))
    edited = "# new\nfor i in range(3):\n    v = i\n    w = v * 2\nz = 1\n"
    at = rows(ranks2.run_cell(edited).steps)
    assert "w = v * 2" in at[(0, 1)], "the line that took the place of the old one"
    ranks2.breakpoints.clear()
    ranks2.step(to="end")
    ranks2.wait(10)
    ranks2.breakpoints.add("5", Breakpoint(0))
    assert ranks2.run_cell("print('quite another cell')").steps is None
    assert ranks2.run_cell("# new\nfor i in range(3):\n    v = i\nz = 1\n").steps is None
    (row,) = ranks2.breakpoints.rows()
    assert row.text.endswith("its cell was edited and ran without this line")


def test_files_of_one_name_are_told_apart(ranks2: Session, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text("def work():\n    x = 1\n    return x\n")
        (tmp_path / folder / "__init__.py").touch()
    ranks2.run_cell(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n")
    ranks2.run_cell("import first.same, second.same")
    text = ranks2.breakpoints.add("same.py:2", Breakpoint(0)).text
    assert f"Not stopped at: {tmp_path}/second/same.py; name one with its folder" in text
    ranks2.breakpoints.add("second/same.py:3", Breakpoint(0))
    table = ranks2.run_cell("(second if rank else first).same.work()").steps
    assert table is not None
    assert "rank 0 at first/same.py, line 2; rank 1 at second/same.py, line 3" in table.title
    assert "second/same.py, line 3" in rows(table)[(1,)]
    ranks2.step(to="end")


def test_a_function_in_a_function_is_known_by_its_own_name(ranks2: Session) -> None:
    ranks2.run_cell(
        "def outer():\n    def inside(n):\n        a = n\n        return a\n"
        "    b = [inside(i) for i in range(2)]\n    c = b\n    return c\n"
    )
    ranks2.breakpoints.add("inside", Breakpoint(0, once=True))
    assert "in inside" in rows(ranks2.run_cell("outer()").steps)[(0, 1)]
    at = rows(ranks2.step(how=How.OUT))[(0, 1)]
    if sys.version_info < (3, 12):
        # A comprehension is a function of its own there; its lines are those around it.
        assert "line 6" in at
        at = rows(ranks2.step(to="7"))[(0, 1)]
    assert "line 7" in at
    ranks2.step(to="end")


def test_a_script_that_is_edited_while_it_is_paused_is_shown_as_it_runs(
    ranks2: Session, tmp_path: Path
) -> None:
    script = tmp_path / "edited.py"
    source = "def f(x):\n    a = x + 1\n    b = a * 2\n    return b\nprint(f(3))\n"
    script.write_text(source)
    ranks2.breakpoints.add(f"{script}:3", Breakpoint(0))
    ranks2.run_script(str(script))
    script.write_text(f"# a new line\n{source}")
    at = rows(ranks2.step())[(0, 1)]
    assert "return b (its file was edited after it was loaded: what runs is as it was)" in at
    ranks2.step(to="end")


LIBRARIES = {
    "torch.nn.functional.relu": ("F.relu(torch.ones(2))", "in relu"),
    "F.max_pool2d": ("torch.nn.MaxPool2d(2)(torch.ones(1, 4, 4))", "in _max_pool2d"),
    "torch.nn.Linear.forward": ("torch.nn.Linear(2, 1)(torch.ones(2))", "in Linear.forward"),
    "torch.autograd.backward": ("torch.ones(1, requires_grad=True).backward()", "in backward"),
    "torch.save": ("torch.save(1, io.BytesIO())", "in save"),
    "json.dumps": ("json.dumps([1])", "in dumps"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_functions_of_libraries_that_the_ranks_were_forked_with_are_stopped_in(
    ranks2: Session, name: str
) -> None:
    ranks2.run_cell("import io, json, torch\nimport torch.nn.functional as F\n").raise_for_error()
    ranks2.breakpoints.add(name, Breakpoint(0))
    called, place = LIBRARIES[name]
    assert place in rows(ranks2.run_cell(called).steps)[(0, 1)]
    assert [frame.function for frame in ranks2.looking.stands((0,))[0].frames] == [
        place.removeprefix("in "),
        "<module>",
    ]
    tree = stacks.text(ranks2.where(locals=True))
    assert f"{place.removeprefix('in ')}()" in tree, tree
    ranks2.step(to="end")
    assert ranks2.wait(10).error is None


def test_another_function_with_the_same_wrapper_passes(ranks2: Session) -> None:
    ranks2.run_cell("import torch.nn.functional as F\nimport torch\n").raise_for_error()
    ranks2.breakpoints.add("F.max_pool2d", Breakpoint(0))
    assert ranks2.run_cell("F.max_pool1d(torch.ones(1, 4), 2)").steps is None


def test_a_library_stops_for_the_users_code_and_not_for_what_runs_beside_it(
    ranks2: Session,
) -> None:
    """Threads of Jupyter's and of ours call these all the time; a rank of which one paused would
    answer no more."""
    for name in ("threading.Event.wait", "json.loads", "logging.Logger.debug"):
        ranks2.breakpoints.add(name, Breakpoint(0))
    stopped = ranks2.run_cell(
        "import threading\nthread = threading.Thread(target=threading.Event().wait, args=(0.1,))\n"
        "threading.Event().wait(0.1)\n"
    )
    assert "in Event.wait" in rows(stopped.steps)[(0, 1)]
    assert values(ranks2.evaluate("timeout")) == {(0, 1): "0.1"}
    ranks2.step(to="end")
    assert ranks2.wait(10).error is None


def test_a_function_of_a_module_that_is_loaded_anew_keeps_its_breakpoint(
    ranks2: Session, tmp_path: Path
) -> None:
    """And it is not called edited since it was loaded, as it was before."""
    module = tmp_path / "moving_module.py"
    module.write_text("def moves(x):\n    return x\n")
    ranks2.run_cell(f"import importlib, sys\nsys.path.insert(0, {str(tmp_path)!r})\n")
    ranks2.run_cell("import moving_module\n").raise_for_error()
    ranks2.breakpoints.add("moving_module.moves", Breakpoint(0))
    module.write_text("# moved\n\ndef moves(x):\n    twice = x * 2\n    return twice\n")
    ranks2.run_cell("importlib.reload(moving_module)\n").raise_for_error()
    (row,) = ranks2.breakpoints.rows()
    assert row.place == (str(module), 4)
    stopped = rows(ranks2.run_cell("moving_module.moves(3)").steps)[(0, 1)]
    assert "in moves: twice = x * 2" in stopped and "edited" not in stopped


def test_a_module_in_an_archive_has_its_lines(ranks2: Session, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("zipped_module.py", "def packed(x):\n    return x + 1\n")
    path = str(tmp_path / "packed.zip")
    ranks2.run_cell(f"import sys\nsys.path.insert(0, {path!r})\nimport zipped_module\n")
    ranks2.breakpoints.add("zipped_module.packed", Breakpoint(0))
    stopped = rows(ranks2.run_cell("zipped_module.packed(3)").steps)
    assert "in packed: return x + 1" in stopped[(0, 1)]


def test_a_compiled_model_can_have_its_breakpoint_again(ranks2: Session) -> None:
    ranks2.run_cell(
        "import torch\nclass Doubles(torch.nn.Module):\n    def forward(self, x):\n"
        "        doubled = x * 2\n        return doubled\n"
        "fast = torch.compile(Doubles(), backend='eager')\n"
    ).raise_for_error()
    for name in ("Doubles.forward", "fast", "Doubles.forward"):
        ranks2.breakpoints.add(name, Breakpoint(0))
        stopped = ranks2.run_cell("fast(torch.ones(1))")
        assert "doubled = x * 2" in rows(stopped.steps)[(0, 1)], name
        ranks2.breakpoints.clear()
        ranks2.step(to="end")
        assert ranks2.wait(60).error is None
