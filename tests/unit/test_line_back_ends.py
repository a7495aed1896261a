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
def test_on_a_python_with_monitoring(python: str, tmp_path: Path) -> None:
    file = Path(line_scenarios.__file__)
    # Such a Python has nothing of what the package needs; the debugger's values need msgspec.
    pip = [python, "-m", "pip", "install", "-q", "--target", str(tmp_path), "msgspec"]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip(f"{python} cannot install msgspec: {installed.stderr.strip()[-200:]}")
    environment = {**os.environ, "PYTHONPATH": f"{file.parents[1]}{os.pathsep}{tmp_path}"}
    played = subprocess.run(
        [python, str(file)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert played.returncode == 0, f"{played.stdout}\n{played.stderr}"
    assert played.stdout.count("passes ") == len(line_scenarios.SCENARIOS)


def test_this_python_has_a_back_end() -> None:
    assert sys.version_info >= (3, 11)
