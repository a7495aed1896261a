"""The doctor's checks of software, ranks and GPUs, with facts given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import pytest
from doctor_cases import CPU_TORCH, FAILURE, OK, TORCH, WARNING, expect, ranks

from ddp_notebook.doctor.checks import (
    check_backend,
    check_ranks,
    check_torch,
    check_version,
)
from ddp_notebook.launch.environment import torchrun_agents_variables, torchrun_variables
from ddp_notebook.model.doctor import Check, Verdict


@pytest.mark.parametrize(
    ("distribution", "version", "verdict", "found", "remedy"),
    [
        ("python", "3.14.0b2", OK, "3.14.0b2", ""),
        ("python", "3.10.14", FAILURE, "3.10.14 is older than 3.11", "Python 3.11 or newer"),
        ("ipyparallel", "9.2.0", OK, "9.2.0", ""),
        ("ipyparallel", "8.8.0", FAILURE, "older than 9.0", '-m pip install "ipyparallel>=9.0"'),
        ("ipykernel", "", FAILURE, "not installed", '-m pip install "ipykernel>=6.29"'),
        ("torch", "2.8.0a0+git1", OK, "2.8.0a0", ""),
        ("torch", "2.10.0", OK, "2.10.0", ""),
    ],
)
def test_versions(
    distribution: str, version: str, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_version, distribution, version), verdict, found, remedy)


@pytest.mark.parametrize(
    ("torch", "verdict", "found", "remedy"),
    [
        (TORCH, OK, "2.8.0+cu126, built for CUDA 12.6, driver 560.35.03", ""),
        ({**CPU_TORCH, "cuda_driver": ""}, OK, "2.8.0+cpu, built without CUDA", ""),
        ({"torch_error": "No module named 'torch'"}, FAILURE, "No module named", "pip install"),
        ({**TORCH, "torch": "2.4.1"}, FAILURE, "2.4.1 is older than 2.8", '"torch>=2.8"'),
        ({**TORCH, "distributed": False}, FAILURE, "without torch.distributed", "pytorch.org"),
    ],
)
def test_torch(torch: Mapping[str, Any], verdict: Verdict, found: str, remedy: str) -> None:
    expect(partial(check_torch, torch), verdict, found, remedy)


@pytest.mark.parametrize(
    ("torch", "backend", "on_gpus", "verdict", "found", "remedy"),
    [
        (TORCH, "auto", True, OK, "torch has gloo and nccl 2.26.2", ""),
        (TORCH, "nccl", True, OK, "nccl 2.26.2", ""),
        (CPU_TORCH, "auto", False, OK, "torch has gloo", ""),
        (CPU_TORCH, "gloo", False, OK, "torch has gloo", ""),
        (CPU_TORCH, "nccl", False, FAILURE, "torch has gloo, not nccl", "--backend gloo. Or:"),
        ({**TORCH, "gloo": False}, "gloo", True, FAILURE, "not gloo", "--backend nccl. Or:"),
        ({**TORCH, "gloo": False}, "auto", False, FAILURE, "ranks on CPUs need gloo", "Install"),
        ({**CPU_TORCH, "gloo": False}, "auto", True, FAILURE, "neither gloo nor nccl", "Install"),
        ({**CPU_TORCH, "gloo": False}, "nccl", True, FAILURE, "neither gloo nor nccl", "Install"),
        (CPU_TORCH, "auto", True, WARNING, "needs both", "--backend gloo"),
    ],
)
def test_backends(
    torch: Mapping[str, Any], backend: str, on_gpus: bool, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_backend, torch, backend, on_gpus), verdict, found, remedy)


def verdicts(checks: Iterable[Check]) -> dict[str, tuple[Verdict, str]]:
    """Name of a check to its verdict and what it found."""
    return {check.name: (check.verdict, check.found) for check in checks}


def test_ranks_that_agree_are_fine() -> None:
    assert verdicts(check_ranks(ranks(4))) == {
        "versions on ranks": (OK, "ranks 0-3: all the same"),
        "RANK on ranks": (OK, "each rank has its own number"),
        "variables on ranks": (OK, "ranks 0-3: all the same"),
    }
    assert check_ranks({}) == ()


def test_the_minority_is_named_first_with_what_it_has() -> None:
    found = verdicts(check_ranks(ranks(4, torch="2.6.0", cuda_driver="")))["versions on ranks"]
    assert found == (
        FAILURE,
        "torch: rank 3 has 2.6.0, ranks 0-2 have 2.8.0+cu126; "
        "the CUDA driver: rank 3 has none, ranks 0-2 have 560.35.03",
    )


def test_two_ranks_that_differ_are_named_in_their_order() -> None:
    found = verdicts(check_ranks(ranks(2, python="3.11.1")))["versions on ranks"]
    assert found == (FAILURE, "Python: rank 0 has 3.12.1, rank 1 has 3.11.1")


def test_a_rank_with_another_number_is_a_failure() -> None:
    found = verdicts(check_ranks(ranks(2, environment={"RANK": "0", "WORLD_SIZE": "2"})))
    verdict, said = found["RANK on ranks"]
    assert verdict is FAILURE
    assert said.startswith("RANK is 0 on rank 1: a process group built from the")
    unset = verdicts(check_ranks(ranks(1, environment={})))["RANK on ranks"]
    assert unset[1].startswith("RANK is unset on rank 0")


@pytest.mark.parametrize(
    ("own", "verdict", "found"),
    [
        ({"MASTER_PORT": "1"}, FAILURE, "MASTER_PORT: rank 2 has 1, ranks 0 and 1 have none"),
        (
            {"NCCL_P2P_DISABLE": "1"},
            WARNING,
            "NCCL_P2P_DISABLE: rank 2 has 1, ranks 0 and 1 have none",
        ),
        ({"CUDA_VISIBLE_DEVICES": "2", "LOCAL_RANK": "2"}, OK, "ranks 0-2: all the same"),
    ],
)
def test_variables_that_differ_between_ranks(
    own: Mapping[str, str], verdict: Verdict, found: str
) -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "3", **own}
    checks = verdicts(check_ranks(ranks(3, environment=environment)))
    assert checks["variables on ranks"] == (verdict, found)


def test_what_is_set_for_each_rank_by_itself_is_no_difference() -> None:
    """After a script the doctor asks its processes: each has its own number and error file."""
    facts = {}
    for rank in range(3):
        environment = {
            **torchrun_variables(rank, 3, ("127.0.0.1", 29500), agent_store=True),
            **torchrun_agents_variables(rank, 3),
            "TORCHELASTIC_ERROR_FILE": f"/tmp/script-1/error-{100 + rank}.json",
        }
        facts[rank] = {**ranks(1)[0], "environment": environment}
    assert verdicts(check_ranks(facts))["variables on ranks"] == (OK, "ranks 0-2: all the same")
