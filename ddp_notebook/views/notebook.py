"""How IPython shows our values, and the output of ranks in a cell."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from types import ModuleType
from typing import Any, TypeAlias

from ddp_notebook.bench.result import BenchRun
from ddp_notebook.bench.steps import StepBenchResult
from ddp_notebook.model import (
    Board,
    Diagnosis,
    Ledger,
    OutputGroup,
    OutputKind,
    StackTree,
    StepTable,
    VariableTable,
    format_bytes,
    name_ranks,
)
from ddp_notebook.model.ddp import MeshLayout
from ddp_notebook.model.doctor import DoctorReport
from ddp_notebook.views import (
    bench,
    bench_figures,
    board,
    doctor,
    findings,
    ledger,
    markup,
    mesh,
    output,
    stacks,
    step_table,
    variables,
)
from ddp_notebook.views.ansi import ansi_to_html
from ddp_notebook.views.output_log import bars_apart

_STREAM_OF = {OutputKind.STDOUT: "stdout", OutputKind.STDERR: "stderr"}


Shown: TypeAlias = (
    Board | Diagnosis | StepTable | StackTree | VariableTable | DoctorReport | MeshLayout | Ledger
)
"""Values that are shown as text and as HTML."""
_VIEWS: dict[type, ModuleType] = {
    Board: board,
    Diagnosis: findings,
    StepTable: step_table,
    StackTree: stacks,
    VariableTable: variables,
    MeshLayout: mesh,
    DoctorReport: doctor,
    Ledger: ledger,
}


def mime_bundle(value: Shown) -> dict[str, str]:
    """A value as text and as HTML."""
    # Values know nothing of how they look: a program that runs without a notebook loads none of
    # this.
    view = _VIEWS[type(value)]
    return {"text/plain": view.text(value), "text/html": view.html(value)}


def bench_bundle(result: BenchRun | StepBenchResult) -> dict[str, str]:
    """A benchmark: its answer, a figure, how far to trust it, and tables."""
    if isinstance(result, StepBenchResult):
        panels, name = bench_figures.batch_panels(result), bench.steps_title(result)
        text, html = bench.steps_text(result), partial(bench.steps_html, result)
        plain = "\n".join(bench.share_plot(result))
    else:
        baseline: BenchRun | None = getattr(result, "baseline", None)
        panels, name = bench_figures.size_panels(result, baseline), bench.title(result)
        text = bench.table_text(result, baseline)
        html = partial(bench.table_html, result, baseline)
        plain = "\n".join(bench.time_plots(result))
    try:
        figure = bench_figures.on_page(panels, name, plain)
    except ImportError as error:  # the numbers are worth showing without matplotlib
        figure = f"<p>The figure is not drawn: {escape(str(error))}</p><pre>{escape(plain)}</pre>"
    return {"text/plain": text, "text/html": html(figure=figure)}


def live_bundle(
    groups: Sequence[OutputGroup], doing: str, table: StepTable | None = None
) -> dict[str, str]:
    """A running cell: the ranks' output so far, what they do, and where they are paused."""
    # The groups share 240 lines while the cell runs; all of it is shown at the end.
    lines = max(5, 240 // max(1, len(groups)))
    if table is None:
        return {"text/plain": doing, "text/html": output.live(groups, "", doing, lines)}
    shown = mime_bundle(table)
    text = "\n\n".join(filter(None, (output.outputs(groups), doing, shown["text/plain"])))
    return {
        "text/plain": text,
        "text/html": output.live(groups, shown["text/html"], doing, lines)
        if groups or doing
        else shown["text/html"],
    }


def show_outputs(publisher: Any, groups: Sequence[OutputGroup], *, fold: bool = False) -> None:
    """Put the ranks' output into the notebook: streams as streams, figures as figures.

    With `fold`, long text becomes HTML that shows its beginning and its end.
    """
    fold = fold and output.are_long(groups)
    for group in groups:
        sys.stdout.write(f"── {name_ranks(group.ranks)} ──\n")
        for piece in output.pieces(group.items):
            if fold and output.is_long(piece):
                sys.stdout.flush()
                publisher.publish(data=output.bundle(group.ranks, piece), metadata={})
                continue
            for item in bars_apart(piece):
                # Streams go to sys.stdout and sys.stderr, and not as displays: then %%capture, a
                # log of the terminal and the notebook's own folding treat them as output of the
                # cell.
                if item.what in _STREAM_OF:
                    sys.stdout.flush()  # what comes on stderr belongs under its header
                    stream = getattr(sys, _STREAM_OF[item.what])
                    stream.write(item.text.removesuffix("\n") + "\n")
                    stream.flush()
                elif item.data:
                    sys.stdout.flush()
                    publisher.publish(data=dict(item.data), metadata=dict(item.metadata))
    if groups:  # to a kernel's thread and back: half a millisecond, which a quiet cell saves
        sys.stdout.flush()


def victims_bundle(groups: Sequence[OutputGroup]) -> dict[str, str]:
    """Tracebacks of ranks that are not the cause, folded."""
    text = traceback_bundle(groups)["text/plain"]
    who = name_ranks(sorted({rank for group in groups for rank in group.ranks}))
    summary = f"Errors of {who}"
    html = (
        f'<div class="ddp-view">{markup.STYLE}<details><summary style="cursor: pointer">{summary}'
        f'</summary><div class="ddp-folded"><pre>{ansi_to_html(text)}</pre></div></details></div>'
    )
    return {"text/plain": f"{summary}:\n\n{text}", "text/html": html}


def traceback_bundle(groups: Sequence[OutputGroup]) -> dict[str, str]:
    """Each distinct traceback once, named by its ranks."""
    parts = [
        f"── {name_ranks(group.ranks)} ──\n" + "\n".join(item.text for item in group.items)
        for group in groups
    ]
    return {"text/plain": "\n\n".join(parts)}


def withheld_text(withheld_bytes: Mapping[int, int]) -> str:
    """How much more output there was, and how to get it."""
    lines = [
        f"Rank {rank} wrote {format_bytes(count)} more. All of it: %ddp_output --ranks {rank}"
        for rank, count in sorted(withheld_bytes.items())
    ]
    return "\n".join(lines)


class Displays:
    """Registers our types' formatters in one shell. Knows which cell shows its value itself."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._shown_in: int | None = None
        self._shown: tuple[object, int] = None, 0
        """A value that a cell showed itself, and which cell that was."""

    def register(self) -> None:
        """Tell IPython how to show each type of value."""
        formatter = self._shell.display_formatter.ipython_display_formatter
        formatter.for_type(BenchRun, self._show_bench)
        formatter.for_type(StepBenchResult, self._show_bench)
        for shown in _VIEWS:
            formatter.for_type(shown, self._show)

    def shown_already(self, value: object = None) -> None:
        """The running cell shows its value (or only this one) itself: IPython need not."""
        # The number of the cell, and not a flag: a cell that fails in between would leave a flag
        # behind.
        if value is not None:
            self._shown = value, self._shell.execution_count
        else:
            self._shown_in = self._shell.execution_count

    @property
    def are_needed(self) -> bool:
        """False in a cell that shows its value itself."""
        return bool(self._shown_in != self._shell.execution_count)

    def _show(self, value: Shown) -> None:
        # A verb that shows its value in mid-cell has done what IPython would do with the value of
        # the last line.
        shown, cell = self._shown
        if value is shown and cell == self._shell.execution_count:
            return
        if isinstance(value, Board) and not self.are_needed:
            return
        self._shell.display_pub.publish(data=mime_bundle(value), metadata={})

    def _show_bench(self, result: BenchRun | StepBenchResult) -> None:
        self._shell.display_pub.publish(data=bench_bundle(result), metadata={})
