"""Stopping at lines: a step of four ranks against debugpy's, and what breakpoints cost a rank.

The rival of a step is debugpy, asked over its own protocol for a `next` of four processes at once.
The rival of a rank's code is the same code, compiled past the debugger, in turns with it.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from kernels import Kernel
from observing import Ranks
from rows import Measurement, Numbers, Row, compare

from ddp_notebook.rank.calls import Breakpoint
from ddp_notebook.session import Session

RANKS = 4
MANY = 16
AT_MOST_S = {RANKS: 0.002, MANY: 0.010}
"""Of a lockstep step, by how many ranks take it."""
STEPS = 40
STATES = ("nothing set", "elsewhere", "cleared")
"""Of breakpoints, while a rank's code is timed."""
BLOCKS = 5
"""Of magics: so often trivial cells and steps, in turn."""
LINES = "".join(f"x = {number}\n" for number in range(200))
DEBUGPY_STEPS = 10
MODULE = "lines_measured"

CODE = """
def inner(i):
    return i + 1

def calls(n):
    total = 0
    for i in range(n):
        total = inner(total)
    return total

def train(n):
    for i in range(n):
        optimizer.zero_grad()
        loss = net(data).square().mean()
        loss.backward()
        optimizer.step()
"""
SETTING_UP = f"""
import sys, time, torch
torch.set_num_threads(1)
sys.path.insert(0, folder)
net = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]))
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
data = torch.ones(32, 64)
import {MODULE}
"""
TIMED = """
def timed(function, n):
    began = time.process_time()  # what the rank pays, not what others on the machine cost it
    function(n)
    return time.process_time() - began

def in_turns(name, n, turns=31):
    plain = dict(net=net, optimizer=optimizer, data=data)
    exec(compile(CODE, "/tmp/plain_code.py", "exec"), plain)
    both = [globals()[name], plain[name]]
    ratios, times = [], []
    for each in both:
        each(n)
    for turn in range(turns):
        dist.barrier()
        way = 1 if turn % 2 else -1
        own, other = [timed(each, n) for each in both[::way]][::way]
        ratios.append(own / other)
        times.append(own)
    return ratios, times

measured = {"calls": in_turns("calls", 200_000), "train": in_turns("train", 40)}
"""
HOT = """
def hot(n):
    total = 0
    for i in range(n):
        y = i * 2
        total += y
    return total
"""
HOT_LINE = 6
PASS_COSTS = """
plain = {}
exec(compile(HOT, "/tmp/plain_code.py", "exec"), plain)
costs = [(timed(hot, 100_000) - timed(plain["hot"], 100_000)) / 100_000 for _ in range(15)]
"""


class Lines(Measurement):
    """Steps in a session, as magics and through debugpy; breakpoints and none beside plain code."""

    name = "lines"

    def round(self) -> Numbers:
        """Everything once, on the machine as it is in this round."""
        numbers: dict[str, float] = {}
        with Ranks(RANKS) as session:
            numbers[f"{RANKS} ranks_s"] = _session_steps(session)
        with Ranks(MANY) as session:
            numbers[f"{MANY} ranks_s"] = _session_steps(session)
        numbers.update(_magics())
        with _debugged() as processes:
            numbers["debugpy_s"] = _debugpy_steps(processes)
        with Ranks(2) as session:
            numbers.update(_costs(session))
        return numbers

    def rows(self, medians: Numbers) -> list[Row]:
        """The bars."""
        debugpy_s, pass_us = medians["debugpy_s"], medians["pass_s"] * 1e6
        rows = [
            Row(
                f"lockstep next of {ranks} ranks, in the session",
                f"{medians[f'{ranks} ranks_s'] * 1e3:.2f} ms",
                f"debugpy, {RANKS} processes: {debugpy_s * 1e3:.0f} ms",
                medians[f"{ranks} ranks_s"] / debugpy_s,
                f"at most {at_most_s * 1e3:g} ms",
                medians[f"{ranks} ranks_s"] <= at_most_s,
            )
            for ranks, at_most_s in AT_MOST_S.items()
        ]
        # On Python 3.11 a loop of three lines is traced, and so is all that is called.
        traces = sys.version_info < (3, 12)
        at_most_us = 4.0 if traces else 1.0
        rows += [
            compare("%ddp_step", medians["magic_s"], medians["cell_s"], 1.5, "trivial %%ddp cell"),
            Row(
                "a pass of a breakpoint whose condition is false",
                f"{pass_us:.3f} us",
                "the same code past the debugger",
                wanted=f"at most {at_most_us:g} us more",
                met=pass_us <= at_most_us,
            ),
        ]
        for what in ("calls", "train") if traces else ():
            own_s, before_s = medians[f"{what} elsewhere s"], medians[f"{what} nothing set s"]
            bar, rival = f"{what}, breakpoints: elsewhere", "the same code with nothing set"
            ours, theirs = f"{own_s * 1e3:.1f} ms", f"{rival}: {before_s * 1e3:.1f} ms"
            rows.append(Row(bar, ours, theirs, own_s / before_s))
        for state in ("nothing set", "cleared") if traces else STATES:
            for what in ("calls", "train"):
                ratio = medians[f"{what} {state}"]
                low, high = medians[f"{what} {state} low"], medians[f"{what} {state} high"]
                allowed = 1.02 if state == "elsewhere" else 1.0
                rows.append(
                    Row(
                        f"{what}, breakpoints: {state}",
                        f"{low:.3f} to {high:.3f}",
                        "the same code past the debugger",
                        ratio,
                        f"{allowed:.2f}x within the interval",
                        low <= allowed,
                    )
                )
        return rows


def _session_steps(session: Session) -> float:
    session.run_cell(f"breakpoint()\n{LINES}")
    taken = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        session.step()
        taken.append(time.perf_counter() - began_s)
    session.step(to="end")
    session.wait(10).raise_for_error()
    return median(taken)


def _magics() -> dict[str, float]:
    """Trivial cells and steps of the same ranks, as a front end sees both."""
    cells: list[float] = []
    steps: list[float] = []
    with Kernel() as kernel:
        kernel.init(RANKS)
        for _ in range(BLOCKS):
            cells += [kernel.run_well("%%ddp\nx = 1").elapsed_s for _ in range(STEPS // BLOCKS)]
            kernel.run_well(f"%%ddp\nbreakpoint()\n{LINES}")
            steps += [kernel.run_well("%ddp_step").elapsed_s for _ in range(STEPS // BLOCKS)]
            kernel.run_well("%ddp_step --to end")
            kernel.run_well("%ddp_wait")
    return {"cell_s": median(cells), "magic_s": median(steps)}


# -- what a rank pays ----------------------------------------------------------------------


def _costs(session: Session) -> dict[str, float]:
    """Ratios to plain code: nothing was ever set, a breakpoint elsewhere, all cleared."""
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{MODULE}.py").write_text("def never(x):\n    y = x\n    return y\n")
        session.run_cell(f"folder = {folder!r}\n{SETTING_UP}").raise_for_error()
        numbers.update(_ratios(session, "nothing set"))
        session.breakpoints.add(f"{folder}/{MODULE}.py:2", Breakpoint(0))
        numbers.update(_ratios(session, "elsewhere"))
        session.run_cell(f"{MODULE}.never(1)")
        session.step(to="end")
        session.wait(10).raise_for_error()
        session.breakpoints.clear()
        numbers.update(_ratios(session, "cleared"))
        numbers["pass_s"] = _pass_s(session)
    return numbers


def _pass_s(session: Session) -> float:
    session.run_cell(f"{HOT}HOT = {HOT!r}\n").raise_for_error()
    session.breakpoints.add(str(HOT_LINE), Breakpoint(0, condition="i < 0 and total"))
    session.run_cell(PASS_COSTS).raise_for_error()
    session.breakpoints.clear()
    return median(cost for costs in session.pull("costs").values() for cost in costs)


def _ratios(session: Session, state: str) -> dict[str, float]:
    session.run_cell(f"CODE = {CODE!r}\n{CODE}\n{TIMED}").raise_for_error()
    numbers: dict[str, float] = {}
    for what in ("calls", "train"):
        values = [of[what] for _, of in sorted(session.pull("measured").items())]
        ratios = [ratio for of_rank, _ in values for ratio in of_rank]
        times = [own for _, of_rank in values for own in of_rank]
        low, high = _interval(ratios)
        key = f"{what} {state}"
        numbers |= {key: median(ratios), f"{key} low": low, f"{key} high": high}
        numbers[f"{key} s"] = median(times)
    return numbers


def _interval(values: list[float]) -> tuple[float, float]:
    """Of the median, 95 %."""
    order = random.Random(1)
    medians = sorted(median(order.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[974]


# -- debugpy -------------------------------------------------------------------------------


class _Adapter:
    """One process under debugpy, and the protocol that an editor speaks with it."""

    def __init__(self, script: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["-Xfrozen_modules=off", "-m", "debugpy", "--listen", f"127.0.0.1:{port}"]
        self.process = subprocess.Popen(
            [sys.executable, *options, "--wait-for-client", str(script)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._count = itertools.count(1)
        self._connection = self._connect(port)
        self._file = self._connection.makefile("rb")
        self.thread = 0

    def _connect(self, port: int) -> socket.socket:
        deadline_s = time.monotonic() + 30
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), timeout=30)
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def attach(self, script: Path) -> None:
        """Stop before line 1."""
        self.ask("initialize", adapterID="measured", pathFormat="path")
        self.ask("attach", justMyCode=True)
        self.until("initialized")
        self.ask("setBreakpoints", source={"path": str(script)}, breakpoints=[{"line": 1}])
        self.ask("configurationDone")
        self.stopped()

    def ask(self, command: str, **arguments: Any) -> None:
        """Send a request."""
        request = {"type": "request", "command": command, "arguments": arguments}
        data = json.dumps({**request, "seq": next(self._count)}).encode()
        self._connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))

    def until(self, event: str) -> dict[str, Any]:
        """Read up to an event of that name."""
        while True:
            size = 0
            while (line := self._file.readline().strip()) or not size:
                size = int(line.rpartition(b":")[2]) if line.startswith(b"Content-Len") else size
            message: dict[str, Any] = json.loads(self._file.read(size))
            if message.get("event") == event:
                return message

    def stopped(self) -> None:
        """Wait until it stands at a line."""
        self.thread = self.until("stopped")["body"]["threadId"]

    def close(self) -> None:
        """End the process."""
        self._file.close()
        self._connection.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def _debugged() -> Iterator[list[_Adapter]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        script = Path(folder, "stepped.py")
        script.write_text(LINES)
        processes = []
        for _ in range(RANKS):
            adapter = _Adapter(script)
            stack.callback(adapter.close)
            processes.append(adapter)
        for adapter in processes:
            adapter.attach(script)
        yield processes


def _debugpy_steps(processes: list[_Adapter]) -> float:
    taken = []
    for _ in range(DEBUGPY_STEPS):
        began_s = time.perf_counter()
        for adapter in processes:
            adapter.ask("next", threadId=adapter.thread)
        for adapter in processes:
            adapter.stopped()
        taken.append(time.perf_counter() - began_s)
    return median(taken)
