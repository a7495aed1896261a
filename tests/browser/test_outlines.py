"""What a board has in it, as a screen reader finds it, against outlines that are saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from boards import Board
from labs import Lab, opened
from outlines import check, contrasts, outline
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.timeout(400)

CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_init --world-size 2 --step --device cpu --board here",
    "%%ddp\nif rank == 1:\n    dist.barrier()",
    "%ddp_save run.json --force",
    "%ddp_replay run.json",
]
LOAD, INIT, HANG, SAVE, REPLAY = range(len(CELLS))


def test_a_board_has_the_outline_that_is_saved(lab: Lab, browser: Browser, tmp_path: Path) -> None:
    with opened(lab, browser, CELLS, tmp_path / "last.png") as notebook:
        notebook.run(LOAD)
        board = Board(notebook.run(INIT))
        board.await_roles("paused", "paused")
        check("held-in-setup", lambda: outline(board.el))

        board.press("continue")
        board.await_roles("ready", "ready")
        expect(board.tab("Variables")).to_have_attribute("aria-selected", "true")
        check("ready", lambda: outline(board.el))

        notebook.start(HANG)
        expect(board.finding).to_be_visible()
        expect(notebook.prompt(HANG)).to_have_text(f"[{HANG + 1}]:")
        check("hang", lambda: outline(board.el))

        notebook.run(SAVE)
        replay = Board(notebook.run(REPLAY))
        expect(replay.finding).to_be_visible()
        expect(replay.el.locator(".ddpb-info")).to_contain_text(re.compile(r"\d (ms|s)$"))
        check("saved-run", lambda: outline(replay.el))

        check("light-theme", lambda: contrasts(board.el))
        assert barriers(notebook.page) == []
        choose_theme(notebook.page, "JupyterLab Dark")
        check("dark-theme", lambda: contrasts(board.el))
        assert barriers(notebook.page) == []


def barriers(page: Page) -> list[str]:
    """What axe-core finds in the boards: its rule, and the element's own text."""
    page.locator(".ddpb-notes").evaluate_all("all => all.forEach((each) => (each.open = true))")
    found = Axe().run(page, context=".ddpb").response["violations"]
    return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]


def choose_theme(page: Page, name: str) -> None:
    """As a person does, in the menu."""
    page.locator(".lm-MenuBar-itemLabel", has_text="Settings").click()
    for entry in ("Theme", name):
        label = page.locator(".lm-Menu-itemLabel").filter(has_text=re.compile(f"^{entry}$"))
        label.click()
    expect(page.locator("body")).to_have_attribute("data-jp-theme-name", name)
