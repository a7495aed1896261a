"""The reference's example of a program, run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "notebooks" / "REFERENCE.md"
SCRIPT = """\
import argparse, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
epochs = parser.parse_args().epochs
dist.init_process_group("gloo")
if dist.get_rank() == 2:
    raise RuntimeError(f"no data for {epochs} epochs")
dist.barrier()
"""


def test_the_example_of_a_program_runs_and_tells_what_the_script_raised(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", REFERENCE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    program = tmp_path / "program.py"
    program.write_text(example, "utf-8")
    ended = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    values, *told = ended.stdout.splitlines()
    assert values == "{0: 0, 1: 10, 2: 20, 3: 30}"
    assert "rank 2" in (text := "\n".join(told).lower()) and "no data for 2 epochs" in text, told
