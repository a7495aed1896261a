"""The code of the book's page about starting jobs does what the page says."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

PAGE = Path(__file__).parents[2] / "notebooks" / "book" / "how" / "starting.md"


def blocks() -> list[str]:
    """The page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def start(script: Path, *, rank: int, port: int) -> subprocess.Popen[str]:
    """Start one of two ranks as a launcher does; its output is read from its stdout."""
    environment = {
        "PATH": "",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_the_retry_gets_a_port_that_is_given_back(tmp_path: Path) -> None:
    [retry, _] = blocks()
    script = tmp_path / "train.py"
    script.write_text(f"{retry}\n\ninit_with_retries()\nprint('joined', flush=True)\n")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        first = start(script, rank=0, port=port)
        assert first.stdout is not None
        # Only now is the port given back: the rank has been refused once.
        assert first.stdout.readline() == "The port is taken; trying again in 1 s\n"
    second = start(script, rank=1, port=port)
    assert "joined" in first.communicate(timeout=100)[0]
    assert "joined" in second.communicate(timeout=100)[0]


def test_a_recorded_error_is_the_one_that_torchrun_shows(tmp_path: Path) -> None:
    [_, recorded] = blocks()
    script = tmp_path / "train.py"
    train = """
import torch

def train():
    if dist.get_rank() == 1:
        raise ValueError("a bad batch")
    dist.all_reduce(torch.ones(1))

main()
"""
    script.write_text(recorded + train)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with subprocess.Popen(
        [*torchrun, "--nproc-per-node=2", script], stderr=subprocess.PIPE, text=True
    ) as job:
        ends = threading.Timer(200, job.kill)
        ends.start()
        assert job.stderr is not None
        printed = job.stderr.read()
        ends.cancel()
    assert job.returncode == 1
    summary = printed.split("Root Cause")[1]
    assert "rank      : 1" in summary
    assert "ValueError: a bad batch" in summary
