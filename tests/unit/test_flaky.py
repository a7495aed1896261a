"""How the tests run: those of a file on one worker; one that loses a race again, and named."""

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


def test_the_tests_of_a_file_go_to_one_worker(request: pytest.FixtureRequest) -> None:
    """Or each worker starts the ranks of a file, its kernel or its JupyterLab once more."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("these tests have no workers: pytest -n 3 --dist loadgroup")
    for item in request.session.items:
        together = "browser" if "browser" in item.path.parts else item.path.stem
        assert item.nodeid.endswith(f"@{together}")
