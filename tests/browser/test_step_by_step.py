"""In a real JupyterLab: setup step by step, and what is found when it does not get on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from labs import Lab, opened
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.timeout(240)


def test_set_up_step_by_step_why_and_a_fault(lab: Lab, browser: Browser, tmp_path: Path) -> None:
    cells = [
        "%load_ext ddp_notebook",
        "%ddp_init --step --board here",
        "%ddp_step --ranks 0,2 --to process-group",
        "%ddp_why",
        "%ddp_step --to process-group",
        "%ddp_step",
        "%ddp_fault duplicate-rank",
        "%ddp_fault --repair",
    ]
    with opened(lab, browser, cells, tmp_path / "last.png") as notebook:
        views = [notebook.run(index).locator(".ddp-findings") for index in range(len(cells))]
        begun, step, why, _, done, fault, _ = views[1:]
        # It was stepped on since: no table is left that could be taken for the present state.
        expect(begun).to_have_text("Setup is complete: every rank is verified.")

        rows = step.locator("tbody tr")
        for rank, (state, waits_for) in enumerate(
            [("waiting", "ranks 1 and 3"), ("paused", "")] * 2
        ):
            expect(rows.nth(rank).locator("th")).to_have_text(str(rank))
            expect(rows.nth(rank).locator("td").nth(1)).to_contain_text(state)
            expect(rows.nth(rank).locator("td").nth(3)).to_have_text(waits_for)
        expect(step.locator("code")).to_have_text("%ddp_step --ranks 1,3")
        expect(step.locator("a")).to_have_attribute("href", re.compile("^https://.*pytorch.org/"))

        expect(why).to_contain_text("paused (by %ddp_step)")
        expect(why.locator("details tbody")).to_contain_text("ranks 0 and 2")
        expect(done).to_contain_text("Setup is complete: every rank is verified.")

        expect(fault).to_contain_text("duplicate-rank")
        expect(fault).to_contain_text("launched as ranks 1 and 2")
        evidence = fault.locator("details").filter(has_text="evidence")
        expect(evidence.locator("li").first).to_be_hidden()
        evidence.locator("summary").click()
        expect(evidence.locator("li")).to_have_count(2)
        expect(evidence.locator("li").first).to_contain_text("RANK=1")
        notebook.page.screenshot(path=tmp_path / "fault.png")
        board = notebook.cells.nth(len(cells) - 1).locator(".ddp-board tbody tr")
        expect(board).to_have_count(4)
        expect(board.nth(2)).to_contain_text("6/6 verified")
