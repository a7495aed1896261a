"""A training script computes under `%ddp_run` what it computes under torchrun, to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_notebook.launch.addresses import free_port
from ddp_notebook.session import Session

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SCRIPT = Path(__file__).parent.parent / "digits.py"


def told(folder: Path) -> list[Any]:
    """The losses, and digests of the parameters and of the buffers, of each rank."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return [(each["losses"], each["parameters"], each["buffers"]) for each in found]


def how_much(data: Path, epochs: int) -> list[str]:
    """Eight batches in each epoch, as arguments of the script."""
    return ["--epochs", str(epochs), "--samples", "1000", "--data", str(data)]


def images(folder: Path) -> Path:
    """A file of images and labels for the script, drawn from a seed."""
    drawn = np.random.default_rng(5)
    file = folder / "data.npz"
    np.savez(file, images=drawn.uniform(0, 16, (1000, 64)), labels=drawn.integers(0, 10, 1000))
    return file


def by_torchrun(data: Path, folder: Path, epochs: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port("127.0.0.1")), str(SCRIPT)]
    command += [*how_much(data, epochs), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    # Not the exit code: now and then a process of torch 2.13 aborts when all is done, since a
    # thread of gloo's wants the GIL of an interpreter that is about to end.
    assert len(list(folder.iterdir())) == 2, done.stderr


def test_a_script_trains_bitwise_as_under_torchrun(ranks2: Session, tmp_path: Path) -> None:
    ours, theirs, longer = (tmp_path / name for name in ("ours", "theirs", "longer"))
    for folder in (ours, theirs, longer):
        folder.mkdir()
    data = images(tmp_path)
    by_torchrun(data, theirs, epochs=1)
    for folder, epochs in ((ours, 1), (longer, 2)):
        # Twice: the first run leaves nothing that the second feels.
        run = ranks2.run_script(str(SCRIPT), [*how_much(data, epochs), "--out", str(folder)])
        run.raise_for_error()
        assert run.diagnosis is None, run.diagnosis
    assert told(ours) == told(theirs)
    (losses, parameters, _), (others, replicas, _) = told(ours)
    assert losses != others and parameters == replicas, "other batches, the same parameters"
    more, later, _ = told(longer)[0]
    assert more[: len(losses)] == losses and later != parameters
