"""`%ddp_init` against torchrun: from the call to an all_reduce verified on four ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kernels import Kernel
from rows import Numbers, Row, compare

WORLD_SIZE = 4
SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
x = torch.full((1024,), float(rank + 1))
dist.all_reduce(x)
assert bool((x == world_size * (world_size + 1) / 2).all())
print("verified", flush=True)
dist.destroy_process_group()
"""


class Starting:
    """Warm: the fork server has torch loaded. Cold: from the moment of `%load_ext`.
    Again: after `%ddp_shutdown`. Replaced: two ranks in place of four, in one command."""

    name = "start"

    def round(self) -> Numbers:
        """A warm start, one with torchrun, a cold start."""
        warm_s, again_s, replaced_s = self._warm()
        verified_s, ended_s = time_torchrun()
        cold_s, load_s = self._cold()
        return {
            "warm_s": warm_s,
            "again_s": again_s,
            "replaced_s": replaced_s,
            "cold_s": cold_s,
            "load_ext_s": load_s,
            "torchrun_verified_s": verified_s,
            "torchrun_ended_s": ended_s,
        }

    def _warm(self) -> tuple[float, float, float]:
        with Kernel() as kernel:
            kernel.warm()
            first = kernel.run_well(f"%ddp_init --world-size {WORLD_SIZE}")
            kernel.run_well("%ddp_shutdown")
            again = kernel.run_well(f"%ddp_init --world-size {WORLD_SIZE}")
            replaced = kernel.run_well("%ddp_init --world-size 2 --replace")
            return first.elapsed_s, again.elapsed_s, replaced.elapsed_s

    def _cold(self) -> tuple[float, float]:
        with Kernel() as kernel:
            started = time.monotonic()
            load = kernel.run_well("%load_ext ddp_notebook")
            init = kernel.run_well(f"%ddp_init --world-size {WORLD_SIZE}")
            return init.ended_at - started, load.elapsed_s

    def rows(self, medians: Numbers) -> list[Row]:
        """The rival's time is that of the command; its last rank has verified before its end."""
        ended_s, verified_s = medians["torchrun_ended_s"], medians["torchrun_verified_s"]
        warm_s, cold_s = medians["warm_s"], medians["cold_s"]
        again_s, replaced_s = medians["again_s"], medians["replaced_s"]
        load_s = medians["load_ext_s"]
        verified = f"torchrun, until verified {verified_s:.2f} s"
        return [
            compare("%ddp_init -n 4, warm", warm_s, ended_s, 0.25, "torchrun"),
            Row("  the same", f"{warm_s:.2f} s", verified, warm_s / verified_s),
            compare("%ddp_init -n 4, after %ddp_shutdown", again_s, ended_s, 0.25, "torchrun"),
            Row(
                "%ddp_init -n 2 --replace, four ranks before",
                f"{replaced_s:.2f} s",
                wanted="at most 1 s",
                met=replaced_s <= 1.0,
            ),
            compare("%load_ext + %ddp_init -n 4, cold", cold_s, ended_s, 0.6, "torchrun"),
            Row("  the same", f"{cold_s:.2f} s", verified, cold_s / verified_s),
            Row("%load_ext", f"{load_s:.2f} s", wanted="under 0.3 s", met=load_s < 0.3),
        ]


def time_torchrun() -> tuple[float, float]:
    """Seconds until every rank has verified its all_reduce, and until torchrun has ended."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "all_reduce.py"
        script.write_text(SCRIPT)
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(WORLD_SIZE), "--master-port", str(free_port()), str(script)),
        ]
        started = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
        ) as process:
            assert process.stdout is not None
            verified_at = 0.0
            count = 0
            for line in process.stdout:
                # Two ranks that print at the same moment may share a line.
                if "verified" in line:
                    count += line.count("verified")
                    verified_at = time.monotonic()
        ended_at = time.monotonic()
        assert count == WORLD_SIZE and process.returncode == 0, f"torchrun: {count} verified"
        return verified_at - started, ended_at - started


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
