"""That processes forked from the fork server share most of what it has loaded."""

from __future__ import annotations

import gc
import logging.config
import os
import subprocess
import sys

import pytest

from ddp_notebook.launch import child
from ddp_notebook.launch.fork_server import ForkServer
from ddp_notebook.rank import engine_private

DRAWN = """
import importlib, mmap, sys, types
from ddp_notebook.launch.preload import draw_together

apart = []
for number in range(2_000):  # as torch's are: with other objects between them
    name = f"made_{number}"
    sys.modules[name] = types.ModuleType(name)
    apart.append([f"{name} {each}" for each in range(100)])

pages = lambda: len({id(name) // mmap.PAGESIZE for name in sys.modules})
before, modules = pages(), list(sys.modules.items())
draw_together()
assert list(sys.modules.items()) == modules
assert sys.modules["made_7"] is importlib.import_module("made_7") and "made_8" in sys.modules
assert pages() < 0.2 * before, (pages(), before)
"""


def test_the_names_of_modules_lie_on_few_pages() -> None:
    said = subprocess.run([sys.executable, "-c", DRAWN], capture_output=True, text=True)
    assert not said.returncode, said.stderr


def test_what_is_loaded_is_frozen_before_a_child_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller is forked while modules are loaded; a later look would copy its pages."""
    done: list[str] = []
    server = ForkServer.__new__(ForkServer)
    server.mode, server.children = "fork", {}
    monkeypatch.setattr(gc, "freeze", lambda: done.append("frozen"))
    monkeypatch.setattr(child, "disown_finalizers", lambda: done.append("exit functions dropped"))
    monkeypatch.setattr(os, "fork", lambda: done.append("forked") or 7)
    assert server.spawn({}) == 7 and server.children == {7: None}
    assert done == ["exit functions dropped", "frozen", "forked"]


CONFIGURED = """
import logging
from traitlets.config import Application
from ddp_notebook.rank import engine_private

other = logging.getLogger("other")
other.setLevel(logging.DEBUG)
other.addHandler(handler := logging.NullHandler())
everything = logging.root.manager.loggerDict
assert engine_private.configure_one_logger()

read = []
class Watched(dict):
    def keys(self):
        read.append(1)
        return super().keys()
logging.root.manager.loggerDict = watched = Watched(everything)

class Engine(Application):
    pass

app = Engine(log_level="ERROR")
assert app.log is logging.getLogger("Engine")
assert [each.level for each in app.log.handlers] == [logging.ERROR]
assert logging.root.manager.loggerDict is watched and not read
assert other.level == logging.DEBUG and other.handlers == [handler] and not other.disabled
app.log_level = "WARN"
assert [each.level for each in app.log.handlers] == [logging.WARNING]
"""


def test_an_engine_sets_up_its_own_logger_alone() -> None:
    said = subprocess.run([sys.executable, "-c", CONFIGURED], capture_output=True, text=True)
    assert not said.returncode, said.stderr


def test_where_traitlets_sets_up_loggers_otherwise_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.config, "dictConfig", lambda config: None)
    assert not engine_private.configure_one_logger()
