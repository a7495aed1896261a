"""The tabs of the live board in a real browser: stacks, variables, output, runs, answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from boards import Board
from labs import SHOWN_WITHIN_MS, Lab, opened
from playwright.sync_api import Browser, expect
from support import eventually

pytestmark = pytest.mark.timeout(240)

HOSTILE = "<img src=x onerror=window.hurt=1>"
VALUES = f"""%%ddp
import sys
lr = 0.01 if rank == 2 else 0.1
name = "{HOSTILE}"
x = torch.arange(4.0)
print("{HOSTILE}", "learning rate", lr)
for n in range(50):
    print(f"\\r{{n}}/50", end="", file=sys.stderr, flush=True)"""
HANG = """%%ddp
def step(batch):
    loss = batch.sum()
    if rank == 1:
        dist.recv(batch, 0)
    dist.all_reduce(loss)
step(torch.ones(3))"""
NEXT = "%%ddp\ny = 1"
STOP = """%%ddp
def double(x):
    return 2 * x
breakpoint()
lr = double(rank)
print("done")"""


@pytest.mark.parametrize("place", ["lab/tree", "notebooks"], ids=["lab", "notebook7"])
def test_tabs_show_what_ranks_have_wrote_and_where_they_are(
    lab: Lab, browser: Browser, tmp_path: Path, place: str
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    busy = (
        f"import os, time\nopen({str(begun)!r}, 'w').close()\n"
        f"while not os.path.exists({str(go_on)!r}): time.sleep(0.1)"
    )
    cells = [
        "%load_ext ddp_notebook",
        "%ddp_init --world-size 3 --board here",
        VALUES,
        HANG,
        NEXT,
        STOP,
        busy,
    ]
    with opened(lab, browser, cells, tmp_path / "last.png", place) as notebook:
        page = notebook.page
        notebook.run(0)
        board = Board(notebook.run(1))
        board.await_roles("ready", "ready", "ready")
        panel, tab = board.panel, board.tab
        notebook.run(2)

        tab("Variables").click()
        row = panel.locator("tr", has_text="lr")
        expect(row).to_contain_text("≠", timeout=SHOWN_WITHIN_MS)
        expect(row.locator("td")).to_have_text(["0.1", "0.01difference 0.09"])
        expect(row.locator(".ddpb-odd")).to_have_count(1)
        expect(panel.locator("tr", has_text="name").last).to_contain_text(HOSTILE)
        expect(panel.locator("tr", has_text="x float32 [4] cpu0, 1, 2, 3")).to_have_count(1)
        panel.get_by_role("checkbox").check()
        expect(panel.locator("tbody tr")).to_have_count(1)
        panel.get_by_role("checkbox").uncheck()
        page.screenshot(path=tmp_path / "variables.png")

        tab("Variables").press("ArrowRight")
        expect(tab("Output")).to_be_focused()
        expect(panel).to_contain_text("learning rate 0.01", timeout=SHOWN_WITHIN_MS)
        expect(panel.locator("pre").first).to_contain_text("49/50")
        expect(panel.locator("pre").first).not_to_contain_text("48/50")
        expect(panel.locator("summary b")).to_have_text(["ranks 0 and 1", "rank 2"])
        panel.get_by_role("searchbox").fill("LEARNING")
        expect(panel.get_by_role("status")).to_have_text("2 lines")
        panel.get_by_role("combobox").select_option("2")
        expect(panel.locator("mark")).to_have_text(["learning"])
        page.screenshot(path=tmp_path / "console.png")

        notebook.start(3)
        expect(board.finding).to_be_visible(timeout=SHOWN_WITHIN_MS)
        tab("Code").click()
        link = panel.get_by_role("button", name="cell 4, line 5")
        expect(link).to_be_visible(timeout=SHOWN_WITHIN_MS)
        expect(panel.locator("figcaption b")).to_have_text(["ranks 0 and 2", "rank 1"])
        expect(panel).to_contain_text("waiting in all_reduce")
        page.screenshot(path=tmp_path / "stack.png")
        link.click()
        mark = notebook.cells.nth(3).locator(".ddpb-line-mark")
        expect(mark).to_be_visible()
        line = notebook.cells.nth(3).locator(".cm-line").nth(4)
        assert abs((mark.bounding_box() or {})["y"] - (line.bounding_box() or {})["y"]) < 3
        page.screenshot(path=tmp_path / "marked.png")
        tab("Variables").click()
        expect(panel.locator("caption").first).to_have_text("Variables of step (cell 4)")
        expect(panel.locator("tr", has_text="batch")).to_contain_text("float32 [3] cpu1, 1, 1")
        height = (panel.bounding_box() or {})["height"]

        board.press("why")
        expect(tab("Problem")).to_have_attribute("aria-selected", "true", timeout=SHOWN_WITHIN_MS)
        expect(panel.locator(".ddpb-evidence")).to_have_attribute("open", "")
        page.screenshot(path=tmp_path / "why.png")
        expect(notebook.prompt(3)).to_have_text("[4]:", timeout=SHOWN_WITHIN_MS)
        board.press("abort")
        board.await_roles("ready", "ready", "ready")
        expect(tab("Variables")).to_have_attribute("aria-selected", "true")  # as nothing is wrong
        notebook.run(4)
        expect(board.el.locator(".ddpb-title")).to_have_text("ready · 3 ranks · gloo · cell 5")
        tab("Problem").click()
        expect(panel).to_contain_text("outdated: a newer run has started")
        panel.get_by_role("button", name="Close the answer of %ddp_why").click()
        expect(panel).not_to_contain_text("outdated")
        tab("History").click()
        expect(panel.locator("tbody tr")).to_have_count(3, timeout=SHOWN_WITHIN_MS)
        expect(panel.locator("tbody tr").nth(1)).to_contain_text("cell 4")
        expect(panel.locator("tbody tr").nth(1)).to_contain_text("interrupted")
        assert (panel.bounding_box() or {})["height"] == height
        page.screenshot(path=tmp_path / "history.png")

        notebook.run(5)
        expect(tab("Code")).to_have_attribute("aria-selected", "true")
        here = panel.locator(".ddpb-stops .ddpb-here")
        expect(here).to_have_text(re.compile(r"4breakpoint\(\)◂ ranks 0-2"))
        expect(panel.locator(".ddpb-file")).to_have_text(re.compile(r"^cell 61%%ddp2def double"))
        board.await_roles("paused", "paused", "paused")
        assert not Axe().run(page, context=".ddpb-tabs").response["violations"]
        notebook.start(6)  # a cell without %%ddp: a front end may have the kernel take clicks in it
        eventually(begun.exists, what="the cell's own first line")
        page.keyboard.press("F10")  # the focus is in the notebook
        waits = "The notebook is running a cell without %%ddp; %ddp_step follows when it is over."
        eventually(
            lambda: (
                waits in (board.el.text_content() or "")
                or "lr = double(rank)" in (here.text_content() or "")
            ),
            SHOWN_WITHIN_MS / 1000,
            "the step, or that it waits",
        )
        go_on.touch()
        expect(here).to_contain_text("lr = double(rank)")
        expect(board.el).not_to_contain_text(waits)
        tab("Code").focus()
        page.keyboard.press("Tab")  # to the panel, where JupyterLab leaves F11 free
        page.keyboard.press("F11")
        expect(here).to_contain_text("return 2 * x")
        gutter = panel.get_by_role("button", name="Breakpoint at line 6")
        gutter.click()
        expect(gutter).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("F8")
        expect(here).to_contain_text('print("done")')
        expect(panel.locator("tr", has_text="lr")).to_contain_text("≠")
        page.screenshot(path=tmp_path / "source.png")
        gutter.click()
        expect(gutter).to_have_attribute("aria-pressed", "false")
        board.press("continue")
        board.await_roles("ready", "ready", "ready")
        expect(notebook.cells.nth(5)).to_contain_text("done")
        assert page.evaluate("window.hurt") is None
