"""`%ddp_run` against torchrun: the same training script, the same numbers, and the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from observing import Ranks
from rows import Numbers, Row, compare
from starting import free_port

SCRIPT = Path(__file__).parent.parent / "digits.py"
EPOCHS = 100
"""Some 30 s on two cores."""


class Scripts:
    """Two ranks train a small CNN on scikit-learn's digits; who is first takes turns."""

    name = "scripts"

    def __init__(self) -> None:
        self._rounds = 0
        self._differed = 0

    def round(self) -> Numbers:
        """The script once by each of them."""
        self._rounds += 1
        ways = [("ours", by_ddp_run), ("torchruns", by_torchrun)]
        if self._rounds % 2:
            ways.reverse()
        found = {name: run(SCRIPT, "--epochs", str(EPOCHS)) for name, run in ways}
        (ours, ours_s), (theirs, theirs_s) = found["ours"], found["torchruns"]
        self._differed += computed(ours) != computed(theirs)
        return {
            "ours_s": max(rank["seconds"] for rank in ours),
            "theirs_s": max(rank["seconds"] for rank in theirs),
            "ours_cpu_s": sum(rank["cpu_seconds"] for rank in ours),
            "theirs_cpu_s": sum(rank["cpu_seconds"] for rank in theirs),
            "ours_whole_s": ours_s,
            "theirs_whole_s": theirs_s,
            "losses": float(sum(len(rank["losses"]) for rank in ours)),
        }

    def rows(self, medians: Numbers) -> list[Row]:
        """That it computes the same must hold in every round."""
        ours_s, theirs_s = medians["ours_s"], medians["theirs_s"]
        return [
            Row(
                f"%ddp_run, {EPOCHS} epochs of digits: losses and parameters",
                f"{self._differed} of {self._rounds} differ in a bit",
                f"torchrun, {medians['losses']:.0f} losses",
                wanted="none",
                met=not self._differed,
            ),
            compare("  from the first batch to the last", ours_s, theirs_s, 1.05, "torchrun"),
            compare(
                "  CPU time of both ranks meanwhile",
                medians["ours_cpu_s"],
                medians["theirs_cpu_s"],
                1.05,
                "torchrun",
            ),
            Row(
                "  from the call to its end",
                f"{medians['ours_whole_s']:.1f} s",
                f"torchrun {medians['theirs_whole_s']:.1f} s",
                medians["ours_whole_s"] / medians["theirs_whole_s"],
            ),
        ]


def computed(ranks: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be the same: every loss, the parameters and the buffers of each rank."""
    return [(rank["losses"], rank["parameters"], rank["buffers"]) for rank in ranks]


def by_ddp_run(script: Path, *arguments: str) -> tuple[list[dict[str, Any]], float]:
    """What each rank found, and the seconds of the call on ranks that are there."""
    with tempfile.TemporaryDirectory() as folder, Ranks(2) as session:
        began = time.monotonic()
        session.run_script(str(script), [*arguments, "--out", folder]).raise_for_error()
        return told(folder), time.monotonic() - began


def by_torchrun(script: Path, *arguments: str) -> tuple[list[dict[str, Any]], float]:
    """What each rank found, and the seconds of the command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), str(script), *arguments, "--out", folder),
        ]
        began = time.monotonic()
        subprocess.run(command, check=True, env=os.environ, stderr=subprocess.DEVNULL)
        return told(folder), time.monotonic() - began


def told(folder: str) -> list[dict[str, Any]]:
    """What the ranks wrote down."""
    return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
