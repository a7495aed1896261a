"""The benchmarks can be started: nothing else in the tests would notice when they cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


def test_the_benchmarks_say_what_they_can_measure() -> None:
    said = subprocess.run([sys.executable, RUN, "--help"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "--only" in said.stdout
