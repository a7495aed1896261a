"""The tutorials do what they say, and their saved outputs are what a reader sees."""

from __future__ import annotations

import difflib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from kernels import execute
from save import clean
from solutions import cells_by_exercise, exercise_of, solutions_of, solve
from tries import insert, remove, tries

from ddp_notebook.views.ansi import strip_ansi
from ddp_notebook.workshop.check import exercises

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MOST_BYTES = 500_000
CELL_TIMEOUT_S = 200
FAILS_ON_PURPOSE = "raises-exception"
LIVE_BOARD = "ddp-still-"
"""In the picture of a live board, which goes on changing while later cells run."""
VARIES = "varies"
"""The tag of a cell whose words, not only its numbers, differ from run to run."""

LOCAL_PATH = re.compile(r"/(?:home|root|Users|tmp|work|usr|opt|var|private|mnt)/\w|site-packages")
IMAGES = ("image/png", "image/jpeg")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def fails_on_purpose(cell: Any) -> bool:
    """True for a cell that shows an error."""
    return FAILS_ON_PURPOSE in cell.metadata.get("tags", ())


def errors(cell: Any) -> list[str]:
    """What the cell raised."""
    return [f"{o.ename}: {o.evalue}" for o in cell.outputs if o.output_type == "error"]


def shown(cell: Any) -> str:
    """All that the cell has shown, without its images."""
    outputs = json.loads(json.dumps(cell.outputs))
    for output in outputs:
        for mime in IMAGES:
            output.get("data", {}).pop(mime, None)
    return json.dumps(outputs)


def in_words(cell: Any) -> str:
    """What the cell says, as far as it is the same in every run: no numbers, no layout."""
    texts = [
        str(output.get("text") or output.get("data", {}).get("text/plain", ""))
        for output in cell.outputs
        if LIVE_BOARD not in output.get("data", {}).get("text/html", "")
    ]
    words = re.findall(r"\w+", strip_ansi(" ".join(texts)))
    return " ".join(word for word in words if word.isalpha())


def other_words(now: Any, then: Any) -> str:
    """Where what the cell says now differs from what is saved, in brackets; empty if nowhere."""
    words, saved = in_words(now).split(), in_words(then).split()
    parts = []
    matcher = difflib.SequenceMatcher(None, saved, words, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            before, after = " ".join(saved[max(0, i - 4) : i]), " ".join(saved[i_end : i_end + 4])
            was, is_now = " ".join(saved[i:i_end]), " ".join(words[j:j_end])
            parts.append(
                f"  … {before} [saved: {was or 'nothing'}] [now: {is_now or 'nothing'}] {after} …"
            )
    return "\n".join(parts)


def verdict_of(cells: list[Any]) -> str:
    """What `check` said, as the value of the last of the cells of an exercise."""
    return "".join(
        output.data.get("text/plain", "")
        for output in cells[-1].outputs
        if output.output_type == "execute_result"
    )


def test_words_that_changed_are_named() -> None:
    saved, now = (
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=text)])
        for text in ("rank 2 waits for rank 1 in its store", "ranks 0-2 wait for 1 in its store")
    )
    assert other_words(saved, saved) == ""
    assert other_words(now, saved).splitlines() == [
        "  …  [saved: rank waits] [now: ranks wait] for rank in its …",
        "  … rank waits for [saved: rank] [now: nothing] in its store …",
    ]


def test_there_are_tutorials() -> None:
    assert NOTEBOOKS


@each_notebook
@pytest.mark.timeout(CELL_TIMEOUT_S + 100)
def test_a_tutorial_runs_and_its_claims_and_solutions_hold(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(path, tmp_path))
    notebook = nbformat.read(copy, as_version=4)
    tried = insert(notebook)
    solve(notebook, path)
    execute(notebook, tmp_path, CELL_TIMEOUT_S)
    for attempt in tried:
        mark = "✓" if attempt.kind == "right" else "✗"
        assert attempt.verdict.startswith(f"{mark} {attempt.exercise}: "), attempt
    remove(notebook, tried)
    saved = clean(nbformat.read(path, as_version=4))
    changed = []
    for number, (now, then) in enumerate(
        zip(code_cells(clean(notebook)), code_cells(saved), strict=True), 1
    ):
        assert bool(errors(now)) == fails_on_purpose(now), now.source
        if exercise_of(now) is None:
            assert bool(now.outputs) == bool(then.outputs), now.source
            if VARIES not in now.metadata.get("tags", ()) and (words := other_words(now, then)):
                changed.append(f"[{number}] {now.source.splitlines()[0]}\n{words}")
    if changed:
        how = f"If that is right, save it again: python tests/notebooks/save.py {path.stem[:2]}"
        cells = "\n".join(changed)
        pytest.fail(f"{path.name} says other words than are saved:\n{cells}\n{how}", pytrace=False)
    for name, cells in cells_by_exercise(notebook).items():
        assert verdict_of(cells).startswith(f"✓ {name}: "), verdict_of(cells)
    assert list(tmp_path.iterdir()) == [copy], "a tutorial leaves no file"


@pytest.mark.parametrize("chapter", ["05", "06", "11"])
@pytest.mark.timeout(CELL_TIMEOUT_S + 100)
def test_what_a_tutorial_claims_of_ranks_holds_for_two(chapter: str, tmp_path: Path) -> None:
    [path] = (path for path in NOTEBOOKS if path.stem.startswith(chapter))
    notebook = nbformat.read(path, as_version=4)
    solve(notebook, path)
    for cell in code_cells(notebook):
        cell.source = cell.source.replace("--world-size 4", "--world-size 2")
    execute(notebook, tmp_path, CELL_TIMEOUT_S)
    for cell in code_cells(notebook):
        assert bool(errors(cell)) == fails_on_purpose(cell), (cell.source, errors(cell))


@each_notebook
def test_a_tutorial_is_saved_as_it_ran_from_top_to_bottom(path: Path) -> None:
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert bool(errors(cell)) == fails_on_purpose(cell), errors(cell)


@each_notebook
def test_saved_outputs_say_nothing_of_the_machine_they_came_from(path: Path) -> None:
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert not LOCAL_PATH.search(shown(cell)), cell.source
        assert "widget-view" not in shown(cell), "a reader has no kernel behind the widget"
        assert "execution" not in cell.metadata, "times of the run"


@each_notebook
def test_a_tutorial_is_small_and_says_why_before_each_step(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MOST_BYTES
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].cell_type == "markdown"
    title, promise = notebook.cells[0].source.split("\n\n")[:2]
    assert title.startswith("# ")
    assert promise.startswith("**After this notebook you can "), "what for, in one sentence"


def test_every_exercise_stands_in_a_notebook_with_its_solution() -> None:
    found = []
    for path in NOTEBOOKS:
        cells = cells_by_exercise(nbformat.read(path, as_version=4))
        assert cells.keys() == solutions_of(path).keys(), path.name
        assert {name.split(".")[0] for name in cells} <= {str(int(path.name[:2]))}
        for name, of_it in cells.items():
            assert len(of_it) == len(solutions_of(path)[name]), name
            assert f'check("{name}"' in of_it[-1].source, "the last cell checks"
        found.extend(cells)
    assert sorted(found) == sorted(exercises())


def test_every_try_is_of_an_exercise_and_is_right_or_wrong() -> None:
    text = Path(__file__).with_name("tries.md").read_text("utf-8")
    assert len(tries()) == text.count("\n## ")
    assert {attempt.exercise for attempt in tries()} <= set(exercises())


@each_notebook
def test_an_exercise_is_saved_as_still_open(path: Path) -> None:
    for name, cells in cells_by_exercise(nbformat.read(path, as_version=4)).items():
        assert verdict_of(cells).startswith(f"✗ {name}: still open."), verdict_of(cells)
