"""The board beside the notebook, in a real JupyterLab: it stays while cells scroll by."""

from __future__ import annotations

from pathlib import Path

import pytest
from labs import Lab, opened
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.timeout(240)

LOAD, INIT, HANG, AGAIN = range(4)
CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_init --world-size 2 --board side",
    "%%ddp\nif rank == 0:\n    dist.barrier()",
    "%ddp_board",
]


def test_the_board_stands_beside_the_notebook_and_comes_back_after_a_reload(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    with opened(lab, browser, CELLS, tmp_path / "last.png") as notebook:
        page = notebook.page
        panels = page.locator(".jupyterlab-sidecar")
        rows = panels.locator(".ddpb-row")
        notebook.run(LOAD)
        notebook.run(INIT)
        expect(rows).to_have_count(2)
        expect(rows.nth(1)).to_contain_text("ready")
        notebook.run(HANG)
        expect(panels).to_contain_text("Rank 0 alone calls barrier")
        expect(panels.get_by_role("button", name="Abort")).to_be_enabled()
        page.screenshot(path=tmp_path / "beside.png")

        page.reload()
        notebook.await_kernel()
        expect(panels).to_contain_text("Rank 0 alone calls barrier")
        # Its own cell has ended long ago: what it shows now is what the ranks are at now.
        panels.get_by_role("button", name="Abort").click()
        expect(rows.nth(0)).to_contain_text("ready")

        before = panels.get_attribute("id")
        notebook.start(AGAIN)
        expect(page.locator(f"[id='{before}']")).to_have_count(0)
        expect(panels).to_have_count(1)
        expect(rows).to_have_count(2)
        page.screenshot(path=tmp_path / "again.png")
