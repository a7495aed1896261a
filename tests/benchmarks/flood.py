"""50 MB printed by each of four ranks: the cell, the notebook file, and the cells after it."""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import nbclient
import nbformat
from rows import Numbers, Row, seconds

TRIVIAL = "%%ddp\nx = 1"
TRIVIAL_CELLS = 25
FLOOD = """%%ddp
line = str(rank) + "x" * 98
for _ in range(500_000):
    print(line)
"""


class Flood:
    """A whole notebook, executed as a front end does and saved."""

    name = "flood"

    def round(self) -> Numbers:
        """Trivial cells, the flood, trivial cells again."""
        setup = ["%load_ext ddp_notebook", "%ddp_init --world-size 4", TRIVIAL]
        trivial = [TRIVIAL] * TRIVIAL_CELLS
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [
            nbformat.v4.new_code_cell(source)
            for source in (*setup, *trivial, FLOOD, TRIVIAL, *trivial, "%ddp_shutdown")
        ]
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "flood.ipynb"
            nbformat.write(notebook, path)
            size_bytes = path.stat().st_size
        times = [elapsed_s(cell) for cell in notebook.cells]
        flood = len(setup) + TRIVIAL_CELLS
        return {
            "flood_s": times[flood],
            "file_bytes": size_bytes,
            "before_s": median(times[len(setup) : flood]),
            "after_s": median(times[flood + 2 : -1]),
        }

    def rows(self, medians: Numbers) -> list[Row]:
        """The three bars. Times of later cells vary by a tenth on a quiet machine."""
        flood_s, size_mb = medians["flood_s"], medians["file_bytes"] / 1e6
        before_s, after_s = medians["before_s"], medians["after_s"]
        slower = after_s / before_s
        return [
            Row(
                "50 MB printed per rank: the cell",
                seconds(flood_s),
                "",
                None,
                "at most 5 s",
                flood_s <= 5,
            ),
            Row("  the notebook's file", f"{size_mb:.2f} MB", "", None, "under 5 MB", size_mb < 5),
            Row(
                "  a trivial cell after it",
                seconds(after_s),
                f"before it {seconds(before_s)}",
                slower,
                "as before (1.15x)",
                slower <= 1.15,
            ),
        ]


def elapsed_s(cell: Any) -> float:
    """How long a cell ran, by the times that were recorded when it was executed."""
    times = cell.metadata["execution"]
    started, ended = times["iopub.execute_input"], times["shell.execute_reply"]
    return (parse(ended) - parse(started)).total_seconds()


def parse(text: str) -> datetime:
    """A time as Jupyter writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
