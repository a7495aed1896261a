"""What a person sees in a real JupyterLab: the board, output as it is written, a death."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from boards import Board
from labs import Lab, Notebook, opened
from playwright.sync_api import Browser, expect
from support import our_processes, session_folders, spared_processes

from ddp_notebook.launch.timeouts import scaled_for_load

pytestmark = pytest.mark.timeout(240)

DEATH_SHOWN_WITHIN_S = 2.0
LOAD, INIT, LOOP, RESTART, BOARD = range(5)
CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_init --world-size 4 --board here",
    """%%ddp
import pathlib, time
for step in range(100_000):
    print("step", step)
    if pathlib.Path("go-on").exists():
        break
    time.sleep(0.05)
print("that was all")""",
    "%ddp_restart",
    "from ddp_notebook.magics import live_board\nlive_board._MOST_EARLIER = 0\n%ddp_board --here",
]


@pytest.fixture(scope="module")
def open_notebook(
    nothing_left_behind_by_the_module: None,
    lab: Lab,
    browser: Browser,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Notebook]:
    """A notebook with four ranks, open in a browser."""
    pictures = tmp_path_factory.mktemp("pictures")
    with opened(lab, browser, CELLS, pictures / "last.png") as made:
        made.run(LOAD)
        made.run(INIT)
        [folder] = session_folders()
        with spared_processes((process.pid for process in our_processes()), str(folder)):
            yield made


@pytest.fixture
def notebook(open_notebook: Notebook, lab: Lab) -> Notebook:
    """The notebook, its four ranks ready, whatever the test before did to them."""
    (lab.root / "go-on").unlink(missing_ok=True)
    rows = open_notebook.cells.nth(INIT).locator(".ddpb-row")
    settled = rows.filter(has_text=re.compile("✓ready|error"))
    expect(settled).to_have_count(4)  # what a cell did is shown a moment after its end
    if rows.filter(has_text="error").count():
        open_notebook.start(RESTART)
    expect(rows.filter(has_text="✓ready")).to_have_count(4)
    return open_notebook


def test_the_board_shows_four_ranks_ready(notebook: Notebook, tmp_path: Path) -> None:
    rows = notebook.cells.nth(INIT).locator(".ddpb-row")
    expect(rows).to_have_count(4)
    for rank in range(4):
        expect(rows.nth(rank)).to_contain_text("✓ready")
    expect(notebook.cells.nth(INIT).locator(".ddpb-walk")).to_be_hidden()  # setup is over
    notebook.page.screenshot(path=tmp_path / "ready.png")


SAMPLE = """board => {
  window.layouts = [];
  setInterval(() => {
    const { y } = board.getBoundingClientRect();
    const zones = [".ddpb-head", ".ddpb-toolbar", ".ddpb-lanes", ".ddpb-tabbar", ".ddpb-panel"];
    const boxes = zones.map((zone) => board.querySelector(zone).getBoundingClientRect());
    window.layouts.push(boxes.map((box) => [box.y - y, box.height].map(Math.round)).join(" "));
  }, 200);
}"""
"""Has the page note where the zones of a board are, five times a second."""


def test_an_idle_board_is_low_and_a_run_moves_nothing_in_it(notebook: Notebook, lab: Lab) -> None:
    board = Board(notebook.cells.nth(INIT))
    height = lambda: (board.el.bounding_box() or {})["height"]  # noqa: E731
    assert height() <= 340
    fold = board.el.locator(".ddpb-fold")
    fold.click()
    assert height() <= 210
    fold.click()
    board.el.evaluate(SAMPLE)
    notebook.start(LOOP)
    expect(board.el.locator(".ddpb-title b")).to_have_text("running")
    expect(board.tab("Output")).to_have_attribute("aria-selected", "true")
    notebook.page.wait_for_function("() => window.layouts.length > 100")
    (lab.root / "go-on").touch()
    expect(board.el.locator(".ddpb-title b")).to_have_text("ready")
    expect(board.tab("Variables")).to_have_attribute("aria-selected", "true")
    layouts = notebook.page.evaluate("window.layouts")
    assert len(set(layouts)) == 1, set(layouts)


def test_output_appears_while_the_cell_still_runs(
    notebook: Notebook, lab: Lab, tmp_path: Path
) -> None:
    cell = notebook.start(LOOP)
    expect(cell).to_contain_text("ranks 0-3")
    expect(cell).to_contain_text("step 5")
    expect(notebook.prompt(LOOP)).to_have_text("[*]:")
    notebook.page.screenshot(path=tmp_path / "running.png")
    (lab.root / "go-on").touch()
    expect(cell).to_contain_text("that was all")
    expect(notebook.prompt(LOOP)).to_have_text(re.compile(r"^\[\d+\]:$"))


def test_the_board_shows_a_killed_rank_by_itself_within_2_seconds(
    notebook: Notebook, tmp_path: Path
) -> None:
    board = notebook.cells.nth(INIT)
    row = board.locator(".ddpb-row").nth(2)
    pid = int(re.findall(r"pid (\d+)", row.get_attribute("title") or "")[0])
    assert "python" in psutil.Process(pid).name()
    os.kill(pid, signal.SIGKILL)
    within_ms = 1000 * scaled_for_load(DEATH_SHOWN_WITHIN_S)
    expect(row).to_contain_text("killed by SIGKILL", timeout=within_ms)
    expect(row).to_contain_text("error")
    expect(board).to_contain_text("%ddp_restart --ranks 2")
    notebook.page.screenshot(path=tmp_path / "dead.png")


def test_a_board_that_is_let_go_leaves_the_picture_that_its_cell_has(
    open_notebook: Notebook, tmp_path: Path
) -> None:
    notebook = open_notebook
    first = notebook.cells.nth(INIT)
    picture = first.locator("[class^=ddp-still-]")
    expect(picture).to_be_hidden()
    expect(notebook.start(BOARD).locator(".ddpb-row")).to_have_count(4)
    expect(picture).to_be_visible()
    expect(picture).to_contain_text("As it was when this cell ended")
    expect(first.locator(".ddpb")).to_have_count(0)
    expect(first.locator(".jupyter-widgets")).to_be_hidden()
    notebook.page.screenshot(path=tmp_path / "let_go.png")
