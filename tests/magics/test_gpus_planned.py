"""Which rank gets which GPU, in a real kernel that loads a stand-in of NVIDIA's library (NVML).

There is no GPU here, and torch may be built without CUDA: that it is not is a stand-in, too. What
ranks would do on the GPUs is not tested here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel, seen_in
from support import eventually, lacking, spared_processes

from tests.gpu import stand_ins

pytestmark = pytest.mark.timeout(180)

SET = """
import os
import ddp_notebook.session.pool as pool_module
from ddp_notebook.session import InitOptions as pool_options
pool_module.torch_is_for_gpus = lambda: {built}
for name, value in {values}.items():
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
session = get_ipython()._ddp_notebook_magics.session
session.pool._gpus = pool_module.gpus()  # as %load_ext has it
"""
MIG = "MIG-00000000-0000-0000-0000-000000000000"
SECOND = "GPU-00000001-0000-0000-0000-000000000000"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that finds the stand-in where a driver's library would be."""
    try:
        environment = stand_ins.build(tmp_path_factory.mktemp("drivers"), "libnvidia-ml.so.1")
    except FileNotFoundError as error:
        lacking(str(error))
    with Kernel(environment) as kernel:
        kernel.run_well("%load_ext ddp_notebook")
        with spared_processes([kernel.pid]):
            yield kernel


def has(
    kernel: Kernel,
    gpus: int,
    *,
    visible: str | None = None,
    mig: bool = False,
    users: str | None = None,
    built: bool = True,
) -> None:
    """From now on the machine has so many GPUs."""
    values = {
        "STAND_IN_GPUS": str(gpus),
        "STAND_IN_MIG": "1" if mig else None,
        "STAND_IN_USERS": users,
        "CUDA_VISIBLE_DEVICES": visible,
    }
    kernel.run_well(SET.format(values=values, built=built))


@pytest.mark.parametrize(
    ("gpus", "visible", "mig", "typed", "says"),
    [
        (2, None, False, "-n 2 --gpus 0,9", "--gpus names GPU 9, but the GPUs here are: 0, 1."),
        (4, None, False, "-n 2 --gpus MIG-x", "--gpus names GPU MIG-x, but the GPUs here are: 0"),
        (2, MIG, True, "-n 2 --gpus MIG-x", f"but the GPUs here are: {MIG}."),
        (2, None, False, "-n 2 --gpus 0,0 --backend nccl", "2 ranks but 1 GPU: NCCL needs a GPU"),
        (8, "0,-1,1", False, "-n 2 --backend nccl", "2 ranks but 1 GPU: NCCL needs a GPU"),
        (8, "2,9,3", False, "-n 2 --gpus 2,3", "--gpus names GPU 3, but the GPUs here are: 2."),
        (8, "NoDevFiles", False, "-n 1 --device cuda", "--device cuda needs GPUs, and none is"),
        (0, None, False, "-n 2 --backend nccl", "--backend nccl needs GPUs, and none is visible"),
        (0, None, False, "-n 2 --share-gpu", "--share-gpu needs GPUs, and none is visible here"),
        (1, None, False, "-n 2 --share-gpu --backend gloo", "ranks share a GPU without it"),
    ],
)
def test_what_cannot_be_is_refused_in_words_and_nothing_is_started(
    kernel: Kernel, gpus: int, visible: str | None, mig: bool, typed: str, says: str
) -> None:
    has(kernel, gpus, visible=visible, mig=mig)
    reply = kernel.run(f"%ddp_init {typed}")
    assert "UsageError" in reply.text and says in " ".join(reply.text.split()), reply.text
    assert kernel.ask("session.pool.processes is None")


@pytest.mark.parametrize(
    ("gpus", "visible", "options", "labels", "words"),
    [
        (1, None, "world_size=1", ["cuda:0 (GPU 0)"], ""),
        (4, "3,1", "world_size=2", ["cuda:0 (GPU 3)", "cuda:1 (GPU 1)"], ""),
        (8, None, "world_size=2, gpus=('7', '5')", ["cuda:0 (GPU 7)", "cuda:1 (GPU 5)"], ""),
        (8, SECOND, "world_size=1", [f"cuda:0 (GPU {SECOND})"], ""),
        (2, MIG, "world_size=1", [f"cuda:0 (GPU {MIG})"], ""),
        (2, None, "world_size=2, gpus=('0', '0')", ["cuda:0 (GPU 0)"] * 2, "share 1 GPU, so"),
    ],
)
def test_each_rank_is_given_a_gpu(
    kernel: Kernel, gpus: int, visible: str | None, options: str, labels: list[str], words: str
) -> None:
    has(kernel, gpus, visible=visible, mig=visible == MIG)
    kernel.run_well(f"plan = session.pool.plan(pool_options(device='auto', {options}))")
    assert kernel.ask("list(plan.labels)") == labels
    assert words in " ".join(kernel.ask("list(plan.notes)"))


def test_ranks_see_all_gpus_and_the_board_names_who_holds_their_memory(kernel: Kernel) -> None:
    has(kernel, 4)
    shown = kernel.run_well("%ddp_init -n 2 --gpus 2,1 --step").text
    try:
        assert "cuda:1 (GPU 1)" in shown, shown
        name = "__import__('os').environ['CUDA_VISIBLE_DEVICES']"
        assert "2,1" in kernel.run_well(f"%ddp_print {name}").text
        pids = kernel.ask("[state.pid for state in session.record.snapshot.ranks]")
        users = f"2:{pids[0]}:{8 << 30} 2:{kernel.pid}:{1 << 30} 1:{pids[1]}:{5 << 30}"
        has(kernel, 4, users=users)
        used = ("9 GiB of 80 GiB", "5 GiB of 80 GiB", "rank 0 8 GiB", "rank 1 5 GiB")

        def is_named() -> bool:
            """The driver is asked in a thread of its own, and the next board has its answer."""
            board = "\n".join(map(seen_in, kernel.run_well("%ddp_board").messages))
            return all(each in board for each in used)

        eventually(is_named, 20)
    finally:
        kernel.run_well("%ddp_shutdown")


def test_ranks_that_share_a_gpu_by_nccl_are_hosts_of_their_own(kernel: Kernel) -> None:
    has(kernel, 1)
    kernel.run_well("%ddp_init -n 2 --share-gpu --step")
    try:
        hosts = kernel.run_well("%ddp_print __import__('os').environ['NCCL_HOSTID']").text
        assert "ddp-rank-0" in hosts and "ddp-rank-1" in hosts, hosts
        assert "by NCCL, over sockets" in " ".join(kernel.ask("session.record.snapshot.notes"))
    finally:
        kernel.run_well("%ddp_shutdown")


def test_where_torch_was_built_without_cuda_that_is_said(kernel: Kernel) -> None:
    has(kernel, 2, built=False)
    reply = kernel.run("%ddp_init -n 2 --backend nccl")
    assert "torch was built without CUDA here" in " ".join(reply.text.split())
    assert kernel.ask("session.pool.processes is None")


@pytest.mark.parametrize(
    ("gpus", "visible", "says"),
    [
        (2, None, "GPU 1 nearly full: 79 GiB of 80 GiB in use"),
        (8, "0,9", "0,9 names GPU 9, but there is: 0, 1, 2, 3, 4, 5, 6, 7"),
    ],
)
def test_the_doctor_names_the_gpus(
    kernel: Kernel, gpus: int, visible: str | None, says: str
) -> None:
    has(kernel, gpus, visible=visible, users=f"1:1:{79 << 30}")
    text = " ".join(kernel.run_well("%ddp_doctor").text.split())
    assert says in text, text
