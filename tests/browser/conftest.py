"""What the tests in a browser share: Chromium, and a JupyterLab for each module."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from labs import Lab, running_lab


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
    """A JupyterLab."""
    with running_lab(tmp_path_factory.mktemp("lab")) as made:
        yield made
