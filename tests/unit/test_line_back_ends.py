"""Stopping at lines: the same scenarios on each back end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import line_scenarios
import pytest
from line_scenarios import Rank

_PYENVS = (Path.home() / ".pyenv" / "versions").glob("3.1[2-9].*/bin/python")
_FOUND = (shutil.which(f"python{version}") for version in ("3.12", "3.13", "3.14"))
OTHERS = [str(path) for path in sorted(_PYENVS)] or [path for path in _FOUND if path]
"""Pythons with sys.monitoring, beside this one."""


@pytest.mark.parametrize("scenario", line_scenarios.SCENARIOS, ids=lambda each: each.__name__)
def test_on_this_python(scenario: Callable[[Rank], None]) -> None:
    line_scenarios.play(scenario)


@pytest.mark.skipif(not OTHERS, reason="there is no Python 3.12 or later beside this one")
@pytest.mark.parametrize("python", OTHERS)
def test_on_a_python_with_monitoring(python: str) -> None:
    file = Path(line_scenarios.__file__)
    environment = {**os.environ, "PYTHONPATH": str(file.parents[1])}
    played = subprocess.run(
        [python, str(file)], capture_output=True, text=True, timeout=120, env=environment
    )
    if "No module named" in played.stderr and "ddp_notebook" not in played.stderr:
        pytest.skip(played.stderr.splitlines()[-1])
    assert played.returncode == 0, f"{played.stdout}\n{played.stderr}"
    assert played.stdout.count("passes ") == len(line_scenarios.SCENARIOS)


def test_this_python_has_a_back_end() -> None:
    assert sys.version_info >= (3, 11)
