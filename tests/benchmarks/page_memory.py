"""A live board in JupyterLab while collectives rush by: does the page's memory grow with them?"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, mean, median, quantiles
from typing import Any

import psutil
from memory import megabytes
from rows import Row, seconds
from support import eventually

sys.path.insert(0, str(Path(__file__).parent.parent / "browser"))

from boards import Board
from labs import SHOWN_WITHIN_MS, Lab, Notebook, opened, running_lab
from playwright.sync_api import CDPSession, expect

RATE = 1_000
"""Collectives a second of each of the two ranks."""
EVERY_S = 30.0
MOST_GROWTH = 0.1
"""Of the level, in ten minutes."""
_DRAWN, _ISSUED = "drawn.txt", "issued.txt"
_TIMED = f"""import os, time
from ddp_notebook.board.controller import LiveBoard
plain, file = LiveBoard._draw, open("{_DRAWN}", "w", buffering=1)
def timed(self):
    began_s, busy_s = time.perf_counter(), time.thread_time()
    plain(self)
    print(time.perf_counter() - began_s, time.thread_time() - busy_s, file=file)
LiveBoard._draw = timed
print("pid", os.getpid())"""
_RUSH = f"""%%ddp
import pathlib, time
x, began_s, issued, number = torch.zeros(1), time.monotonic(), pathlib.Path("{_ISSUED}"), 0
while True:
    dist.all_reduce(x)
    number += 1
    if rank == 0 and number % {RATE} == 0:
        issued.write_text(f"{{number}} {{time.monotonic()}}")
    ahead_s = number / {RATE} - (time.monotonic() - began_s)
    if ahead_s > 0.01:
        time.sleep(ahead_s)"""
_CELLS = ["%load_ext ddp_notebook", _TIMED, "%ddp_init --world-size 2 --device cpu", _RUSH]


@dataclass(frozen=True)
class Sample:
    """What is held at one moment, after the page's garbage was collected."""

    at_s: float
    heap_bytes: float
    nodes: float
    page_bytes: float
    """Resident memory of Chromium's processes for pages."""
    kernel_bytes: float


def rows(minutes: float = 10.0) -> list[Row]:
    """Watch a board for so long; nothing of it may grow."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if chromium is None:
        return [Row("a live board in a browser", "no Chromium here", wanted="one", met=False)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_lab(Path(folder)) as lab,
        opened(lab, chromium, _CELLS, Path(folder) / "last.png") as notebook,
    ):
        return _watch(lab, notebook, minutes)


def _watch(lab: Lab, notebook: Notebook, minutes: float) -> list[Row]:
    notebook.run(0)
    said = notebook.run(1).inner_text()
    kernel = psutil.Process(int(said.split("pid")[-1].split()[0]))
    board = Board(notebook.run(2))
    board.await_roles("ready", "ready")
    notebook.start(3)
    expect(board.timeline).to_be_visible(timeout=SHOWN_WITHIN_MS)
    cdp = notebook.page.context.new_cdp_session(notebook.page)
    cdp.send("Performance.enable")
    first, drawn = _issued(lab), len(_drawn(lab))
    began_s = time.monotonic()
    samples = [_sample(cdp, kernel)]
    while time.monotonic() - began_s < 60 * minutes:
        notebook.page.wait_for_timeout(1000 * min(EVERY_S, 6 * minutes))
        samples.append(_sample(cdp, kernel))
        _say(samples[-1])
    took_s = time.monotonic() - began_s
    last, costs = _issued(lab), _drawn(lab)[drawn:]
    rate = (last[0] - first[0]) / (last[1] - first[1])
    flat = [_flat(name, unit, samples) for name, unit in _HELD]
    return [
        Row(f"a live board for {minutes:g} min: collectives a second", f"{rate:.0f} on each rank"),
        *flat,
        *_drawing(costs, took_s),
    ]


def _sample(cdp: CDPSession, kernel: psutil.Process) -> Sample:
    cdp.send("HeapProfiler.collectGarbage")
    metrics = {
        each["name"]: each["value"] for each in cdp.send("Performance.getMetrics")["metrics"]
    }
    pages = [each for each in psutil.Process().children(recursive=True) if _shows_pages(each)]
    return Sample(
        time.monotonic(),
        metrics["JSHeapUsedSize"],
        metrics["Nodes"],
        sum(each.memory_info().rss for each in pages),
        kernel.memory_info().rss,
    )


def _shows_pages(process: psutil.Process) -> bool:
    try:
        return "--type=renderer" in process.cmdline()
    except psutil.Error:
        return False


_HELD: Sequence[tuple[str, Any]] = (
    ("heap_bytes", "the page's JavaScript heap"),
    ("nodes", "its DOM nodes"),
    ("kernel_bytes", "memory of the kernel"),
    ("page_bytes", "memory of Chromium's processes for pages"),
)


def _flat(name: str, words: str, samples: Sequence[Sample]) -> Row:
    """A bar on growth in the second half, as a line of least squares has it."""
    half = samples[len(samples) // 2 :]
    values = [getattr(each, name) for each in half]
    slope = linear_regression([each.at_s for each in half], values).slope
    level, growth = mean(values), slope * 600 / mean(values)
    shown = f"{level:.0f}" if name == "nodes" else megabytes(level)
    # Chromium gives memory back when it likes; what the page holds is what is judged.
    judged = name != "page_bytes"
    return Row(
        f"  {words}",
        f"{shown}, {growth:+.1%} in 10 min",
        wanted=f"under {MOST_GROWTH:+.0%} in 10 min" if judged else "",
        met=growth < MOST_GROWTH if judged else None,
    )


def _drawing(costs: Sequence[tuple[float, float]], took_s: float) -> list[Row]:
    rate = len(costs) / took_s
    busy = [busy_s for _, busy_s in costs]
    return [
        Row("  updates a second", f"{rate:.1f}", wanted="at most 10", met=rate <= 10.5),
        Row(
            "  the kernel's time for an update",
            f"{seconds(median(busy))}, p99 {seconds(quantiles(busy, n=100)[-1])}",
            wanted="under 5 ms",
            met=median(busy) < 0.005,
        ),
    ]


def _drawn(lab: Lab) -> list[tuple[float, float]]:
    """Of each drawing the seconds it took, and those that its thread worked."""
    lines = (lab.root / _DRAWN).read_text().splitlines()
    return [(float(took), float(busy)) for took, busy in map(str.split, lines)]


def _issued(lab: Lab) -> tuple[int, float]:
    """How many collectives rank 0 had issued, and when that was."""
    file = lab.root / _ISSUED

    def told() -> list[str]:
        parts = file.read_text().split() if file.exists() else []
        return parts if len(parts) == 2 else []

    count, at_s = eventually(told, 60, "a collective")
    return int(count), float(at_s)


def _say(sample: Sample) -> None:
    print(
        f"heap {megabytes(sample.heap_bytes)}, {sample.nodes:.0f} nodes, page"
        f" {megabytes(sample.page_bytes)}, kernel {megabytes(sample.kernel_bytes)}",
        file=sys.stderr,
        flush=True,
    )
