"""The live board in a real browser: what it shows, its buttons, and that it comes back."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from boards import Board
from labs import Lab, opened
from playwright.sync_api import Browser, WebSocketRoute, expect
from support import eventually

pytestmark = pytest.mark.timeout(240)

HOSTILE = "<img src=x onerror=window.hurt=1><script>window.hurt=1</script>"
HANG = f"""%%ddp
if rank == 1:
    dist.barrier()              # {HOSTILE}
dist.all_reduce(torch.ones(3))  # {HOSTILE}"""
LAB_WITHIN_MS = 120_000
LOOP = """%%ddp
import pathlib, time
stop = torch.zeros(1)
while not stop:
    stop = torch.tensor([float(pathlib.Path("go-on").exists())])
    dist.all_reduce(stop)  # or a rank would leave the others behind
    time.sleep(0.02)"""


def test_from_the_first_stage_to_a_dead_rank_and_back_by_buttons(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    cells = [
        "%load_ext ddp_notebook",
        "%ddp_init --world-size 2 --step --board here",
        HANG,
        "%ddp_save run.json --force",
        "%ddp_replay run.json",
        "%%ddp --ranks 1\nimport os; os._exit(3)",
    ]
    with opened(lab, browser, cells, tmp_path / "last.png") as notebook:
        notebook.run(0)
        board = Board(notebook.run(1))
        board.await_roles("paused", "paused")
        board.rows.nth(1).get_by_role("button").click()
        step = board.el.get_by_role("button", name="Step %ddp_step --ranks 1", exact=True)
        expect(step).to_be_visible()
        board.press("step")
        expect(board.answer).to_contain_text("%ddp_step --ranks 1")
        board.el.locator(".ddpb-pick").click()
        board.press("continue")
        board.await_roles("ready", "ready")

        notebook.start(2)
        expect(board.finding).to_contain_text("Only rank 1 calls barrier")
        expect(board.finding.locator(".ddpb-remedy")).to_contain_text("Call barrier on every rank")
        expect(board.finding.locator(".ddpb-evidence li").first).to_be_hidden()
        board.finding.locator("summary").click()
        expect(board.finding.locator(".ddpb-evidence li").first).to_be_visible()
        expect(board.timeline).to_be_visible()
        expect(board.el.locator(".ddpb-on-at").first).to_contain_text(HOSTILE)  # as text
        board.timeline.focus()
        notebook.page.keyboard.press("Enter")
        expect(board.el.locator(".ddpb-tip")).to_contain_text("1 barrier, ")
        shown = board.el.locator(".ddpb-info").inner_text()
        notebook.page.keyboard.press("s")
        expect(board.el.locator(".ddpb-info")).not_to_have_text(shown)
        notebook.page.keyboard.press("Escape")
        expect(board.el.locator(".ddpb-tip")).to_be_hidden()
        box = board.timeline.bounding_box()
        assert box is not None
        notebook.page.mouse.move(box["x"] + 1, box["y"] + 5)
        notebook.page.mouse.down()
        notebook.page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 9, steps=3)
        notebook.page.mouse.up()
        expect(board.el.locator(".ddpb-tip")).to_contain_text("rank 0 · ")
        notebook.page.keyboard.press("End")
        notebook.page.keyboard.press("?")
        expect(board.el.locator(".ddpb-notes")).to_have_attribute("open", "")
        notebook.page.keyboard.press("Escape")
        expect(board.el.locator(".ddpb-life")).to_contain_text("CPU")
        expect(board.rows.first).to_have_attribute("title", re.compile("rank 0: "))
        board.finding.locator("summary").click()
        board.press("why")  # what is known is not said a second time
        expect(board.finding.locator(".ddpb-evidence li").first).to_be_visible()
        expect(board.answer).to_have_count(0)
        notebook.page.screenshot(path=tmp_path / "finding.png")

        # What is sent while a cell runs that fails is given back.
        expect(notebook.prompt(2)).to_have_text("[3]:")
        notebook.run(3)
        replay = Board(notebook.run(4))
        expect(replay.finding).to_contain_text("Only rank 1 calls barrier")
        expect(replay.el.locator(".ddpb-on-at").first).to_contain_text(HOSTILE)
        expect(replay.timeline).to_be_visible()
        expect(replay.el.locator(".ddpb-action")).to_have_count(0)
        replay.el.get_by_role("slider").fill("0")
        expect(replay.el.locator(".ddpb-past")).to_be_visible()
        notebook.page.screenshot(path=tmp_path / "replay.png")

        board.press("abort")
        board.await_roles("ready", "ready")
        expect(board.finding).to_have_count(0)
        notebook.start(5)
        board.await_roles("ready", "error")
        # It has no collectives: those of the run before do not look as if they were its own.
        expect(board.el.locator(".ddpb-info")).to_contain_text("previous run: cell 3")
        board.press("restart")
        board.await_roles("ready", "ready")
        assert notebook.page.evaluate("window.hurt") is None


def test_a_board_comes_back_in_mid_run_in_two_tabs_and_says_when_the_kernel_is_gone(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    (lab.root / "go-on").unlink(missing_ok=True)
    cells = ["%load_ext ddp_notebook", "%ddp_init --world-size 2 --board here", LOOP]
    with opened(lab, browser, cells, tmp_path / "last.png") as notebook:
        notebook.run(0)
        board = Board(notebook.run(1))
        board.await_roles("ready", "ready")
        running = notebook.start(2)
        expect(board.timeline).to_be_visible()
        expect(running.locator(".ddpl")).to_be_visible()  # and so it is in what is saved
        page = notebook.page
        page.keyboard.press("Control+s")
        saved = lab.root / "ranks.ipynb"
        eventually(lambda: "ddp-still-" in saved.read_text("utf-8"), what="the notebook is saved")
        static = picture_of(saved, tmp_path)
        assert "ddp-board" in static and "2 ranks, gloo" in static

        page.reload()
        board = Board(page)
        expect(board.timeline).to_be_visible()
        expect(page.locator(".ddp-board")).to_be_hidden()
        board.press("where")
        expect(board.panel).to_contain_text("%ddp_where")

        other = page.context.new_page()
        other.set_default_timeout(LAB_WITHIN_MS)
        other.goto(f"{lab.url}lab/tree/ranks.ipynb?token={lab.token}")
        # Beside the first tab and the ranks, JupyterLab itself may take a minute to open.
        expect(other.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(
            timeout=LAB_WITHIN_MS
        )
        second = Board(other)
        expect(second.timeline).to_be_visible(timeout=LAB_WITHIN_MS)
        second.press("why")
        for each in (second, board):
            expect(each.answer).to_contain_text("%ddp_why")
        (lab.root / "go-on").touch()
        for each in (second, board):
            each.await_roles("ready", "ready")
        page.screenshot(path=tmp_path / "back.png")
        other.close()

        page.locator("[data-command='notebook:restart-kernel']").first.click()
        page.locator(".jp-Dialog .jp-mod-accept").click()
        board.await_roles("ended", "ended")
        ended = "These ranks ended with their kernel. For new ones: %load_ext ddp_notebook, then"
        expect(board.el.locator(".ddpb-gone")).to_contain_text(ended)
        expect(board.el.get_by_text("Why? asks every rank")).to_have_count(0)
        expect(board.el.locator(".ddpb-actions")).to_be_hidden()
        page.screenshot(path=tmp_path / "gone.png")

        # Opened again, trusted, when the kernel has no such widget: the picture, and no error.
        page.keyboard.press("Control+s")
        page.reload()
        expect(page.locator(".ddp-board")).to_be_visible()
        expect(page.locator(".ddp-board")).to_contain_text("✓ ready")
        expect(page.get_by_text("As it was when this cell ended")).to_be_visible()
        lost = page.get_by_text("Error displaying widget")  # a board, and a line of cell 3
        expect(lost.first).to_be_attached()  # Jupyter has looked for the widgets
        for each in lost.all():
            expect(each).to_be_hidden()
        expect(page.get_by_text("Saved while it was running.")).to_be_visible()
        page.screenshot(path=tmp_path / "reopened.png")


DIES = """%%ddp --ranks 1
import os, pathlib
while not pathlib.Path("die").exists():
    pass
os._exit(3)"""


def test_what_a_connection_lost_for_seconds_did_not_bring_is_asked_for(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    (lab.root / "die").unlink(missing_ok=True)
    lost: list[str] | None = None

    def pass_on(route: WebSocketRoute) -> None:
        server = route.connect_to_server()
        server.on_message(lambda m: route.send(m) if lost is None else lost.append(repr(m)))

    cells = [
        "%load_ext ddp_notebook",
        "%ddp_init --world-size 2 --board here",
        DIES,
        "%ddp_board --here",
    ]
    with opened(lab, browser, cells, tmp_path / "last.png") as notebook:
        page = notebook.page
        page.route_web_socket(re.compile("/channels"), pass_on)
        page.reload()
        notebook.await_kernel()
        notebook.run(0)
        board = Board(notebook.run(1))
        board.await_roles("ready", "ready")
        notebook.start(2)
        board.await_roles("ready", "running")
        lost = []
        (lab.root / "die").touch()

        def all_is_lost() -> bool:
            page.evaluate("0")  # has Playwright hand over what has come
            told = [each.replace(" ", "") for each in lost or ()]
            dead = [n for n, each in enumerate(told) if '"role":"dead"' in each]
            return bool(dead) and sum('"kind":"beat"' in each for each in told[dead[-1] :]) > 1

        eventually(all_is_lost, what="the page is not told that the rank has died")
        lost = None
        board.await_roles("ready", "error")
        expect(board.el.locator(".ddpb-gone")).to_have_text("")

        earlier = notebook.cells.nth(1).locator(".ddpb")
        expect(earlier.locator(".ddpb-tabs")).to_be_visible()
        notebook.run(3)
        expect(earlier.locator(".ddpb-category").first).to_have_text("last known state")
        expect(earlier.locator(".ddpb-tabs")).to_be_hidden()  # there is nothing in them


def test_a_benchmark_is_cancelled_by_the_button_and_keeps_what_it_measured(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    cells = [
        "%load_ext ddp_notebook",
        "%ddp_init --world-size 2 --board here",
        "%ddp_bench --budget 300s",
        "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', x.item())",
    ]
    with opened(lab, browser, cells, tmp_path / "last.png") as notebook:
        notebook.run(0)
        board = Board(notebook.run(1))
        board.await_roles("ready", "ready")
        bench = notebook.start(2)
        runs = board.el.locator(".ddpb-benchmark")
        expect(runs).to_contain_text("%ddp_bench runs: all_reduce")
        expect(runs.get_by_role("progressbar", name="Benchmark")).to_be_visible()
        expect(bench).to_contain_text("µs")  # a point
        cancel = board.el.get_by_role("button", name="Cancel interrupt the cell: I, I")
        expect(cancel).to_be_visible()
        notebook.page.screenshot(path=tmp_path / "bench.png")
        board.press("cancel")
        expect(notebook.prompt(2)).to_have_text("[3]:")
        board.tab("Problem").click()
        expect(board.answer).to_contain_text("What is measured is kept")
        expect(notebook.prompt(2)).to_have_text("[3]:")
        expect(bench).to_contain_text("Ended early: it was interrupted")
        expect(runs).to_be_empty()
        board.await_roles("ready", "ready")
        expect(notebook.run(3)).to_contain_text("sum 2.0")


def picture_of(saved: Path, folder: Path) -> str:
    """A saved notebook as nbconvert shows it, without any script."""
    target = folder / "static.html"
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--log-level", "ERROR"]
    subprocess.run([*command, str(saved), "--output", str(target)], check=True)
    return target.read_text("utf-8")


BROKEN = """from ddp_notebook.board.widget import BoardWidget
begin = "drawRows(board){"
BoardWidget._esm = BoardWidget._esm.replace(begin, begin + " null.ouch;")"""


def test_in_notebook_7_with_a_script_that_fails_the_picture_is_shown(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    init = "%ddp_init --world-size 1"
    cells = ["%load_ext ddp_notebook", init, "%ddp_board", BROKEN, "%ddp_restart"]
    with opened(lab, browser, cells, tmp_path / "last.png", "notebooks") as notebook:
        notebook.run(0)
        cell = notebook.run(1)
        Board(cell).await_roles("ready")
        expect(cell.locator(".ddp-board")).to_be_hidden()
        Board(notebook.run(2)).await_roles("ready")  # there is no panel beside a notebook here
        notebook.run(3)
        cell = notebook.run(4)
        expect(cell.locator(".ddpb-broken")).to_contain_text("TypeError")
        expect(cell.locator(".ddp-board")).to_be_visible()
        expect(cell.locator(".ddp-board")).to_contain_text("✓ ready")
        notebook.page.screenshot(path=tmp_path / "broken.png")
