"""The contract tests of kills and interrupts, with many rounds: how many of them held."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from rows import Row

TESTS = Path(__file__).parent.parent / "contract"
KILLS, INTERRUPTS = TESTS / "test_left_behind.py", TESTS / "test_interrupts.py"


def kills(rounds: int = 20) -> list[Row]:
    """Everything that is killed, `rounds` times each."""
    return run(KILLS, rounds)


def interrupts(tries: int = 50) -> list[Row]:
    """A cell directly after an interrupted one, `tries` times each."""
    return run(INTERRUPTS, tries // 5)


def run(tests: Path, rounds: int) -> list[Row]:
    """Run tests; a row for each, with the rounds that held where it has several."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", str(tests), "-q", "--tb=short"),
                f"--junitxml={report}",
            ],
            env={
                "DDP_NOTEBOOK_SEED": str(random.SystemRandom().randrange(1 << 30)),
                **os.environ,
                "DDP_NOTEBOOK_ROUNDS": str(rounds),
            },
            stdout=sys.stderr,
            check=False,
        )
        return [_row(case) for case in ElementTree.parse(report).iter("testcase")]


def _row(case: ElementTree.Element) -> Row:
    name = case.attrib["name"].removeprefix("test_").replace("_", " ")
    held = case.find("failure") is None and case.find("error") is None
    rounds = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}.get("rounds")
    if rounds is None:
        return Row(name, "yes" if held else "no", wanted="yes", met=held)
    total = rounds.split()[-1]
    return Row(name, rounds, wanted=f"{total} of {total}", met=held)
