"""A test that loses a race is run again and named; many of them fail the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
