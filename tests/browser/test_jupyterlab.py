"""What a person sees in a real JupyterLab: the board, output as it is written, a death; set-up
step by step, and what is found when it does not get on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from labs import SHOWN_WITHIN_MS, Lab, Notebook, opened
from playwright.sync_api import expect
from support import all_spared

pytestmark = pytest.mark.timeout(240)

DEATH_SHOWN_WITHIN_MS = 2_000
LOAD, INIT, LOOP, RESTART = range(4)
CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_init --world-size 4",
    """%%ddp
import pathlib, time
for step in range(100_000):
    print("step", step)
    if pathlib.Path("go-on").exists():
        break
    time.sleep(0.05)
print("that was all")""",
    "%ddp_restart",
]


@pytest.fixture(scope="module")
def open_notebook(
    nothing_left_behind_by_the_module: None,
    lab: Lab,
    chromium: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Notebook]:
    """A notebook with four ranks, open in a browser."""
    pictures = tmp_path_factory.mktemp("pictures")
    with opened(lab, chromium, CELLS, pictures / "last.png") as made:
        made.run(LOAD)
        made.run(INIT)
        with all_spared():
            yield made


@pytest.fixture
def notebook(open_notebook: Notebook, lab: Lab) -> Notebook:
    """The notebook, its four ranks ready, whatever the test before did to them."""
    (lab.root / "go-on").unlink(missing_ok=True)
    ready = open_notebook.cells.nth(INIT).locator(".ddpb-row").filter(has_text="✓ready")
    if ready.count() < 4:
        open_notebook.start(RESTART)
    expect(ready).to_have_count(4, timeout=SHOWN_WITHIN_MS)
    return open_notebook


def test_the_board_shows_four_ranks_ready(notebook: Notebook, tmp_path: Path) -> None:
    rows = notebook.cells.nth(INIT).locator(".ddpb-row")
    expect(rows).to_have_count(4)
    for rank in range(4):
        expect(rows.nth(rank)).to_contain_text("✓ready")
        stages = rows.nth(rank).locator(".ddpb-strip")
        expect(stages).to_have_attribute("aria-label", "stage 6 of 6: verified")
    notebook.page.screenshot(path=tmp_path / "ready.png")


def test_output_appears_while_the_cell_still_runs(
    notebook: Notebook, lab: Lab, tmp_path: Path
) -> None:
    cell = notebook.start(LOOP)
    expect(cell).to_contain_text("ranks 0-3", timeout=SHOWN_WITHIN_MS)
    expect(cell).to_contain_text("step 5", timeout=SHOWN_WITHIN_MS)
    expect(notebook.prompt(LOOP)).to_have_text("[*]:")
    notebook.page.screenshot(path=tmp_path / "running.png")
    (lab.root / "go-on").touch()
    expect(cell).to_contain_text("that was all", timeout=SHOWN_WITHIN_MS)
    expect(notebook.prompt(LOOP)).to_have_text(re.compile(r"^\[\d+\]:$"))


def test_the_board_shows_a_killed_rank_by_itself_within_2_seconds(
    notebook: Notebook, tmp_path: Path
) -> None:
    board = notebook.cells.nth(INIT)
    row = board.locator(".ddpb-row").nth(2)
    pid = int(re.findall(r"pid (\d+)", row.get_attribute("title") or "")[0])
    assert "python" in psutil.Process(pid).name()
    os.kill(pid, signal.SIGKILL)
    expect(row).to_contain_text("killed by SIGKILL", timeout=DEATH_SHOWN_WITHIN_MS)
    expect(row).to_contain_text("dead")
    expect(board).to_contain_text("%ddp_restart --ranks 2")
    notebook.page.screenshot(path=tmp_path / "dead.png")


def test_set_up_step_by_step_why_and_a_fault(lab: Lab, chromium: str, tmp_path: Path) -> None:
    cells = [
        "%load_ext ddp_notebook",
        "%ddp_init --step",
        "%ddp_step --ranks 0,2 --to process-group",
        "%ddp_why",
        "%ddp_step --to process-group",
        "%ddp_step",
        "%ddp_fault duplicate-rank",
        "%ddp_fault --repair",
    ]
    with opened(lab, chromium, cells, tmp_path / "last.png") as notebook:
        views = [notebook.run(index).locator(".ddp-findings") for index in range(len(cells))]
        begun, step, why, _, done, fault, _ = views[1:]
        expect(begun.locator("tbody tr")).to_have_count(4)
        expect(begun.locator("code")).to_have_text("%ddp_step")

        rows = step.locator("tbody tr")
        for rank, (state, waits_for) in enumerate([("waiting", "ranks 1,3"), ("paused", "")] * 2):
            expect(rows.nth(rank).locator("th")).to_have_text(str(rank))
            expect(rows.nth(rank).locator("td").nth(1)).to_contain_text(state)
            expect(rows.nth(rank).locator("td").nth(3)).to_have_text(waits_for)
        expect(step.locator("code")).to_have_text("%ddp_step --ranks 1,3")
        expect(step.locator("a")).to_have_attribute("href", re.compile("^https://.*pytorch.org/"))

        expect(why).to_contain_text("paused (by %ddp_step)")
        expect(why.locator("details tbody")).to_contain_text("ranks 0,2")
        expect(done).to_contain_text("Set-up is complete: every rank is verified.")

        expect(fault).to_contain_text("duplicate-rank")
        expect(fault).to_contain_text("Rank 2: ")
        evidence = fault.locator("details").filter(has_text="evidence")
        expect(evidence.locator("li").first).to_be_hidden()
        evidence.locator("summary").click()
        expect(evidence.locator("li")).to_have_count(2)
        expect(evidence.locator("li").first).to_contain_text("RANK=1")
        notebook.page.screenshot(path=tmp_path / "fault.png")
        board = notebook.cells.nth(len(cells) - 1).locator(".ddp-board tbody tr")
        expect(board).to_have_count(4)
        expect(board.nth(2)).to_contain_text("6/6 verified")
