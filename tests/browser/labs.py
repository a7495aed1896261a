"""A real JupyterLab and notebooks in a real browser, for the tests here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import support
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from support import eventually

START_WITHIN_S = 60.0
_TAKEN_WITHIN_MS = 10_000
SHOWN_WITHIN_MS = 60_000
"""On a machine with much else to do."""
expect.set_options(timeout=SHOWN_WITHIN_MS)
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
SLOW = """() => {
  const timeout = AbortSignal.timeout;
  AbortSignal.timeout = (ms) => timeout.call(AbortSignal, ms === 2000 ? 0 : ms);
}"""
"""Has anywidget give up on a model at once that it gives two seconds, as a busy machine has it."""
SETTINGS = {
    "notification": {"fetchNews": "false", "checkForUpdates": False},
    "themes": {"theme": "JupyterLab Light"},
}


@dataclass
class Lab:
    """A running Jupyter server: where it is, its key, and the folder it serves."""

    url: str
    token: str
    root: Path
    pid: int
    workspaces: Path
    """Where it keeps which tabs and panels are open."""
    environment: dict[str, str]


@contextlib.contextmanager
def running_lab(home: Path) -> Iterator[Lab]:
    """JupyterLab, with nothing of this user's own settings, on a port the system chose."""
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
        url = f"http://127.0.0.1:{facts['port']}/"
        yield Lab(url, token, root, server.pid, home / "workspaces", environment)
    finally:
        _end(server)


@contextlib.contextmanager
def running_browser(executable: str) -> Iterator[Browser]:
    """A Chromium. Its processes come and go, and Playwright's threads: none counts as left over."""
    before = {process.pid for process in support.our_processes()}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGUMENTS)
        started = {process.pid for process in support.our_processes()} - before
        with support.spared_processes(started, threads=("asyncio_",)):
            yield browser
        browser.close()


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

    def await_kernel(self) -> None:
        """Wait until the page has its kernel."""
        if re.search(r"/lab\b", self.page.url):
            # The status bar's word; the notebook's own indicator shows idle before it is so.
            expect(self.page.get_by_text("| Idle")).to_be_visible()
        else:
            indicator = self.page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
            expect(indicator).to_be_visible()

    def start(self, index: int) -> Locator:
        """Run a cell and do not wait for it; what it shows.

        A click before the page has its kernel is lost, and Notebook 7 shows it idle before that:
        the cell then stays as one that was never run, and is clicked again, as a person does.
        """
        for _ in range(6):
            self.prompt(index).click()
            self.page.locator("[data-command='notebook:run-cell-and-select-next']").first.click()
            with contextlib.suppress(AssertionError):
                expect(self.prompt(index)).not_to_have_text("[ ]:", timeout=_TAKEN_WITHIN_MS)
                break
        return self.cells.nth(index)

    def run(self, index: int) -> Locator:
        """Run a cell to its end; what it shows."""
        cell = self.start(index)
        expect(self.prompt(index)).to_have_text(f"[{index + 1}]:")
        return cell

    def prompt(self, index: int) -> Locator:
        """What stands left of a cell: its number, or a star while it runs."""
        return self.cells.nth(index).locator(".jp-InputPrompt")


@contextlib.contextmanager
def opened(
    lab: Lab, browser: Browser, cells: list[str], picture: Path, place: str = "lab/tree"
) -> Iterator[Notebook]:
    """A new notebook with `cells` in a browser; a picture of it is kept at the end.

    `place` is the page that shows it: JupyterLab's, or Notebook 7's ``notebooks``.
    """
    source = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(source, lab.root / "ranks.ipynb")
    shutil.rmtree(lab.workspaces, ignore_errors=True)  # what was open before is not opened again
    context = browser.new_context(viewport={"width": 1280, "height": 1400})
    page = context.new_page()
    page.set_default_timeout(SHOWN_WITHIN_MS)
    try:
        notebook = Notebook(page)
        page.goto(f"{lab.url}{place}/ranks.ipynb?token={lab.token}")
        notebook.await_kernel()
        yield notebook
    finally:
        page.screenshot(path=picture)
        end_kernels(page, lab)
        page.context.close()


def end_kernels(page: Page, lab: Lab) -> None:
    """End all kernels of the server, and what they have started."""
    for kernel in _api(page, lab, "GET").json():
        _api(page, lab, "DELETE", f"/{kernel['id']}")


def _api(page: Page, lab: Lab, method: str, path: str = "") -> Any:
    """The server's answer to a request about its kernels."""
    return page.request.fetch(f"{lab.url}api/kernels{path}?token={lab.token}", method=method)
