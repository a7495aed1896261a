"""No CUDA before the fork: `python -m tests.gpu.before_fork`, with torch for CUDA, without GPUs.

A process that has begun CUDA can fork none that use it. The driver's library is a stand-in that
notes which processes begin CUDA: the fork server may not be one, whatever it imports. (Ranks are:
torch's autograd asks for GPUs.) `tests/cuda_build.sh` makes the environment for it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddp_notebook.session import InitOptions, Session
from tests.gpu import stand_ins

TRAIN = """\
model = DDP(torch.nn.Linear(4, 1))
model(torch.ones(2, 4)).sum().backward()
print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())"""
BEGIN = "torch.cuda.is_available()"


def opened(pid: int) -> list[str]:
    """The devices of NVIDIA's driver that a process has open."""
    fds = Path(f"/proc/{pid}/fd").iterdir()
    return [name for fd in fds if (name := str(fd.readlink())).startswith("/dev/nvidia")]


def rows(session: Session, log: Path) -> Iterator[tuple[str, bool, str]]:
    """What is checked, whether it is right, and what was seen."""
    begun = lambda: log.read_text().split() if log.exists() else []  # noqa: E731
    for start in ("the first ranks", "ranks of a server that has had others"):
        if session.record.snapshot.ranks:
            session.restart()
        else:
            session.init(InitOptions(world_size=2, device="cpu"))
        server = session.pool.need("this check").fork_server.pid
        result = session.run_cell(TRAIN)
        text = "".join(item.text for group in result.outputs for item in group.items).strip()
        right = result.error is None and text == "False False"
        yield f"{start}: two train by gloo; is_initialized, _is_in_bad_fork", right, text
        is_mapped = "libcuda.so.1" in Path(f"/proc/{server}/maps").read_text()
        yield f"{start}: the driver's library is mapped in the fork server", is_mapped, ""
        yield f"{start}: no device is open there", not opened(server), str(opened(server))
        right = str(server) not in begun()
        yield f"{start}: CUDA has not begun there", right, f"{server}; begun in {begun()}"
    session.run_cell(BEGIN).raise_for_error()
    ranks = {str(state.pid) for state in session.record.snapshot.ranks}
    yield f"after {BEGIN} in the ranks it has begun in them", ranks <= {*begun()}, ""


def main() -> int:
    """Print a table; 1 where something is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        environment = stand_ins.build(Path(folder), "libcuda.so.1")
        log = Path(folder) / "begun"
        # The fork server's loader reads it as it starts.
        os.environ.update(environment, STAND_IN_CUDA_LOG=str(log))
        session, wrong = Session(), 0
        print("| what | result | seen |\n|---|---|---|")
        try:
            for what, right, seen in rows(session, log):
                wrong += not right
                print(
                    f"| {what} | {'right' if right else '**WRONG**'} | {seen.strip()} |", flush=True
                )
        finally:
            session.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
