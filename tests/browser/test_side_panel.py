"""The board beside the notebook, in a real JupyterLab: it stays, and what happens moves nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from boards import Board
from labs import SLOW, Lab, end_kernels, opened
from playwright.sync_api import Browser, expect
from support import eventually

pytestmark = pytest.mark.timeout(240)

LOAD, INIT, TRAIN, HANG, AGAIN = range(5)
CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_init --world-size 4",
    """%%ddp
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 20))
for step in range(150):
    ddp(torch.randn(8, 20)).sum().backward()""",
    "%%ddp\nif rank == 0:\n    dist.barrier()\ndist.all_reduce(torch.ones(1))",
    "%ddp_board",
]
NOTE_BOXES = """board => {
  const note = (name, el) => new ResizeObserver(() => {
    const { x, y, width, height } = el.getBoundingClientRect();
    (window.boxes ??= []).push(`${name} ${[x, y, width, height].map(Math.round)}`);
  }).observe(el);
  note("board", board);
  for (const el of board.querySelectorAll(".ddpb-head, .ddpb-lanes, .ddpb-toolbar, .ddpb-tabs"))
    note(el.className, el);
}"""
"""Has the page note where these are, whenever one of them gets another size."""
BUTTONS_AT = """board => {
  const places = (width) => {
    board.style.width = `${width}px`;
    const { x, y } = board.getBoundingClientRect();
    return [...board.querySelectorAll(".ddpb-action")].map((button) => {
      const at = button.getBoundingClientRect();
      const cut = button.scrollWidth > button.clientWidth;
      return [button.dataset.name, at.x - x, at.y - y, at.width, cut].join(" ");
    }).join();
  };
  const docks = [...Array(20).keys()].map((i) => 420 + 79 * i);
  const all = docks.flatMap((dock) => [dock, dock - 15].map(places)); // a scrollbar takes 15
  board.style.width = "";
  return [...new Set(all)];
}"""
"""Where the buttons are in a board, in docks of 420 to 1921 pixels: one answer if they stand still.
Asked at once, as buttons are made anew when what they do changes."""


def test_the_board_stands_beside_the_notebook_and_comes_back_after_a_reload(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    with opened(lab, browser, CELLS, tmp_path / "last.png") as notebook:
        page = notebook.page
        page.set_viewport_size({"width": 1280, "height": 800})
        page.keyboard.press("Control+b")  # without the list of files there is room for both
        panels = page.locator(".jupyterlab-sidecar")
        rows = panels.locator(".ddpb-row")
        page.evaluate(SLOW)
        notebook.run(LOAD)
        notebook.start(INIT)
        board = Board(panels)
        board.el.evaluate(NOTE_BOXES)
        board.await_roles(*["ready"] * 4)
        expect(notebook.cells.nth(INIT).locator(".ddpb")).to_be_hidden()
        # What is drawn again while it is pressed is pressed nevertheless.
        notebook.start(TRAIN)
        pick = board.rows.nth(1).get_by_role("button")
        pick.hover()
        page.mouse.down()
        expect(notebook.prompt(TRAIN)).to_have_text(f"[{TRAIN + 1}]:")
        page.mouse.up()
        expect(pick).to_have_attribute("aria-pressed", "true")
        pick.click()
        at_first = board.el.evaluate(BUTTONS_AT)
        assert len(at_first) == 1, f"no width moves a button: {at_first}"
        assert "true" not in at_first[0], f"no word is cut: {at_first}"
        notebook.run(HANG)
        expect(board.finding).to_contain_text("Only rank 0 calls barrier")
        board.rows.nth(3).get_by_role("button").click()
        expect(board.rows.nth(3).get_by_role("button")).to_have_attribute("aria-pressed", "true")
        now = board.el.evaluate(BUTTONS_AT)
        assert now == at_first, f"a button never moves: {at_first}, {now}"
        boxes = page.evaluate("window.boxes")
        assert len(set(boxes)) == 5, f"nothing jumps: {boxes}"
        # All of it is on the screen, both sides of the mismatch beside each other.
        whole = board.el.bounding_box()
        assert whole is not None and whole["y"] + whole["height"] <= 800
        sides = board.finding.locator(".ddpb-side")
        expect(sides).to_contain_text(["dist.barrier()", "dist.all_reduce"])
        expect(sides.locator(".ddpb-on-at")).to_have_count(2)
        left, right = (each.bounding_box() for each in sides.all())
        assert left is not None and right is not None and left["y"] == right["y"]
        expect(board.el.locator(".ddpb-walk")).to_be_hidden()
        # A side leads to its line.
        sides.nth(0).get_by_role("button").click()
        expect(notebook.cells.nth(HANG).locator(".ddpb-line-mark")).to_be_visible()
        expect(panels.get_by_role("button", name="Abort")).to_be_enabled()
        page.screenshot(path=tmp_path / "beside.png")

        # Back to the training, which is another run: its collectives, and nothing was wrong.
        slider = board.el.get_by_role("slider")
        slider.fill("500")
        expect(board.el.locator(".ddpb-past")).to_be_visible()
        expect(board.finding).to_have_count(0)
        expect(slider).to_have_attribute("aria-valuetext", re.compile(r"^\d.* ago$"))
        board.el.locator(".ddpb-past").click()
        expect(board.finding).to_be_visible()

        page.reload()
        notebook.await_kernel()
        expect(panels).to_contain_text("Only rank 0 calls `barrier`")
        # Its own cell has ended long ago: what it shows now is what the ranks are at now.
        before = panels.get_attribute("id")
        notebook.start(AGAIN)
        expect(page.locator(f"[id='{before}']")).to_have_count(0)
        expect(panels).to_have_count(1)
        expect(rows).to_have_count(4)
        # The new one says what is wrong, too, and knows the runs before.
        expect(panels).to_contain_text("Only rank 0 calls `barrier`")
        info = panels.locator(".ddpb-info")
        expect(info).to_contain_text("cell 4 · ")
        board.el.get_by_role("slider").fill("0")
        expect(info).to_contain_text("cell 3 · ")
        board.el.locator(".ddpb-past").click()
        page.screenshot(path=tmp_path / "again.png")
        panels.get_by_role("button", name="Abort").click()
        expect(rows.nth(0)).to_contain_text("ready")

        # The panel of a new kernel takes the place of the one whose ranks ended with theirs.
        page.locator("[data-command='notebook:restart-kernel']").first.click()
        page.locator(".jp-Dialog .jp-mod-accept").click()
        expect(panels.locator(".ddpb-gone")).to_contain_text("These ranks ended with their kernel")
        notebook.run(LOAD)
        notebook.start(INIT)
        expect(panels).to_have_count(1)
        Board(panels).await_roles(*["ready"] * 4)
        expect(page.get_by_role("tab", name="DDP ranks: ranks")).to_be_visible()


def test_a_notebook_opened_again_without_its_kernel_has_no_lost_panel_and_shows_no_error(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    cells = [CELLS[LOAD], "%ddp_init -n 2 --board side", "%ddp_board --here"]
    with opened(lab, browser, cells, tmp_path / "last.png") as notebook:
        page = notebook.page
        notebook.run(LOAD)
        notebook.start(INIT)
        board = Board(page.locator(".jupyterlab-sidecar"))
        board.await_roles("ready", "ready")
        expect(notebook.cells.nth(INIT)).to_contain_text("The board is beside the notebook")
        board.panel.get_by_role("button", name="Insert a cell that trains").click()
        expect(board.panel).to_contain_text("It is in a new cell: run it.")
        expect(notebook.cells).to_have_count(4)
        expect(notebook.cells.nth(3)).to_contain_text("    optimizer.step()")
        expect(notebook.run(2).locator(".ddpb-row")).to_have_count(2)
        page.keyboard.press("Control+s")
        saved = lab.root / "ranks.ipynb"
        eventually(lambda: "ddp-still-" in saved.read_text("utf-8"), what="it is saved")
        workspaces = lab.workspaces
        eventually(lambda: any("ranks.ipynb" in w.read_text("utf-8") for w in workspaces.iterdir()))
        end_kernels(page, lab)
        page.reload()
        expect(notebook.cells.nth(2).locator(".ddp-board")).to_be_visible()
        lost = page.get_by_text("Error displaying widget")
        expect(lost.first).to_be_attached()  # Jupyter has looked for the widget
        for each in lost.all():
            expect(each).to_be_hidden()
        expect(page.locator(".jupyterlab-sidecar")).to_have_count(0)
        expect(page.get_by_role("tab", name="DDP ranks")).to_have_count(0)
        page.screenshot(path=tmp_path / "reopened.png")
