"""Memory of four ranks against four stock engines that have imported torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

import psutil
from kernels import Kernel
from rows import Numbers, Row
from starting import free_port
from support import eventually, our_processes

WRAPPED = (
    "import torch\n"
    "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))\n"
    "model(torch.ones(1, 8)).sum().backward()"
)
"""What each rank does before the last measurement: torch loads a third more for it."""


class Memory:
    """PSS: a page that several processes share counts for each by its part."""

    name = "memory"

    def round(self) -> Numbers:
        """Ours, then the stock ones; never both at once, because they would share pages."""
        with Kernel() as kernel:
            others = {p.pid for p in our_processes()}
            kernel.init(4)
            kernel.run_well("%%ddp\nimport torch\nx = torch.ones(1)\ndist.all_reduce(x)")
            ranks = kernel.pids().ranks
            ours = {
                "ranks": pss(ranks),
                "all": pss(p.pid for p in our_processes() if p.pid not in others),
            }
            kernel.run_well(f"%%ddp\n{WRAPPED}")
            ours["wrapped"] = pss(p.pid for p in our_processes() if p.pid not in others)
        eventually(lambda: not our_processes(), what="the end of our ranks")
        stock = stock_engines()
        eventually(lambda: not our_processes(), what="the end of the stock engines")
        return {
            "ranks_bytes": ours["ranks"],
            "all_bytes": ours["all"],
            "stock_engines_bytes": stock["engines"],
            "stock_all_bytes": stock["all"],
            "wrapped_bytes": ours["wrapped"],
            "stock_wrapped_bytes": stock["wrapped"],
        }

    def rows(self, medians: Numbers) -> list[Row]:
        """The bar, and what everything started takes."""
        ratio = medians["ranks_bytes"] / medians["stock_engines_bytes"]
        whole = medians["all_bytes"] / medians["stock_all_bytes"]
        wrapped = medians["wrapped_bytes"] / medians["stock_wrapped_bytes"]
        return [
            Row(
                "memory (PSS) of four ranks, torch imported",
                megabytes(medians["ranks_bytes"]),
                f"stock engines {megabytes(medians['stock_engines_bytes'])}",
                ratio,
                "at most 0.5x",
                ratio <= 0.5,
            ),
            Row(
                "  with everything started for them",
                megabytes(medians["all_bytes"]),
                f"stock cluster {megabytes(medians['stock_all_bytes'])}",
                whole,
            ),
            Row(
                "  the same, once each rank has trained a DDP model",
                megabytes(medians["wrapped_bytes"]),
                f"stock cluster {megabytes(medians['stock_wrapped_bytes'])}",
                wrapped,
            ),
        ]


def stock_engines(count: int = 4) -> dict[str, float]:
    """The memory of `ipyparallel.Cluster(n=count)`, started as its documentation says."""
    import ipyparallel as ipp

    others = {p.pid for p in our_processes()}
    with tempfile.TemporaryDirectory() as folder:
        cluster = ipp.Cluster(n=count, profile_dir=folder, log_level=40)
        try:
            client = cluster.start_and_connect_sync()
            client[:].execute("import torch", block=True)
            engines = client[:].apply_sync(os.getpid)
            everything = [p.pid for p in our_processes() if p.pid not in others]
            memory = {"engines": pss(engines), "all": pss(everything)}
            join = (
                "import os\nimport torch.distributed as dist\nos.environ.update("
                "RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR='127.0.0.1', MASTER_PORT=port)\n"
                "dist.init_process_group('gloo')"
            )
            port = str(free_port())
            for rank, engine in enumerate(client):
                engine.push({"rank": rank, "size": count, "port": port}, block=True)
            client[:].execute(f"{join}\n{WRAPPED}", block=True)
            memory["wrapped"] = pss(everything)
            return memory
        finally:
            cluster.stop_cluster_sync()
            client.close()


def pss(pids: Iterable[int]) -> float:
    """The proportional set size of processes, in bytes."""
    return float(sum(psutil.Process(pid).memory_full_info().pss for pid in pids))


def megabytes(count: float) -> str:
    """A number of bytes in MB."""
    return f"{count / 1e6:.0f} MB"
