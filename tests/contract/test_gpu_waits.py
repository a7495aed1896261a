"""A rank whose main thread waits for its GPU, in C, while its oldest collective is not done.

There is no GPU here. CUDA stands for in use by a flag, and ``.item()`` of a GPU's tensor is a call
in C that sleeps or spins for some seconds; gloo's collective without a wait stands for NCCL's.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from support import stuck

from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Activity

pytestmark = pytest.mark.timeout(120)

STAND_IN = """\
import ctypes, functools, hashlib, time
from ddp_notebook.rank import gpu
gpu.in_use, gpu.is_working = lambda: True, lambda: False
spins = functools.partial(hashlib.pbkdf2_hmac, "sha256", b"", b"")
began_s = time.monotonic()
spins(200_000)
spin = functools.partial(spins, int(200_000 * 9 / (time.monotonic() - began_s)))
sleep = functools.partial(ctypes.CDLL(None).usleep, 9_000_000)
class Loss:
    item = staticmethod({how})
x = torch.ones(4)"""
HANGS = """\
for step in range(3):
    if rank == 1 and step == 1:
        continue
    work = dist.all_reduce(x, async_op=True)
    if rank == 0 and step == 2:
        Loss.item()"""
HEALTHY = """\
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    Loss.{how}()
    dist.send(torch.ones(1), 1)
    work.wait()
elif rank == 1:
    dist.recv(torch.ones(1), 0)
    dist.all_reduce(x)
else:
    dist.all_reduce(x)"""


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_a_rank_that_waits_for_its_gpu_waits_in_its_oldest_collective(ranks: Any, how: str) -> None:
    assert ranks.run_cell(STAND_IN.format(how=how)).error is None
    began_s = time.monotonic()
    found = stuck(ranks, HANGS)
    assert time.monotonic() - began_s < scaled_for_load(3), "while it still waits"
    assert [finding.ranks for finding in found.findings] == [(1,)]
    assert ranks.where().stack(0).doing.activity is Activity.WAITING
    ranks.abort()
    ranks.restart()


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_a_long_call_of_another_name_is_no_wait_for_the_gpu(ranks: Any, how: str) -> None:
    assert ranks.run_cell(STAND_IN.format(how=how) + "\nLoss.digest = Loss.item").error is None
    result = ranks.run_cell(HEALTHY.format(how="digest"))
    assert result.error is None and not (result.diagnosis and result.diagnosis.findings)
    ranks.restart()
