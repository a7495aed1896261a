"""The programs on the categories' pages: the broken one has the finding, the corrected one none."""

from __future__ import annotations

import keyword
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Category, Finding
from ddp_notebook.session import Session

FOUND_WITHIN_S = 12.0
"""On a quiet machine most are found after two; some programs take seconds themselves."""


_VALUE = "a value of the user's own is wrong: only what came of it can be known"
UNNAMED = {
    Category.EXCEPTION: _VALUE,
    Category.EXCEPTION_ON_ONE_RANK: _VALUE,
    Category.OOM_ON_ONE_RANK: _VALUE,
    Category.PARAM_MISMATCH: _VALUE,
    Category.RANK_DIED: _VALUE,
}
"""Categories whose fix names nothing that the page's change does, and why."""
_COMMON = {*keyword.kwlist, "rank", "dist", "torch", "first", "the", "of", "to", "an", "no"}
"""Words that say nothing: Python's, those of every program, and those of English."""


def shown(how: str) -> list[Category]:
    """The categories whose programs are shown as a ``cell``, ``script`` and so on, and are run."""
    return [c for c in Category if page(c).get("how", "cell") == how and "not_run" not in page(c)]


def page(category: Category) -> dict[str, Any]:
    """The page of a category, as its file has it."""
    return dict(catalogue.entry(category)["page"])


def programs(category: Category) -> tuple[str, str]:
    """The two programs of a page; the change is applied to the first, as it is printed."""
    broken = page(category)["broken"].lstrip("\n")
    return broken, catalogue.corrected(broken, page(category)["fixed"])


def check(session: Session, category: Category, folder: Path) -> None:
    """Run both on the ranks of a session, which are free before and after.

    What the finding says of a fix names what the change of the page adds or takes away.
    """
    broken, corrected = _found(session, category, folder)
    assert broken and broken[0].category is category, broken
    assert not corrected
    changed = [line[1:] for line in page(category)["fixed"].splitlines() if line[:1] in ("+", "-")]
    named = _words(" ".join(line.partition("#")[0] for line in changed)) & _words(broken[0].remedy)
    assert bool(named) is (category not in UNNAMED), (broken[0].remedy, changed)


def _words(text: str) -> set[str]:
    return {*re.findall(r"[A-Za-z_]\w+", text)} - _COMMON


def _found(session: Session, category: Category, folder: Path) -> Iterator[tuple[Finding, ...]]:
    for number, program in enumerate(programs(category)):
        began_s = time.monotonic()
        if page(category).get("how") == "script":
            script = folder / f"{category}-{number}.py"
            script.write_text(program)
            result = session.run_script(str(script), store="rank0")
        else:
            result = session.run_cell(program, number=7)
        took_s = time.monotonic() - began_s
        try:
            assert result.error is None or number == 0, result.error
            yield (result.diagnosis or session.why()).findings
            assert took_s < scaled_for_load(FOUND_WITHIN_S)
        finally:
            if result.error:
                session.restart()  # sooner than an abort where ranks wait in setup, or for a group
