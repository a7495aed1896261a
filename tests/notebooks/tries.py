"""What learners try in an exercise, right and wrong, in the session of the notebook itself.

`tries.md` has them: a heading such as ``## 5.2 wrong: its own block``, and under it the code that
stands in place of the dots.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solutions import cells_by_exercise

_TRY = re.compile(
    r"^## (\d+\.\d+) (right|wrong|hangs): (.*?)$\s+```python\n(.*?)\n```$", re.MULTILINE | re.DOTALL
)
_DOTS = re.compile(r"^( *)(?:[\w, ]+ = |return )\.\.\..*$", re.MULTILINE)


@dataclass
class Try:
    """One try, and the cells that it put into the notebook."""

    exercise: str
    kind: str
    """right, wrong, or hangs, which is wrong as well."""
    title: str
    code: str
    cells: list[Any] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """✓ or ✗ and the sentence, as the notebook showed it; else what it raised."""
        outputs = self.cells[-1].outputs
        return "".join(
            o.get("data", {}).get("text/plain", "") or o.get("evalue", "")
            for o in outputs
            if o.output_type != "display_data"  # values of verbs above the last line
        )


def tries() -> list[Try]:
    """All of `tries.md`."""
    found = _TRY.findall(Path(__file__).with_suffix(".md").read_text("utf-8"))
    return [Try(*parts) for parts in found]


def insert(notebook: Any) -> list[Try]:
    """Put the tries behind the cells of each exercise; before its solutions are put in."""
    inserted = []
    for name, cells in cells_by_exercise(notebook).items():
        at = 1 + notebook.cells.index(cells[-1])
        for attempt in tries():
            if attempt.exercise == name:
                attempt.cells = _cells(attempt, cells)
                notebook.cells[at:at] = attempt.cells
                at += len(attempt.cells)
                inserted.append(attempt)
    return inserted


def _cells(attempt: Try, open_cells: list[Any]) -> list[Any]:
    cells = deepcopy(open_cells)
    for number, cell in enumerate(cells):
        cell.id = f"{attempt.exercise}-{hash(attempt.title) % 10**8}-{number}".replace(".", "-")
        cell.metadata["tags"] = ["raises-exception"] if attempt.kind == "hangs" else []
    cells[0].source = _in_place_of_the_dots(cells[0].source, attempt.code)
    if attempt.kind == "hangs":
        abort = deepcopy(cells[0])
        abort.id, abort.source = f"{cells[0].id}-abort", "%ddp_abort"
        cells.insert(-1, abort)
    return cells


def _in_place_of_the_dots(source: str, code: str) -> str:
    if code.startswith("%%ddp"):
        return code
    dots = _DOTS.search(source)
    assert dots, source
    indented = code.replace("\n", "\n" + dots[1])
    return source[: dots.start()] + dots[1] + indented + source[dots.end() :]


def remove(notebook: Any, inserted: list[Try]) -> None:
    """Take the cells of the tries out again."""
    ids = {cell.id for attempt in inserted for cell in attempt.cells}
    notebook.cells = [cell for cell in notebook.cells if cell.id not in ids]
