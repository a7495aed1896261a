"""When this rank may be paused, so that what it issues must wait long."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import os
import sys
from pathlib import Path

import pytest

from ddp_notebook.rank.debugger.armed import Armed, Loaded


@pytest.fixture
def told() -> list[bool]:
    return []


def armed(told: list[bool]) -> Armed:
    made = Armed()
    made.tell = told.append
    return made


def run(of: Armed, told: list[bool], source: str) -> bool:
    """Whether it is armed while `source` runs; it is not before, and not after."""
    of.in_run(paused=False)
    of.runs(ast.parse(source))
    while_it_runs = told[-1]
    of.in_run(paused=False)
    assert not told[-1]
    return while_it_runs


def test_code_that_says_breakpoint_arms_and_so_do_functions_that_have_it(told: list[bool]) -> None:
    of = armed(told)
    assert not run(of, told, "x = 1")
    assert run(of, told, "if x:\n    breakpoint()")
    assert not run(of, told, "x = 1")
    assert run(of, told, "import pdb; pdb.set_trace()")
    assert run(of, told, "class Net:\n    def forward(self):\n        breakpoint()")
    assert run(of, told, "Net().forward()")
    assert not run(of, told, "class Net:\n    pass")
    assert not run(of, told, "Net()")


def test_a_breakpoint_of_the_session_arms_until_it_is_cleared(told: list[bool]) -> None:
    of = armed(told)
    of.breakpoints(enabled=True, there=True)
    of.in_run(paused=False)
    assert told[-1]
    of.breakpoints(enabled=False, there=True)
    of.runs(ast.parse("breakpoint()"))
    assert not told[-1]
    of.in_run(paused=False)
    of.breakpoints(enabled=True, there=False)
    assert not told[-1]
    of.in_run()
    assert told[-1]


def test_a_module_of_the_users_that_says_breakpoint_arms_as_long_as_it_is_there(
    told: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = importlib.machinery.SourceFileLoader
    monkeypatch.setattr(loader, "get_code", loader.get_code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("armed_one", "armed_library"):
        source = "class Net:\n    def forward(self):\n        breakpoint()\n"
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "armed_two.py").write_text("def forward(self):\n    return 'breakpoint()'\n")
    of = armed(told)
    of.attach(lambda file: not file.endswith("armed_library.py"))
    for harmless in ("armed_two", "armed_library"):
        importlib.import_module(harmless)
        assert told == []
    importlib.import_module("armed_one")
    assert told == [True]
    assert run(of, told, "x = 1")
    for name in ("armed_one", "armed_two", "armed_library"):
        del sys.modules[name]
    assert not run(of, told, "x = 1")


def test_a_file_that_was_edited_after_it_was_loaded_is_said_to_be(tmp_path: Path) -> None:
    file, before = tmp_path / "module.py", Loaded()
    assert before.note(str(file)) == before.note("<ddp cell 3>") == ""
    file.write_text("x = 1\n")
    loaded = Loaded()
    loaded.add(str(file))
    assert loaded.note(str(file)) == ""
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    assert "edited after it was loaded" in loaded.note(str(file))
    loaded.add(str(file))  # it was loaded anew
    assert loaded.note(str(file)) == ""
