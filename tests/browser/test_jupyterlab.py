"""What a person sees in a real JupyterLab: the board, output as it is written, a death; set-up
step by step, and what is found when it does not get on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from playwright.sync_api import Locator, Page, expect, sync_playwright
from support import eventually

pytestmark = pytest.mark.timeout(240)

START_WITHIN_S = 60.0
SHOWN_WITHIN_MS = 60_000
DEATH_SHOWN_WITHIN_MS = 2_000
CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    "notification": {"fetchNews": "false", "checkForUpdates": False},
    "themes": {"theme": "JupyterLab Light"},
}

LOAD, INIT, LOOP = range(3)
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
]


@dataclass
class Lab:
    """A running Jupyter server: where it is, its key, and the folder it serves."""

    url: str
    token: str
    root: Path


@pytest.fixture(scope="module")
def chromium() -> str:
    """The path of a Chromium. Without one these tests are skipped, in CI they fail."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        why = "no Chromium here: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    return found


@pytest.fixture(scope="module")
def lab(
    chromium: str,
    nothing_left_behind_by_the_module: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    """JupyterLab, with nothing of this user's own settings, on a port the system chose."""
    home = tmp_path_factory.mktemp("lab")
    runtime, root = home / "runtime", home / "root"
    root.mkdir()
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    for name, values in SETTINGS.items():
        (settings / f"{name}.jupyterlab-settings").write_text(json.dumps(values))
    environment = {
        **os.environ,
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--allow-root"]
    options = {
        "ServerApp.open_browser": False,
        "ServerApp.port": 0,
        "ServerApp.root_dir": root,
        "IdentityProvider.token": token,
    }
    command += [f"--{name}={value}" for name, value in options.items()]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        info = runtime / f"jpserver-{server.pid}.json"

        def started() -> dict[str, Any]:
            assert server.poll() is None, (home / "log").read_text()
            with contextlib.suppress(OSError, ValueError):
                facts: dict[str, Any] = json.loads(info.read_text())
                return facts
            return {}

        facts = eventually(started, START_WITHIN_S, "JupyterLab has started")
        yield Lab(f"http://127.0.0.1:{facts['port']}/", token, root)
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server, which ends its kernels; what it leaves is killed by its id."""
    children = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    for child in psutil.wait_procs(children, timeout=10)[1]:
        child.kill()


class Notebook:
    """An open notebook: its cells, run by the toolbar's button as a person does."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.cells = page.locator(".jp-Notebook .jp-CodeCell")

    def start(self, index: int) -> Locator:
        """Run a cell and do not wait for it; what it shows."""
        self.prompt(index).click()
        self.page.locator("[data-command='notebook:run-cell-and-select-next']").first.click()
        return self.cells.nth(index)

    def run(self, index: int) -> Locator:
        """Run a cell to its end; what it shows."""
        cell = self.start(index)
        expect(self.prompt(index)).to_have_text(f"[{index + 1}]:", timeout=SHOWN_WITHIN_MS)
        return cell

    def prompt(self, index: int) -> Locator:
        """What stands left of a cell: its number, or a star while it runs."""
        return self.cells.nth(index).locator(".jp-InputPrompt")


@contextlib.contextmanager
def opened(lab: Lab, chromium: str, cells: list[str], picture: Path) -> Iterator[Notebook]:
    """A new notebook with `cells` in a browser; a picture of it is kept at the end."""
    source = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(source, lab.root / "ranks.ipynb")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        try:
            page.goto(f"{lab.url}lab/tree/ranks.ipynb?token={lab.token}")
            # The status bar's word; the notebook's own indicator shows idle before it is so.
            expect(page.get_by_text("| Idle")).to_be_visible(timeout=SHOWN_WITHIN_MS)
            yield Notebook(page)
        finally:
            page.screenshot(path=picture)
            for kernel in _api(page, lab, "GET").json():
                _api(page, lab, "DELETE", f"/{kernel['id']}")
            browser.close()


@pytest.fixture
def notebook(lab: Lab, chromium: str, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook with four ranks up, open in a browser."""
    (lab.root / "go-on").unlink(missing_ok=True)
    with opened(lab, chromium, CELLS, tmp_path / "last.png") as made:
        made.run(LOAD)
        made.run(INIT)
        yield made


def _api(page: Page, lab: Lab, method: str, path: str = "") -> Any:
    """The server's answer to a request about its kernels."""
    return page.request.fetch(f"{lab.url}api/kernels{path}?token={lab.token}", method=method)


def test_the_board_shows_four_ranks_ready(notebook: Notebook, tmp_path: Path) -> None:
    rows = notebook.cells.nth(INIT).locator(".ddp-board tbody tr")
    expect(rows).to_have_count(4)
    for rank in range(4):
        expect(rows.nth(rank)).to_contain_text("6/6 verified")
        expect(rows.nth(rank)).to_contain_text("ready")
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
    expect(notebook.prompt(LOOP)).to_have_text(f"[{LOOP + 1}]:")


def test_the_board_shows_a_killed_rank_by_itself_within_2_seconds(
    notebook: Notebook, tmp_path: Path
) -> None:
    board = notebook.cells.nth(INIT)
    row = board.locator(".ddp-board tbody tr").nth(2)
    pid = int(row.locator(".ddp-pid").inner_text())
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

        expect(why).to_contain_text("held by you")
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
