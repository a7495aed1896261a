"""The solutions of the exercises, and the notebooks with them in their places.

`notebooks/solutions/05_….md` has a heading ``## 5.1`` for each exercise of that notebook, and under
it a block of Python for each cell of the notebook that is tagged ``exercise-5.1``, in their order.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
TAG = "exercise-"

_SECTION = re.compile(r"^## (\d+\.\d+)\b.*?$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def solutions_of(notebook: Path) -> dict[str, list[str]]:
    """The code of each exercise's cells. Of a notebook without exercises: nothing."""
    file = FOLDER / "solutions" / f"{notebook.stem}.md"
    if not file.exists():
        return {}
    return {
        name: [block.rstrip("\n") for block in _BLOCK.findall(body)]
        for name, body in _SECTION.findall(file.read_text("utf-8"))
    }


def exercise_of(cell: Any) -> str | None:
    """The exercise that a cell is for, from its tag."""
    for tag in cell.metadata.get("tags", ()):
        if tag.startswith(TAG):
            return str(tag.removeprefix(TAG))
    return None


def cells_by_exercise(notebook: Any) -> dict[str, list[Any]]:
    """The cells to fill in, by exercise."""
    cells: dict[str, list[Any]] = {}
    for cell in notebook.cells:
        name = exercise_of(cell)
        if cell.cell_type == "code" and name is not None:
            cells.setdefault(name, []).append(cell)
    return cells


def solve(notebook: Any, path: Path) -> None:
    """Put the solutions into the cells of the exercises, in place."""
    solutions = solutions_of(path)
    for name, cells in cells_by_exercise(notebook).items():
        for cell, source in zip(cells, solutions[name], strict=True):
            cell.source = source
