"""How the tests run: those of a file on one worker; one that loses a race again, and named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from workers import together

TESTS = Path(__file__).parents[1]
ONCE = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range({flaky}))
def test_fails_once(number):
    before = pathlib.Path(__file__).with_name(f"ran-{{number}}")
    if not before.exists():
        before.touch()
        raise AssertionError("a race that was lost")

def test_fails_always():
    assert {always}
"""


@pytest.mark.parametrize(
    ("flaky", "always", "code"), [(0, True, 0), (3, True, 0), (4, True, 1), (1, False, 1)]
)
def test_up_to_three_flaky_tests_pass_and_are_named(
    flaky: int, always: bool, code: int, tmp_path: Path
) -> None:
    (tmp_path / "test_once.py").write_text(ONCE.format(flaky=flaky, always=always))
    plugin = "import sys; import conftest, pytest; sys.exit(pytest.main(sys.argv[1:], [conftest]))"
    options = ["-q", "--reruns", "1", "-p", "no:cacheprovider", "-p", "no:shiny-test"]
    done = subprocess.run(
        [sys.executable, "-c", plugin, *options, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("FLAKY") == flaky
    assert ("at most 3 are let pass" in done.stdout) == (flaky > 3)


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/contract/test_where.py::test_all[cell]", "tests/contract/test_where.py"),
        ("tests/browser/test_tabs.py::test_tabs[lab]", "browser"),
        ("tests/notebooks/test_demo.py::test_it", "tests/notebooks/test_demo.py::test_it"),
    ],
)
def test_tests_that_share_what_is_dear_go_to_one_worker(test: str, group: str) -> None:
    """That they did, each run with workers judges at its end."""
    assert together(test) == group
