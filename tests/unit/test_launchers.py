"""Launchers are known by their command lines, and so is what they run."""

from __future__ import annotations

import pytest

from ddp_notebook.launch.launchers import launched_by


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nproc-per-node 2 train.py --epochs 2", ("torchrun", "train.py --epochs 2")),
        ("OMP_NUM_THREADS=1 /opt/bin/torchrun -m pkg.train", ("torchrun", "-m pkg.train")),
        ("accelerate launch --config c.yaml nlp.py", ("accelerate", "nlp.py")),
        ("python3.11 -u -m torch.distributed.run a.py", ("-m torch.distributed.run", "a.py")),
        ("mpirun -np 2 python train.py", ("mpirun", "train.py")),
        ("deepspeed", ("deepspeed", "")),
        ("python train.py", None),
        ("python -m pytest torchrun", None),
        ("pip install accelerate", None),
        ("which torchrun", None),
        ("A=1", None),
        ("", None),
    ],
)
def test_a_launcher_and_its_program(line: str, expected: tuple[str, str] | None) -> None:
    assert launched_by(line.split()) == expected
