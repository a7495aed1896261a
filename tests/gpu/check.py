"""What works on the GPUs of this machine: `python -m tests.gpu.check`, a table for an issue.

It takes a few minutes, and was itself run on CPUs only so far. With one GPU its ranks share it, as
`--share-gpu` does: their hangs are real, their speeds are not. `--cpu` is a dry run on CPUs with
gloo: it proves nothing about GPUs, and keeps this file alive where there is none.
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddp_notebook.bench.plan import Plan
from ddp_notebook.errors import CellFailed, DDPError, Stuck
from ddp_notebook.launch.devices import gpus as all_gpus
from ddp_notebook.launch.devices import visible_gpus
from ddp_notebook.session import Session
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.runs.endings import CellResult

Seen = tuple[bool, str]
"""Whether it was as it should be, and what was seen."""

PREPARE = """\
x = torch.ones(1000, device=device)
kept = torch.full((3,), float(rank), device=device)"""
TRAIN = """\
import os
torch.manual_seed(0)
if device.type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
model = DDP(torch.nn.Linear(64, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64, device=device) * (rank + step)).square().mean()
    loss.backward()
    optimizer.step()
print(f"{sum(p.sum().item() for p in model.parameters()):.4f}")"""
SKIP = """\
for step in range(3):
    if rank == 1 and step == 1:
        continue
    dist.all_reduce(x)
{reads}"""
LONG = """\
big = torch.randn({size}, {size}, device=device)
if rank == 1:
    for _ in range({times}):
        big = big @ big / {size}
dist.all_reduce(x)
print(bool(torch.isfinite(x).all()))"""
FULL = """\
if rank == 1:
    torch.empty(1 << 50, dtype=torch.uint8, device=device)
dist.barrier()"""
SCRIPT = """\
import os, torch, torch.distributed as dist
cuda = {cuda}
count = max(torch.cuda.device_count(), 1)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % count) if cuda else "cpu"
dist.init_process_group({backend!r})
x = torch.ones(10, device=device)
if dist.get_rank() != 1:
    dist.all_reduce(x)
print(x.sum().item())
dist.destroy_process_group()
"""


class Checks:
    """The checks, in their order; each is a method that `rows` calls."""

    def __init__(self, session: Session, *, cuda: bool) -> None:
        self.session = session
        self.cuda = cuda
        self.backend = "nccl" if cuda else "gloo"

    def rows(self) -> Iterator[tuple[str, Callable[[], Seen]]]:
        """Each check's words, and what makes it."""
        yield "DDP trains, and the replicas are equal", self.trains
        for reads in ("", "print(x.sum().item())"):
            where = "`.item()`" if reads else "the end of the cell"
            words = f"rank 1 skips a collective, the others wait at {where}: verdict, abort"
            yield words, functools.partial(self.hangs, reads)
        yield "a long kernel on one rank is no hang", self.computes
        yield "no memory left on one rank", self.has_no_memory
        yield "a script hangs in `.item()`", self.hangs_in_a_script
        yield "rank 1 gets a new process, and takes part", self.replaces_a_rank
        yield "all_reduce is measured", self.measures

    def trains(self) -> Seen:
        result = self.session.run_cell(TRAIN)
        return result.error is None and len(result.outputs) == 1, _said(result)

    def hangs(self, reads: str) -> Seen:
        self.session.run_cell(PREPARE).raise_for_error()
        pids = self._pids()
        began_s = time.monotonic()
        result = self.session.run_cell(SKIP.format(reads=reads))
        took_s = time.monotonic() - began_s
        named = isinstance(result.error, Stuck) and _culprits(result) == [(1,)]
        began_s = time.monotonic()
        self.session.abort()
        abort_s = time.monotonic() - began_s
        kept = self.session.run_cell("assert float(kept.sum()) == 3 * rank").error is None
        same = self._pids() == pids
        words = f"{_said(result)}; verdict {took_s:.1f} s, abort {abort_s:.1f} s, "
        words += (
            f"processes {'kept' if same else 'REPLACED'}, variables {'kept' if kept else 'LOST'}"
        )
        return named and same and kept, words

    def computes(self) -> Seen:
        size, times = (8192, 400) if self.cuda else (512, 40)
        result = self.session.run_cell(LONG.format(size=size, times=times))
        return result.error is None and not _culprits(result), _said(result)

    def has_no_memory(self) -> Seen:
        result = self.session.run_cell(FULL)
        self.session.abort()
        return isinstance(result.error, CellFailed | Stuck) and 1 in _flat(result), _said(result)

    def hangs_in_a_script(self) -> Seen:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "hangs.py"
            script.write_text(SCRIPT.format(cuda=self.cuda, backend=self.backend))
            result = self.session.run_script(str(script))
            self.session.abort()
        # Where rank 1 destroys its group, gloo raises on rank 0.
        failed = isinstance(result.error, CellFailed | Stuck)
        return failed and bool(_flat(result)), _said(result)

    def replaces_a_rank(self) -> Seen:
        self.session.restart((1,))
        result = self.session.run_cell(
            "y = torch.ones(1, device=device)\ndist.all_reduce(y)\nprint(y.item())"
        )
        return result.error is None and len(result.outputs) == 1, _said(result)

    def measures(self) -> Seen:
        result = self.session.bench(Plan(max_bytes=1 << 20, budget_s=5.0))
        points = result.curves[0].points
        return bool(points), f"{len(points)} sizes; {points[-1].latency_us / 1000:.2f} ms for 1 MiB"

    def _pids(self) -> list[int]:
        return [state.pid for state in self.session.record.snapshot.ranks]


def _culprits(result: CellResult) -> list[tuple[int, ...]]:
    return [finding.ranks for finding in result.diagnosis.findings] if result.diagnosis else []


def _flat(result: CellResult) -> set[int]:
    return {rank for ranks in _culprits(result) for rank in ranks}


def _said(result: CellResult) -> str:
    if result.diagnosis is not None and result.diagnosis.findings:
        finding = result.diagnosis.findings[0]
        return f"{finding.category}: {result.diagnosis.headline}"
    if result.error is not None:
        return str(result.error)
    return "".join(item.text for group in result.outputs[:1] for item in group.items).strip()


def main() -> int:
    """Run all checks, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--cpu", action="store_true", help="a dry run with gloo")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    gpus = () if options.cpu else visible_gpus()
    if not gpus and not options.cpu:
        print("No GPU is visible here. A dry run on CPUs: python -m tests.gpu.check --cpu")
        return 2
    names = ", ".join(gpu.name for gpu in all_gpus())
    on = "CPUs (a dry run)" if options.cpu else f"{len(gpus)} of: {names}"
    print(f"On {on}, Python {platform.python_version()}, {options.ranks} ranks\n")
    print("| what | result | seen |\n|---|---|---|")
    began_s, session = time.monotonic(), Session()
    failed = 0
    try:
        session.init(
            InitOptions(
                world_size=options.ranks,
                backend="gloo" if options.cpu else "nccl",
                device="cpu" if options.cpu else "cuda",
                share_gpu=0 < len(gpus) < options.ranks,
            )
        )
        print(f"| start | right | ready after {time.monotonic() - began_s:.1f} s |", flush=True)
        for words, check in Checks(session, cuda=not options.cpu).rows():
            try:
                right, seen = check()
            except DDPError as error:
                right, seen = False, f"{type(error).__name__}: {error}"
                session.restart()
            failed += not right
            seen = " ".join(seen.split()).replace("|", "\\|")
            print(f"| {words} | {'right' if right else '**WRONG**'} | {seen} |", flush=True)
    finally:
        session.shutdown()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
