"""What the tests in a browser share: Chromium, and one JupyterLab."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import support
from labs import Lab, running_browser, running_lab
from playwright.sync_api import Browser
from support import lacking


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium. Without one these tests are skipped, in CI they fail."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        why = "no Chromium here: apt-get install chromium"
        lacking(why)
    return found


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    """A Chromium for all tests; a page has no memory of another's."""
    with running_browser(chromium) as made:
        yield made


@pytest.fixture(scope="session")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab, which outlives a test; its kernels do not."""
    with running_lab(tmp_path_factory.mktemp("lab")) as made:
        support.warm.add(made.pid)
        try:
            yield made
        finally:
            support.warm.remove(made.pid)
