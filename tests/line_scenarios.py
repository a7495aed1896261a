"""What must hold of stopping at lines, whichever back end: each is a function that asserts.

Without pytest and torch, so that another Python than the one under test can run this file:
``python tests/line_scenarios.py`` prints the names of those that passed.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.machinery
import linecache
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_notebook.model import LineStopped
from ddp_notebook.rank.calls import Breakpoint, Breakpoints, How, Move
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.component import Run
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.inspect.frames import UserCode, chain
from ddp_notebook.rank.main_thread import MainThread

WITHIN_S = 10.0
_cells = iter(range(1, 1000))


class Rank:
    """A debugger whose cells run in a thread, and whose session is the caller."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.stops: list[LineStopped] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self.written: list[str] = []
        self.main_thread = MainThread()
        user_code = UserCode()
        events: Any = self
        self.debugger = Debugger(
            self.main_thread, PauseGate(self.main_thread), user_code, events, lambda: self.names
        )
        self.debugger.breakpoints._write = self.written.append
        self.names["breakpoint"] = lambda: self.debugger.on_breakpoint(
            sys._getframe(1), "breakpoint()"
        )
        self.debugger.run_begins(Run(1))

    def collect(self) -> None:
        """Nothing was printed."""

    def emit_now(self, kind: type, **fields: Any) -> None:
        """An event."""
        if kind is LineStopped:
            with self._changed:
                self.stops.append(LineStopped(rank=0, **fields))
                self._changed.notify_all()

    def cell(self, source: str) -> str:
        """Begin to run a cell; its file."""
        file = f"<ddp cell {next(_cells)}>"
        text = source.splitlines(keepends=True)
        linecache.cache[file] = (len(source), None, text, file)
        tree = ast.parse(source)
        self.debugger.begins(tree, file)
        run = types.FunctionType(compile(tree, file, "exec"), self.names)
        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return file

    def wait(self, count: int) -> LineStopped | None:
        """The stop of that number, from 1; None when the cell ended before."""

        def over() -> bool:
            return len(self.stops) >= count or not self._threads[-1].is_alive()

        deadline_s = time.monotonic() + WITHIN_S
        with self._changed:
            while not over():
                assert time.monotonic() < deadline_s, "it neither stops nor ends"
                self._changed.wait(0.005)  # a thread's end notifies nobody
        return self.stops[count - 1] if len(self.stops) >= count else None

    def lines(self, *moves: How | int) -> list[int]:
        """At which lines it stops: first, and after each move; 0 for its end."""
        seen = len(self.stops)  # first: the next one may come at any time
        paused = self.debugger.stopped  # it may not have been told yet
        count = seen + 1 if paused is None else paused.number
        stop = self.wait(count)
        lines = [stop.line if stop else 0]
        for move in moves:
            order = Move(How.LINE, move) if isinstance(move, int) else Move(move)
            assert self.debugger.move(order).stop, "nothing was paused"
            count += 1
            stop = self.wait(count)
            lines.append(stop.line if stop else 0)
        return lines

    def set(self, *breakpoints: Breakpoint) -> tuple[Any, ...]:
        """Have these; where they are."""
        return self.debugger.set_breakpoints(Breakpoints(breakpoints)).bounds

    def end(self) -> None:
        """Let all go on, and set nothing."""
        self.set()
        while (stop := self.debugger.stopped) is not None:
            stop.resume(Move(How.END))
            stop.thread.join(0.01)
        for thread in self._threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive()


NEXT, INTO, OUT, END = How.NEXT, How.INTO, How.OUT, How.END


def next_stays_in_the_function_and_returns_to_its_caller(rank: Rank) -> None:
    rank.cell("def f():\n    breakpoint()\n    a = 1\n    return a\nx = f()\ny = 2\n")
    assert rank.lines(NEXT, NEXT, NEXT, NEXT) == [2, 3, 4, 6, 0]


def next_steps_over_calls_and_into_enters_them(rank: Rank) -> None:
    rank.cell("def f():\n    return 1\nbreakpoint()\nx = f()\ny = f()\nz = 1\n")
    assert rank.lines(NEXT, NEXT, INTO, NEXT, END) == [3, 4, 5, 2, 6, 0]


def out_leaves_the_function(rank: Rank) -> None:
    rank.cell("def f():\n    breakpoint()\n    a = 1\n    a = 2\nf()\nb = 3\n")
    assert rank.lines(OUT, NEXT) == [2, 6, 0]


def to_a_line_goes_there_in_a_loop(rank: Rank) -> None:
    rank.cell("breakpoint()\nfor i in range(3):\n    a = i\n    b = i\nc = 1\n")
    assert rank.lines(4, 4, 5, END) == [1, 4, 4, 5, 0]
    assert rank.debugger.move(Move(How.LINE, 3)).stop == 0


def a_line_of_another_function_is_refused(rank: Rank) -> None:
    rank.cell("def f():\n    return 1\nbreakpoint()\nc = 1\n")
    assert rank.lines() == [3]
    answer = rank.debugger.move(Move(How.LINE, 2))
    assert answer.stop == 0
    assert "line 2" in answer.problem


def an_error_leaves_the_function_too(rank: Rank) -> None:
    rank.cell(
        "def f():\n    breakpoint()\n    raise ValueError\n"
        "try:\n    f()\nexcept ValueError:\n    a = 1\nb = 2\n"
    )
    assert rank.lines(NEXT, NEXT, NEXT, NEXT) == [2, 3, 6, 7, 8]


def a_generator_is_left_by_yield(rank: Rank) -> None:
    rank.cell(
        "def g():\n    breakpoint()\n    yield 1\n    yield 2\nfor i in g():\n    a = i\nb = 1\n"
    )
    assert rank.lines(NEXT, NEXT, NEXT, NEXT, END) == [2, 3, 6, 5, 6, 0]


def a_coroutine_is_stepped_over_its_awaits(rank: Rank) -> None:
    rank.names["asyncio"] = asyncio
    rank.cell(
        "async def f():\n    breakpoint()\n    await asyncio.sleep(0)\n    a = 1\n"
        "    return a\nasyncio.run(f())\nb = 1\n"
    )
    assert rank.lines(NEXT, NEXT, NEXT) == [2, 3, 4, 5]


def a_breakpoint_in_a_cell_that_runs_again(rank: Rank) -> None:
    file = rank.cell("a = 1\nb = 2\n")
    assert rank.wait(1) is None
    rank.set(Breakpoint(1, file, 2))
    rank.cell("a = 1\nb = 2\n")
    assert rank.lines(END) == [2, 0]


def a_breakpoint_in_a_function_that_was_defined_before(rank: Rank) -> None:
    file = rank.cell("def f(i):\n    a = i\n\n    # said\n    return a\n")
    assert rank.wait(1) is None
    (bound,) = rank.set(Breakpoint(1, file, 3))
    assert bound.line == 5
    rank.cell("x = f(7)\ny = f(8)\n")
    assert rank.lines() == [5]
    stopped = rank.debugger.stopped
    assert stopped is not None
    assert stopped.frame.f_locals == {"i": 7, "a": 7}
    assert rank.lines(END, END) == [5, 5, 0]


def a_breakpoint_in_a_function_that_the_same_cell_defines_again(rank: Rank) -> None:
    """Its code is equal to that of the one before, and is another."""
    source = "def f():\n    a = 1\n    return a\nf()\n"
    file = rank.cell(source)
    assert rank.wait(1) is None
    rank.set(Breakpoint(1, file, 2))
    rank.cell("f()\n")
    assert rank.lines(END) == [2, 0]
    rank.cell(source)
    assert rank.lines(END) == [2, 0]


def a_breakpoint_in_code_that_runs_already(rank: Rank) -> None:
    file = rank.cell("breakpoint()\nfor i in range(3):\n    a = i\n    b = i\nc = 1\n")
    assert rank.lines() == [1]
    rank.set(Breakpoint(1, file, 4, condition="i > 0"))
    assert rank.lines(END, END, END) == [1, 4, 4, 0]
    assert rank.debugger.bounds().bounds[0].passes == 2


def a_function_that_code_which_runs_already_defines_later(rank: Rank) -> None:
    file = rank.cell(
        "breakpoint()\ndef f():\n    a = 1\n    return a\nclass C:\n    def g(self):\n"
        "        b = 2\n        return b\nf()\nC().g()\nmade = [lambda: 3]\nmade[0]()\nx = 1\n"
    )
    assert rank.lines() == [1]
    rank.set(Breakpoint(1, file, 3), Breakpoint(2, file, 7), Breakpoint(3, file, 13))
    assert rank.lines(END, END, END, END) == [1, 3, 7, 13, 0]
    rank.cell("f()\nC().g()\n")
    assert rank.lines(END, END) == [3, 7, 0], "in a run of its own as well"
    assert [bound.passes for bound in rank.debugger.bounds().bounds] == [2, 2, 1]


def a_breakpoint_that_a_step_arrives_at_stops_once(rank: Rank) -> None:
    file = rank.cell("def f():\n    a = 1\n    b = 2\n    return a\n")
    assert rank.wait(1) is None
    rank.set(Breakpoint(1, file, 3))
    rank.cell("breakpoint()\nf()\nx = 1\n")
    assert rank.lines(NEXT, INTO, NEXT, NEXT, END) == [1, 2, 2, 3, 4, 0]
    assert rank.debugger.bounds().bounds[0].passes == 1


def conditions_counts_and_once(rank: Rank) -> None:
    file = rank.cell("def f(i):\n    a = i\n    return a\n")
    assert rank.wait(1) is None
    rank.set(Breakpoint(1, file, 2, condition="i % 2", count=2, once=True))
    rank.cell("for n in range(20):\n    f(n)\n")
    assert rank.lines() == [2]
    stopped = rank.debugger.stopped
    assert stopped is not None
    assert stopped.frame.f_locals["i"] == 3
    assert rank.lines(END) == [2, 0]
    (bound,) = rank.debugger.bounds().bounds
    assert (bound.passes, bound.done) == (2, True)


def a_condition_that_raises_stops_once_and_says_so(rank: Rank) -> None:
    file = rank.cell("def f(i):\n    a = i\n    return a\n")
    assert rank.wait(1) is None
    rank.set(Breakpoint(1, file, 2, condition="nobody > 1"))
    rank.cell("f(1)\nf(2)\n")
    assert rank.lines(END) == [2, 0]
    assert "its condition raised NameError" in rank.stops[-1].why
    (bound,) = rank.debugger.bounds().bounds
    assert bound.note.startswith("its condition raised NameError"), "it reads as if not reached"


def a_false_condition_without_a_call_is_not_brought_to_the_debugger(rank: Rank) -> None:
    """That is what makes it cheap in a loop. Where it is true, or raises, all is as ever."""
    file = rank.cell(
        "def f(n):\n    for i in range(n):\n        a = i\n        b = a\n    return n\n"
        "class Net:\n    def step(self, i):\n        self.i = i\n        return i\n"
        "def around(i):\n    limit = 2\n    def inner(i):\n        c = i\n        return c\n"
        "    return inner(i), limit\n"
    )
    assert rank.wait(1) is None
    looked_at: list[int] = []
    plain_hit = rank.debugger.breakpoints.hit
    rank.debugger.breakpoints.hit = (  # type: ignore[method-assign]
        lambda frame: looked_at.append(frame.f_lineno) or plain_hit(frame)
    )
    rank.set(
        Breakpoint(1, file, 4, condition="i == 7"),
        Breakpoint(2, file, 4, condition="a > 8 and not n < 3"),
        Breakpoint(3, file, 9, condition="self.i[0] == 1"),
        Breakpoint(4, file, 13, condition="i > limit"),
        Breakpoint(5, file, 14, condition="int(c) > 3"),
    )
    rank.cell("Exception = None\nx = f(10)\nNet().step(3)\naround(9)\n")
    assert rank.lines(END) == [4, 4]
    assert looked_at == [4, 4]
    assert rank.lines(END, END) == [4, 9, 13]
    assert "raised TypeError" in rank.stops[-2].why
    assert "raised NameError" in rank.stops[-1].why
    assert rank.lines(END, END) == [13, 14, 0]
    assert looked_at == [4, 4, 9, 13, 14]


def a_condition_on_what_a_function_declares_global_does_not_break_it(rank: Rank) -> None:
    """A name must not be used before that; and other places where a call must be compiled."""
    source = (
        "v = 1\ndef f():\n    global v\n    v = 2\n"
        "def g(i):\n    try:\n        raise ExceptionGroup('', [OSError()])\n"
        "    except* OSError:\n        a = i\n    finally:\n        b = i\n"
        "    match i:\n        case 1:\n            c = i\n    return i\n"
        "class A:\n    d = v\n"
        "async def h(i):\n    e = i\ndef k():\n    a = 1\n    global v\n    v = 3\n"
    )
    file = rank.cell(source)
    assert rank.wait(1) is None
    wanted = {3: "v", 9: "i", 11: "i", 14: "i", 17: "v", 19: "i", 21: "v"}
    at = enumerate(wanted.items(), 1)
    bounds = rank.set(
        *(Breakpoint(n, file, line, condition=f"{name} < 2") for n, (line, name) in at)
    )
    assert [each.line for each in bounds] == [4, 9, 11, 14, 17, 19, 21]
    rank.cell("k()\nv = 1\nf()\ng(1)\nlist(h(1).__await__())\n")
    assert rank.lines(END, END, END, END, END, END) == [21, 4, 9, 11, 14, 19, 0]
    rank.cell(source)
    assert rank.lines(END) == [17, 0]


def a_condition_that_is_set_anew_holds_in_code_that_runs(rank: Rank) -> None:
    file = rank.cell(
        "def f():\n    for i in range(20):\n        a = i\n        b = a\n    return i\n"
    )
    assert rank.wait(1) is None
    rank.set(Breakpoint(1, file, 3, condition="i == 2"))
    rank.cell("f()\n")
    assert rank.lines() == [3]
    stopped = rank.debugger.stopped
    assert stopped is not None
    rank.set(Breakpoint(2, file, 3, condition="i == 5"), Breakpoint(3, file, 4, count=6))
    assert rank.lines(END) == [3, 3]
    assert stopped.frame.f_locals["i"] == 5
    assert rank.lines(END) == [3, 4]
    assert stopped.frame.f_locals["i"] == 7
    rank.set(Breakpoint(4, file, 3))
    assert rank.lines(END, END) == [4, 3, 3]
    assert stopped.frame.f_locals["i"] == 9


def a_log_prints_and_does_not_stop(rank: Rank) -> None:
    file = rank.cell("def f(i):\n    a = i * 2\n    return a\n")
    assert rank.wait(1) is None
    rank.set(Breakpoint(1, file, 3, log="i={i} a={a:3d}"))
    rank.cell("f(1)\nf(2)\n")
    assert rank.lines() == [0]
    assert rank.written == ["i=1 a=  2\n", "i=2 a=  4\n"]


def a_function_by_its_name(rank: Rank) -> None:
    assert rank.set(Breakpoint(1, function="Net.forward"))[0].line == 0
    rank.cell(
        "class Net:\n    def forward(self, x):\n        'It.'\n        y = x\n        return y\n"
        "Net().forward(3)\n"
    )
    assert rank.lines(END) == [4, 0]


def lambdas_decorators_class_bodies_and_del(rank: Rank) -> None:
    file = rank.cell(
        "def decorate(f):\n    kept = f\n    return kept\n"
        "square = lambda v: (\n    v * v)\n"
        "class A:\n    def __del__(self):\n        gone = 1\n"
    )
    assert rank.wait(1) is None
    rank.set(*(Breakpoint(n, file, line) for n, line in enumerate((2, 5, 8), 1)))
    rank.cell("@decorate\ndef g():\n    pass\nsquare(2)\na = A()\ndel a\nb = 1\n")
    assert rank.lines(END, END, END) == [2, 5, 8, 0]


def a_module_that_is_imported_later(rank: Rank) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "lines_imported.py"
        path.write_text('"""It."""\nA = 1\ndef f(x):\n    y = x\n    return y\n')
        sys.path.insert(0, folder)
        try:
            bounds = rank.set(Breakpoint(1, str(path), 2), Breakpoint(2, str(path), 4))
            assert [each.loaded for each in bounds] == [False, False]
            rank.cell("import lines_imported\nlines_imported.f(1)\n")
            reached = rank.lines(END, END)
            assert reached == [2, 4, 0]
        finally:
            sys.path.remove(folder)
            sys.modules.pop("lines_imported", None)


def a_thread_of_the_users(rank: Rank) -> None:
    rank.names["threading"] = threading
    rank.cell(
        "def f():\n    breakpoint()\n    a = 1\n    return a\n"
        "t = threading.Thread(target=f, name='mine')\nt.start()\nt.join()\nb = 1\n"
    )
    assert rank.lines(NEXT, NEXT) == [2, 3, 4]
    assert rank.stops[-1].thread == "mine"


def what_is_evaluated_at_a_stop_does_not_stop(rank: Rank) -> None:
    rank.cell("def f():\n    breakpoint()\n    return 5\nbreakpoint()\na = 1\n")
    assert rank.lines() == [4]
    stopped = rank.debugger.stopped
    assert stopped is not None
    assert stopped.ask(lambda: rank.names["f"](), WITHIN_S) == 5
    assert rank.lines(NEXT, END) == [4, 5, 0]


def breakpoints_that_are_off_are_passed(rank: Rank) -> None:
    rank.debugger.set_breakpoints(Breakpoints((), enabled=False))
    rank.cell("breakpoint()\na = 1\n")
    assert rank.lines() == [0]


def an_abort_frees_a_paused_thread(rank: Rank) -> None:
    rank.cell("try:\n    breakpoint()\nexcept RuntimeError as error:\n    said = str(error)\n")
    assert rank.lines() == [2]
    rank.main_thread.abort.set()
    assert rank.wait(2) is None
    assert "aborted" in rank.names["said"]
    assert rank.debugger.stopped is None


def a_breakpoint_at_the_head_of_a_loop_stops_in_every_round(rank: Rank) -> None:
    file = rank.cell("def f(n):\n    for i in range(n):\n        a = i\n    return n\n")
    assert rank.wait(1) is None
    rank.set(Breakpoint(1, file, 2))
    rank.cell("f(3)\n")
    rounds = rank.lines(END, END)
    assert rounds == [2, 2, 2]
    assert rank.debugger.stopped is not None
    assert rank.debugger.stopped.frame.f_locals["i"] >= 1
    assert rank.lines(NEXT) == [2, 3]
    rank.set()
    assert rank.lines(END)[-1] == 0
    source = "i = 0\nwhile i < 2:\n    i += 1\nb = i\n"
    file = rank.cell(source)
    assert rank.wait(len(rank.stops) + 1) is None
    rank.set(Breakpoint(2, file, 2))
    rank.cell(source)
    assert rank.lines(END, END, END) == [2, 2, 2, 0]


def a_thread_that_is_in_the_function_already_stops_or_is_named(rank: Rank) -> None:
    rank.names["go"] = go = threading.Event()
    source = "def f():\n    while not go.wait(0.001):\n        a = 1\n    return 1\nf()\n"
    file = rank.cell(source)
    deadline_s = time.monotonic() + WITHIN_S
    while not any(
        frame.f_code.co_name == "f" and frame.f_code.co_filename == file
        for innermost in sys._current_frames().values()
        for frame in chain(innermost)
    ):
        assert time.monotonic() < deadline_s
    (bound,) = rank.set(Breakpoint(1, file, 3))
    if bound.note:
        assert "is in this function already, and passes" in bound.note
        go.set()
        assert rank.wait(1) is None
    else:
        assert rank.lines() == [3]
        go.set()
        assert rank.lines(END) == [3, 0]


def a_step_that_is_under_way_ends_nowhere_once_all_is_to_end(rank: Rank) -> None:
    rank.names["go"] = go = threading.Event()
    rank.cell("breakpoint()\ngo.wait()\na = 1\nb = 2\n")
    assert rank.lines(NEXT) == [1, 2]
    rank.debugger.move(Move(NEXT))
    deadline_s = time.monotonic() + WITHIN_S
    while rank.debugger.stopped is not None:
        assert time.monotonic() < deadline_s
    assert rank.debugger.move(Move(END)).stop == 0
    go.set()
    assert rank.wait(3) is None


def a_generator_that_was_left_by_yield_before_its_breakpoint_was_set(rank: Rank) -> None:
    file = rank.cell(
        "def g():\n    for i in range(3):\n        yield i\n        a = i\n"
        "it = g()\nnext(it)\nbreakpoint()\nnext(it)\nb = 1\n"
    )
    assert rank.lines() == [7]
    rank.set(Breakpoint(1, file, 4))
    assert rank.lines(END, END) == [7, 4, 0]


def installed() -> dict[str, Any]:
    """What a debugger leaves where Python looks for it, in every thread that begins now."""
    found: list[Any] = []
    looking = threading.Thread(target=lambda: found.append(sys.gettrace()))
    looking.start()
    looking.join()
    monitoring = getattr(sys, "monitoring", None)
    return {
        "traced": (sys.gettrace(), threading.gettrace(), *found),
        "tools": [monitoring.get_tool(n) for n in range(6)] if monitoring else [],
        "imports": importlib.machinery.SourceFileLoader.get_code,
    }


def nothing_stays_installed(rank: Rank) -> None:
    clean = installed()
    rank.names["sys"] = sys
    source = "def f(i):\n    a = i\n    return a\n"
    before = rank.cell(source)
    assert rank.wait(1) is None
    rank.cell("f(1)\n")
    assert rank.wait(1) is None
    assert installed() == clean, "with no breakpoint set"
    rank.set(Breakpoint(1, before, 2))
    assert installed() != clean
    rank.cell(f"f(1)\n{source}f(2)\nmade = [lambda x: x + 1]\n")
    assert rank.lines(NEXT, INTO, OUT) == [2, 3, 2, 0]
    rank.set()
    rank.cell("traced = sys.gettrace()\n")
    assert rank.wait(len(rank.stops) + 1) is None
    assert rank.names["traced"] is None
    assert installed() == clean, "after all were cleared"


def what_the_user_traces_with_is_given_back(rank: Rank) -> None:
    """As coverage does: also in the function that was stepped, from where it was let go."""
    seen: list[int] = []

    def theirs(frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_name == "f" and event == "line":
            seen.append(frame.f_lineno)
        return theirs

    rank.names.update(sys=sys, theirs=theirs)
    rank.cell(
        "def f():\n    a = 1\n    breakpoint()\n    b = 2\n    c = 3\n    return c\n"
        "sys.settrace(theirs)\nf()\nkept = sys.gettrace() is theirs\nsys.settrace(None)\n"
    )
    assert rank.lines(NEXT, END) == [3, 4, 0]
    assert rank.names["kept"]
    assert seen[:2] == [2, 3] and seen[-2:] == [5, 6]


def what_the_user_traces_new_threads_with_is_given_back(rank: Rank) -> None:
    def theirs(frame: types.FrameType, event: str, arg: Any) -> None:
        """Trace nothing."""

    source = "a = 1\nb = 2\n"
    threading.settrace(theirs)
    try:
        file = rank.cell(source)
        assert rank.wait(1) is None
        rank.set(Breakpoint(1, file, 2))
        rank.cell(source)
        assert rank.lines(END) == [2, 0]
        rank.set()
        assert threading.gettrace() is theirs
    finally:
        threading.settrace(None)  # type: ignore[arg-type]


def a_thread_of_ours_stops_nowhere(rank: Rank) -> None:
    """Also in a function of the user's, as what is evaluated beside a run calls it."""
    file = rank.cell("def f():\n    return sys.gettrace()\n")
    assert rank.wait(1) is None
    rank.names["sys"] = sys
    rank.set(Breakpoint(1, file, 2))
    found: list[Any] = []

    def ask() -> None:
        with rank.debugger.aside():
            found.append(rank.names["f"]())

    asked = threading.Thread(target=ask, name="ddp-expression")
    asked.start()
    asked.join(WITHIN_S)
    assert found == [None]
    assert not rank.stops


SCENARIOS: tuple[Callable[[Rank], None], ...] = tuple(
    value
    for name, value in list(globals().items())
    if isinstance(value, types.FunctionType) and value.__annotations__.get("rank") == "Rank"
)


def play(scenario: Callable[[Rank], None]) -> None:
    """Play one, and leave nothing paused."""
    rank = Rank()
    try:
        scenario(rank)
    finally:
        rank.end()
        rank.debugger.run_ends()


if __name__ == "__main__":
    for each in SCENARIOS:
        try:
            play(each)
        except Exception:  # noqa: BLE001  # the others are played too
            print("FAILED", each.__name__)
            traceback.print_exc()
        else:
            print("passes", each.__name__, flush=True)
