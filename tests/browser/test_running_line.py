"""What a `%%ddp` cell shows in JupyterLab: a line with buttons as it runs, long output folded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from labs import SHOWN_WITHIN_MS, SLOW, Lab, opened
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.timeout(240)

CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_init -n 2 --board off",
    "%%ddp\nimport time\nfor n in range(600):\n    print(rank, n)\n    time.sleep(0.1)",
    "%%ddp\nfor n in range(400):\n    print('rank', rank, 'line', n)",
    "%%ddp\ntorch.arang",
]


def test_a_running_cell_is_looked_into_and_aborted_by_its_own_buttons_and_long_output_is_folded(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    with opened(lab, browser, CELLS, tmp_path / "cells.png") as notebook:
        notebook.page.evaluate(SLOW)
        notebook.run(0)
        notebook.run(1)
        cell = notebook.start(2)
        line = cell.locator(".ddpl")
        expect(line).to_contain_text("Cell 3 is running on ranks 0 and 1", timeout=SHOWN_WITHIN_MS)
        expect(line.locator(".ddpl-clock")).to_have_text(re.compile(r"^\d+ s$"))
        line.get_by_role("button", name="Where?").click()
        expect(line.locator("pre")).to_contain_text("time.sleep", timeout=SHOWN_WITHIN_MS)
        notebook.page.screenshot(path=tmp_path / "running.png")
        line.get_by_role("button", name="Close").click()
        expect(line.locator("pre")).to_have_count(0)
        line.get_by_role("button", name="Abort").click()
        expect(cell).to_contain_text("did not finish; it ran for", timeout=SHOWN_WITHIN_MS)
        expect(line).to_have_count(0)
        # Long output
        folded = notebook.run(3)
        for rank in (0, 1):
            expect(folded).to_contain_text(f"rank {rank} line 0")
            expect(folded.get_by_text(f"rank {rank} line 399")).to_be_visible()
        box = folded.locator(".jp-Cell-outputArea").bounding_box()
        assert box is not None and box["height"] < 1000
        folded.locator("summary").first.click()
        expect(folded.get_by_text("rank 0 line 200")).to_be_visible()
        # Tab
        notebook.cells.nth(4).locator(".cm-content").click()
        notebook.page.keyboard.press("Control+End")
        notebook.page.keyboard.press("Tab")
        expect(notebook.page.locator(".jp-Completer")).to_contain_text("arange")
        notebook.page.keyboard.press("Enter")
        expect(notebook.cells.nth(4).locator(".cm-content")).to_contain_text("torch.arange")
        notebook.page.screenshot(path=tmp_path / "end.png")
        # A kernel that is restarted in mid-cell: nothing runs any more, and no clock says so.
        notebook.start(2)
        expect(line.locator(".ddpl-clock")).to_have_text(re.compile(r"^\d+ s$"))
        notebook.page.locator("[data-command='notebook:restart-kernel']").first.click()
        notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
        expect(line).to_contain_text("the kernel ended, and the ranks with it")
        expect(line.locator(".ddpl-clock")).to_be_hidden()
        notebook.await_kernel()
