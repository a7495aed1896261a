"""Rounds of something random in a real kernel, one after the other, as many as are asked for."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self

import support
from kernels import Kernel
from support import SEED

from ddp_notebook import errors

SESSION = "get_ipython()._ddp_notebook_magics.session"
OURS = {"", "UsageError", *(name for name, kind in vars(errors).items() if isinstance(kind, type))}
"""The errors that are for a user to read."""


class Rounds:
    """Rounds in one kernel after the other; `choose` makes the choices of the next one."""

    def __init__(self, script: Path) -> None:
        self.choose = random.Random(SEED)
        self.script = script
        self.kernel = Kernel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kernel.close()

    def seed(self, number: int) -> str:
        """Have the next round be this one; what to set and say to see it again."""
        self.choose = random.Random(f"{SEED}/{number}")
        return f"DDP_NOTEBOOK_SEED={SEED}, round {number}"

    def play(self) -> str:
        """One round; what was done in it. Fails where anything stays, or what follows fails."""
        raise NotImplementedError

    def summary(self) -> None:
        """Print what is to be known of all rounds."""


def main(make: Callable[[Path], Rounds], rounds: int) -> int:
    """Play `rounds`, or as many as the command line says, those that fail too; the exit status."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else rounds
    os.environ[support.RUN_TAG] = uuid.uuid4().hex
    failed = 0
    with tempfile.TemporaryDirectory(prefix="dr-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        with make(Path(folder, "train.py")) as tests:
            for number in range(rounds):
                named = tests.seed(number)
                try:
                    if not tests.kernel.manager.has_kernel:
                        tests.kernel.start()
                    print(f"{named}: {tests.play()}", flush=True)
                except Exception as error:  # noqa: BLE001  # any failure is this round's alone
                    failed += 1
                    print(f"{named} FAILED {type(error).__name__}: {error}", flush=True)
                    tests.kernel.close(now=True)
                    support.clear_away(support.leftovers())
    tests.summary()
    print(f"{rounds - failed} of {rounds} rounds, seed {SEED}")
    return min(failed, 1)
