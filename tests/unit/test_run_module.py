"""`python -m ddp_notebook.run`: a script ends as under plain Python, with the same words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_notebook.__main__ import _parser

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys
os.chdir("/")
print(__file__, sys.argv[1:], sys.path[0])
if sys.argv[1:]:
    sys.exit(7)
raise ValueError("bad")
"""


@pytest.mark.parametrize("arguments", [(), ("-m", "--", "-x")])
def test_a_script_ends_as_under_python(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment |= {"DDP_NOTEBOOK": "0"}

    plain, ours = (
        subprocess.run(
            [sys.executable, *by, "train.py", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        for by in ((), ("-m", "ddp_notebook", "run"))
    )

    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)
    assert ours.returncode == plain.returncode


def test_every_word_is_the_scripts() -> None:
    args = _parser().parse_args(["run", "-m", "package.train", "--help", "--", "x"])

    assert args.words == ["-m", "package.train", "--help", "--", "x"]
