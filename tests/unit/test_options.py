"""What `%ddp_init` is asked for, and which rank gets which device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch import host_facts
from ddp_notebook.launch.devices import DevicePlan, plan_devices
from ddp_notebook.launch.host_facts import cores
from ddp_notebook.session.options import InitOptions


def plan(
    world_size: int = 2,
    device: str = "auto",
    backend: str = "auto",
    gpus: tuple[str, ...] = (),
    available: tuple[str, ...] = (),
    **more: bool,
) -> DevicePlan:
    return plan_devices(world_size, device, backend, gpus, available, **more)


def test_without_gpus_ranks_run_on_cpus_and_it_is_said() -> None:
    chosen = plan()
    assert (chosen.device, chosen.backend, chosen.labels) == ("cpu", "gloo", ("cpu", "cpu"))
    assert chosen.notes == ("No GPU is visible: the ranks run on CPUs, with gloo.",)


def test_asking_for_cpus_is_not_commented_on() -> None:
    assert plan(device="cpu", available=("0", "1")).notes == ()


def test_each_rank_gets_a_gpu_of_its_own() -> None:
    chosen = plan(available=("0", "1", "2"))
    assert (chosen.device, chosen.devices) == ("cuda", ("cuda:0", "cuda:1"))
    assert chosen.backend == "cpu:gloo,cuda:nccl"
    assert chosen.labels == ("cuda:0 (GPU 0)", "cuda:1 (GPU 1)")
    visible = {e["CUDA_VISIBLE_DEVICES"] for e in chosen.environment}
    assert visible == {"0,1,2"}, "as in a script: cuda:LOCAL_RANK is a rank's own"
    assert plan(3, available=("0", "1", "2")).environment[:2] == chosen.environment, (
        "a rank that stays when the number changes sees what a new one sees"
    )


def test_the_gpus_named_are_the_gpus_used() -> None:
    chosen = plan(3, gpus=("0", "1", "3"), available=("0", "1", "2", "3"))
    assert {e["CUDA_VISIBLE_DEVICES"] for e in chosen.environment} == {"0,1,3"}
    assert chosen.labels[2] == "cuda:2 (GPU 3)"


def test_more_ranks_than_gpus_share_them_with_gloo_and_it_says_what_else_can_be_done() -> None:
    chosen = plan(3, available=("0", "1"))
    assert (chosen.backend, chosen.devices) == ("gloo", ("cuda:0", "cuda:1", "cuda:0"))
    assert chosen.notes == (
        "3 ranks share 2 GPUs, so the backend is gloo: NCCL needs one GPU per rank. "
        "NCCL all the same: %ddp_init --world-size 3 --share-gpu. "
        "On CPUs: %ddp_init --world-size 3 --device cpu",
    )
    assert plan(2, gpus=("0", "0"), available=("0",)).backend == "gloo", "one GPU, named twice"


def test_ranks_share_a_gpu_by_nccl_each_as_a_host_of_its_own() -> None:
    chosen = plan(2, available=("0",), share_gpu=True)
    assert (chosen.backend, chosen.devices) == ("cpu:gloo,cuda:nccl", ("cuda:0", "cuda:0"))
    first, second = chosen.environment
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first["NCCL_NET"] == "Socket" and first["NCCL_SHM_DISABLE"] == "1"
    assert "the times mean nothing" in chosen.notes[0]
    assert plan(2, available=("0",), backend="nccl", share_gpu=True).backend == "nccl"


def test_a_scripts_ranks_that_share_a_gpu_are_each_the_only_one_of_a_host() -> None:
    chosen = plan(2, available=("0",), share_gpu=True)
    own = [chosen.of_script(rank, index, 2) for index, rank in enumerate((0, 1))]
    assert [each["NCCL_HOSTID"] for each in own] == ["ddp-rank-0", "ddp-rank-1"]
    assert {each["LOCAL_RANK"] for each in own} == {"0"}, "the only GPU that it sees"
    assert [each["GROUP_RANK"] for each in own] == ["0", "1"]
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in own[0], "as torchrun has it"
    starts = chosen.of_one_process()
    assert starts["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and "NCCL_HOSTID" not in starts
    apart = plan(2, available=("0", "1"))
    assert apart.of_script(0, 0, 2) == apart.of_one_process() == {}


def test_where_torch_was_built_without_cuda_gpus_are_of_no_use() -> None:
    chosen = plan(available=("0", "1"), for_gpus=False)
    assert chosen.device == "cpu"
    assert chosen.notes == ("torch was built without CUDA: the ranks run on CPUs, with gloo.",)
    with pytest.raises(UsageMistake, match="--device cuda needs GPUs, and torch was built without"):
        plan(device="cuda", available=("0",), for_gpus=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "nccl"}, "--backend nccl needs GPUs, and none is visible here"),
        ({"device": "cuda"}, "--device cuda needs GPUs, and none is visible here"),
        ({"device": "cpu", "backend": "nccl"}, "NCCL moves data between GPUs only"),
        ({"gpus": ("7",), "available": ("0",)}, "--gpus names GPU 7, but the GPUs here are: 0."),
        (
            {"world_size": 4, "backend": "nccl", "available": ("0", "1")},
            "4 ranks but 2 GPUs: NCCL needs a GPU of its own for every rank.",
        ),
        (
            {"backend": "nccl", "gpus": ("0", "0"), "available": ("0", "1")},
            "2 ranks but 1 GPU: NCCL needs a GPU of its own for every rank.",
        ),
        ({"share_gpu": True}, "--share-gpu needs GPUs, and none is visible here"),
        (
            {"share_gpu": True, "device": "cpu", "available": ("0",)},
            "NCCL moves data between GPUs only, so --share-gpu does not go with --device cpu.",
        ),
        (
            {"share_gpu": True, "backend": "gloo", "available": ("0",)},
            "--share-gpu is for NCCL; with gloo, ranks share a GPU without it.",
        ),
    ],
)
def test_what_cannot_be_says_so(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageMistake, match=r"%ddp_init|--gpus") as caught:
        plan(**arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "World size 0 is too small"),
        ({"world_size": -1}, "World size -1 is too small"),
        ({"world_size": 10_000}, "World size 10,000 is too large"),
        ({"backend": "mpi"}, "--backend must be one of auto, gloo, nccl, not 'mpi'."),
        ({"master_port": 70_000}, "--master-port 70000 is not a port"),
        ({"master_port": -1}, "--master-port -1 is not a port"),
        ({"timeout_s": 0.0}, "--timeout is in seconds and must be more than 0"),
        ({"threads_per_rank": -2}, "--threads-per-rank must be 1 or more."),
    ],
)
def test_options_that_cannot_work_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageMistake) as caught:
        InitOptions(**arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_threads_are_cores_divided_by_ranks_and_at_least_one() -> None:
    assert InitOptions(world_size=1).threads == cores()
    assert InitOptions(world_size=200).threads == 1
    assert InitOptions(world_size=2, threads_per_rank=3).threads == 3


@pytest.mark.parametrize(
    ("cpu_max", "allowed"),
    [("150000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("max 100000", 4), ("", 4)],
)
def test_a_containers_quota_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_max: str, allowed: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpu.max").write_text(cpu_max)
    monkeypatch.setattr(host_facts, "_CPU_MAX", tmp_path / "cpu.max")
    assert cores() == allowed
    monkeypatch.setattr(host_facts, "_CPU_MAX", tmp_path / "absent")
    assert cores() == 4


def test_more_ranks_than_cores_is_said() -> None:
    assert InitOptions(world_size=1).notes() == ()
    assert "share" in InitOptions(world_size=cores() + 1).notes()[0]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"master_addr": "0.0.0.0"}, "all addresses of this host"),
        ({"master_addr": "::"}, "all addresses of this host"),
        ({"master_addr": "192.0.2.7"}, "192.0.2.7"),
        ({"store": "rank0"}, "all addresses of this host"),
        ({"master_addr": "127.0.0.9"}, ""),
        ({"master_addr": "::1"}, ""),
        ({"master_addr": "localhost"}, ""),
        ({"master_addr": "192.0.2.7", "init_method": "file"}, ""),
    ],
)
def test_a_store_that_others_can_reach_is_said(options: Any, where: str) -> None:
    notes = [n for n in InitOptions(world_size=1, **options).notes() if "store listens" in n]
    assert [f"listens on {where}," in note for note in notes] == [True] * bool(where)
