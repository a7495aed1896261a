"""The doctor: every check with facts given, what it asks the system, and how it is shown."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ddp_notebook.agent.facts import driver_version, excerpt, gather
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model.doctor import Check, DoctorReport, Verdict
from ddp_notebook.session.doctor import containers, examine, facts
from ddp_notebook.session.doctor.containers import Limit, memory_limit, process_limit
from ddp_notebook.session.doctor.gpus import (
    Gpu,
    check_devices,
    check_gpus,
    check_visible_devices,
)
from ddp_notebook.session.doctor.machine import (
    EarlierRank,
    Folder,
    check_address_space,
    check_clock,
    check_cores,
    check_earlier_ranks,
    check_fork,
    check_memory,
    check_open_files,
    check_processes,
    check_shared_memory,
    check_temporary_folder,
    threads_of,
)
from ddp_notebook.session.doctor.network import (
    Holder,
    Interface,
    Lookup,
    Ports,
    check_host_name,
    check_interfaces,
    check_loopback,
    check_master_addr,
    check_port,
    check_ports,
    nccl_interfaces,
)
from ddp_notebook.session.doctor.software import (
    check_backend,
    check_ranks,
    check_shadowing,
    check_torch,
    check_version,
)
from ddp_notebook.session.doctor.variables import check_bites, check_rendezvous, port_of
from ddp_notebook.views import doctor as view

OK, WARNING, FAILURE = Verdict.OK, Verdict.WARNING, Verdict.FAILURE
MIB, GIB = 2**20, 2**30
Look = Callable[[], Check | Iterable[Check]]


def expect(look: Look, verdict: Verdict, found: str, remedy: str = "") -> None:
    """The one check that `look` gives has this verdict, and says these things."""
    made = look()
    checks = [made] if isinstance(made, Check) else list(made)
    assert len(checks) == 1, checks
    (check,) = checks
    assert (check.verdict, found in check.found) == (verdict, True), check
    assert remedy in check.remedy, check
    assert bool(check.remedy) is (verdict is not OK), "what is wrong has a remedy"
    assert "\n" not in check.found + check.remedy


# --------------------------------------------------------------------------- variables


@pytest.mark.parametrize(
    ("environment", "verdict", "found", "remedy"),
    [
        ({"PATH": "/bin"}, OK, "none is set", ""),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            WARNING,
            "left over: RANK=0 WORLD_SIZE=2. %ddp_init gives its ranks their own",
            'unset RANK WORLD_SIZE. In the notebook: import os; os.environ.pop("RANK"), and',
        ),
        ({"LOCAL_RANK": "0"}, WARNING, "left over: LOCAL_RANK=0", "unset LOCAL_RANK. In"),
        (
            {"RANK": "0", "TORCHELASTIC_RUN_ID": "7"},
            WARNING,
            "of the torchrun job around us: RANK=0",
            "unset RANK",
        ),
        ({"RANK": "5", "WORLD_SIZE": "2"}, FAILURE, "RANK=5 with WORLD_SIZE=2: ranks are", "unset"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, FAILURE, "ranks are 0 to 1", "unset"),
        ({"RANK": "one"}, FAILURE, "RANK=one is not a number of 0 or more", "unset RANK"),
        ({"RANK": "-1"}, FAILURE, "RANK=-1 is not a number", "unset RANK"),
        ({"WORLD_SIZE": ""}, FAILURE, "WORLD_SIZE= is not a number", "unset WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, FAILURE, "WORLD_SIZE=0 is a group of nobody", "unset"),
        ({"MASTER_PORT": "123456"}, FAILURE, "MASTER_PORT=123456 is not a port", "unset"),
        ({"MASTER_PORT": "0"}, FAILURE, "MASTER_PORT=0 is not a port", "unset"),
        ({"MASTER_ADDR": " "}, FAILURE, "MASTER_ADDR is empty", "unset MASTER_ADDR"),
        (
            {"MASTER_PORT": "x", "RANK": "x"},
            FAILURE,
            "MASTER_PORT=x is not a number of 0 or more; RANK=x is not a number of 0 or more. No",
            "unset MASTER_PORT RANK",
        ),
    ],
)
def test_variables_of_a_rendezvous(
    environment: Mapping[str, str], verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_rendezvous, environment), verdict, found, remedy)


@pytest.mark.parametrize(
    ("environment", "verdict", "found", "remedy"),
    [
        ({}, OK, "none that is known to bite", ""),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO", "OMP_PROC_BIND": "false"}, OK, "none", ""),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "CUDA_LAUNCH_BLOCKING": "0"}, OK, "none", ""),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, WARNING, "segmentation fault", "INFO or unset"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, WARNING, "opens no store", "Unset it."),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, WARNING, "cannot overlap", "Unset it"),
        (
            {"NCCL_ASYNC_ERROR_HANDLING": "1"},
            WARNING,
            "1: the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "Set TORCH_NCCL_ASYNC_ERROR_HANDLING instead and unset NCCL_ASYNC_ERROR_HANDLING.",
        ),
        ({"OMP_PROC_BIND": "close"}, WARNING, "the same cores", "Unset OMP_PROC_BIND."),
    ],
)
def test_variables_known_to_bite(
    environment: Mapping[str, str], verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_bites, environment), verdict, found, remedy)


def test_each_variable_that_bites_has_a_line_of_its_own() -> None:
    checks = check_bites({"NCCL_BLOCKING_WAIT": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert [check.name for check in checks] == ["TORCH_DISTRIBUTED_DEBUG", "NCCL_BLOCKING_WAIT"]


@pytest.mark.parametrize(
    ("text", "port"), [(None, 0), ("29500", 29500), ("70000", 0), ("x", 0), ("", 0), (" 80 ", 80)]
)
def test_a_master_port_that_is_none_is_not_looked_at(text: str | None, port: int) -> None:
    assert port_of({} if text is None else {"MASTER_PORT": text}) == port


# --------------------------------------------------------------------------- network

PORTS = Ports(32768, 60999, 200)
TRAINING = Holder(812, "python train.py")


@pytest.mark.parametrize(
    ("port", "refused", "holders", "verdict", "found", "remedy"),
    [
        (29500, 0, (), OK, "free", ""),
        (40000, 0, (), OK, "it is one of 32768-60999, which any connection may be given", ""),
        (
            29500,
            errno.EADDRINUSE,
            (TRAINING,),
            FAILURE,
            "--master-port is in use by pid 812 (python train.py)",
            "Leave --master-port out (a free port is chosen), or give another one. If it is a job "
            "of yours that should be over: kill 812",
        ),
        (
            29500,
            errno.EADDRINUSE,
            (Holder(None, ""),),
            FAILURE,
            "in use by a process of another user",
            "give another one.",
        ),
        (29500, errno.EADDRINUSE, (), FAILURE, "by a process that cannot be seen", "another one."),
        (
            40000,
            errno.EADDRINUSE,
            (Holder(9, "", listens=False),),
            FAILURE,
            "pid 9 (its command is not known), as the near end of a connection",
            "kill 9",
        ),
        (80, errno.EACCES, (), FAILURE, "below 1024", "give another one."),
        (29500, errno.EADDRNOTAVAIL, (), FAILURE, "(EADDRNOTAVAIL)", "give another one."),
    ],
)
def test_the_port_of_the_store(
    port: int,
    refused: int,
    holders: tuple[Holder, ...],
    verdict: Verdict,
    found: str,
    remedy: str,
) -> None:
    look = partial(check_port, port, "--master-port", refused, holders, PORTS)
    expect(look, verdict, found, remedy)


def test_a_port_of_the_environment_is_named_by_its_variable() -> None:
    look = partial(check_port, 29500, "MASTER_PORT", errno.EADDRINUSE, [TRAINING], None)
    expect(look, FAILURE, "MASTER_PORT is in use", "Give another MASTER_PORT, or unset it")


@pytest.mark.parametrize(
    ("ports", "verdict", "found"),
    [
        (PORTS, OK, "28,032 of 28,232 in 32768-60999, 200 in use"),
        (replace(PORTS, in_use=None), OK, "28,232 in 32768-60999 (how many are in use is not"),
        (replace(PORTS, in_use=28_000), WARNING, "232 of 28,232 in 32768-60999, 28,000 in use"),
        (replace(PORTS, in_use=28_200), FAILURE, "4 ranks take about 72"),
        (Ports(40000, 40009, 0), FAILURE, "10 of 10 in 40000-40009"),
        (Ports(40000, 40009, None), FAILURE, "10 in 40000-40009"),
    ],
)
def test_ports_that_are_left(ports: Ports, verdict: Verdict, found: str) -> None:
    remedy = "" if verdict is OK else "net.ipv4.ip_local_port_range='32768 60999'"
    expect(partial(check_ports, ports, 4), verdict, found, remedy)


def test_the_loopback() -> None:
    expect(partial(check_loopback, ""), OK, "works")
    expect(partial(check_loopback, "timed out"), FAILURE, "127.0.0.1: timed out", "ip addr show lo")


OWN = ("127.0.0.1", "10.0.0.7")


@pytest.mark.parametrize(
    ("lookup", "several_hosts", "verdict", "found", "remedy"),
    [
        (Lookup("box", ("10.0.0.7",)), True, OK, "box resolves to 10.0.0.7", ""),
        (Lookup("box", ("127.0.1.1",)), False, OK, "which will do on one host", ""),
        (Lookup("box", ("::1", "127.0.1.1")), True, WARNING, "connect to themselves", "GLOO_SOCK"),
        (Lookup("box", error="Name or service not known"), False, WARNING, "box does not", "/etc/"),
        (Lookup("box", ("10.9.9.9",)), False, WARNING, "no address of this host", "GLOO_SOCKET"),
        (
            Lookup("box", ("10.0.0.7",), took_s=4.4),
            False,
            WARNING,
            "after 4 s",
            "Add it to /etc/hosts: 10.0.0.7 box",
        ),
    ],
)
def test_the_name_of_this_host(
    lookup: Lookup, several_hosts: bool, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_host_name, lookup, OWN, several_hosts), verdict, found, remedy)


def test_where_the_interfaces_are_not_known_no_address_is_called_foreign() -> None:
    elsewhere = Lookup("box", ("10.9.9.9",))
    assert check_host_name(elsewhere, (), False).verdict is OK
    assert check_master_addr(elsewhere, ()).verdict is OK


@pytest.mark.parametrize(
    ("lookup", "verdict", "found", "remedy"),
    [
        (None, OK, "not set: %ddp_init uses 127.0.0.1", ""),
        (Lookup("127.0.0.1", ("127.0.0.1",)), OK, "127.0.0.1, which is this host", ""),
        (Lookup("box", ("10.0.0.7",)), OK, "box resolves to 10.0.0.7, which is this host", ""),
        (Lookup("head", ("10.0.0.9",)), WARNING, "which is another host", "MASTER_ADDR=127.0.0.1"),
        (Lookup("haed", error="not known"), FAILURE, "haed does not resolve (not known)", "Give"),
    ],
)
def test_the_address_of_the_store(
    lookup: Lookup | None, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_master_addr, lookup, OWN), verdict, found, remedy)


INTERFACES = {
    "docker0": Interface(False, ("172.17.0.1",)),
    "eth0": Interface(True, ("10.0.0.7",)),
    "eth1": Interface(True, ()),
    "lo": Interface(True, ("127.0.0.1",)),
}


@pytest.mark.parametrize(
    ("variable", "value", "verdict", "found"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0,lo", OK, "eth0,lo"),
        ("GLOO_SOCKET_IFNAME", "eth9", FAILURE, "there is no interface 'eth9'"),
        ("GLOO_SOCKET_IFNAME", "lo, eth0", FAILURE, "there is no interface ' eth0'"),
        ("GLOO_SOCKET_IFNAME", "^docker", FAILURE, "^ and = are NCCL's way of writing"),
        ("GLOO_SOCKET_IFNAME", "docker0", FAILURE, "docker0 is down"),
        ("GLOO_SOCKET_IFNAME", "eth1", FAILURE, "eth1 has no address"),
        ("TP_SOCKET_IFNAME", "eth0", OK, "eth0"),
        ("TP_SOCKET_IFNAME", "eth0,lo", FAILURE, "there is no interface 'eth0,lo'"),
        ("NCCL_SOCKET_IFNAME", "eth", OK, "eth"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", OK, "^docker,lo"),
        ("NCCL_SOCKET_IFNAME", "=eth", FAILURE, "=eth: no interface matches"),
        ("NCCL_SOCKET_IFNAME", "docker", FAILURE, "docker0 is down"),
        ("NCCL_SOCKET_IFNAME", "ib", FAILURE, "no interface matches"),
    ],
)
def test_interfaces_that_variables_name(
    variable: str, value: str, verdict: Verdict, found: str
) -> None:
    remedy = "" if verdict is OK else f"Unset {variable}, or name one of: eth0, lo"
    expect(partial(check_interfaces, {variable: value}, INTERFACES, True), verdict, found, remedy)


def test_no_variable_names_an_interface() -> None:
    look = partial(check_interfaces, {"GLOO_SOCKET_IFNAME": ""}, INTERFACES, False)
    expect(look, OK, "eth0, lo up; no variable chooses one")


def test_a_variable_of_nccl_only_warns_where_nccl_is_not_used() -> None:
    look = partial(check_interfaces, {"NCCL_SOCKET_IFNAME": "ib"}, INTERFACES, False)
    expect(look, WARNING, "ib: no interface matches (read by NCCL alone)", "Unset NCCL_SOCKET")


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("eth", ("eth0", "eth1")),
        ("eth0", ("eth0",)),
        ("=eth0", ("eth0",)),
        ("=eth", ()),
        ("eth1,lo", ("eth1", "lo")),
        ("=lo,eth0", ("eth0", "lo")),
        ("eth0:7000", ("eth0",)),
        ("^docker", ("eth0", "eth1", "lo")),
        ("^docker,lo", ("eth0", "eth1")),
        ("^=docker", ("docker0", "eth0", "eth1", "lo")),
        ("^=docker0,eth1", ("eth0", "lo")),
        ("^", ("docker0", "eth0", "eth1", "lo")),
    ],
)
def test_nccls_way_of_writing_interfaces(value: str, chosen: tuple[str, ...]) -> None:
    assert nccl_interfaces(value, INTERFACES) == chosen


# --------------------------------------------------------------------------- software

TORCH: Mapping[str, Any] = {
    "python": "3.12.1",
    "torch": "2.7.0+cu126",
    "torch_error": "",
    "ipyparallel": "9.0.1",
    "ipykernel": "6.30.0",
    "distributed": True,
    "gloo": True,
    "nccl": True,
    "nccl_version": "2.26.2",
    "cuda_build": "12.6",
    "cuda_driver": "560.35.03",
    "devices": 2,
    "cuda_error": "",
    "environment": {},
}
CPU_TORCH = {**TORCH, "torch": "2.7.0+cpu", "nccl": False, "nccl_version": "", "cuda_build": ""}


@pytest.mark.parametrize(
    ("distribution", "version", "verdict", "found", "remedy"),
    [
        ("python", "3.14.0b2", OK, "3.14.0b2", ""),
        ("python", "3.10.14", FAILURE, "3.10.14 is older than 3.11", "Python 3.11 or newer"),
        ("ipyparallel", "9.2.0", OK, "9.2.0", ""),
        ("ipyparallel", "8.8.0", FAILURE, "older than 9.0", '-m pip install "ipyparallel>=9.0"'),
        ("ipykernel", "", FAILURE, "not installed", '-m pip install "ipykernel>=6.29"'),
        ("torch", "2.6.0a0+git1", OK, "2.6.0a0", ""),
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
        (TORCH, OK, "2.7.0+cu126, built for CUDA 12.6, driver 560.35.03", ""),
        ({**CPU_TORCH, "cuda_driver": ""}, OK, "2.7.0+cpu, built without CUDA", ""),
        ({"torch_error": "No module named 'torch'"}, FAILURE, "No module named", "pip install"),
        ({**TORCH, "torch": "2.4.1"}, FAILURE, "2.4.1 is older than 2.6", '"torch>=2.6"'),
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
        (CPU_TORCH, "auto", True, WARNING, "wants both", "--backend gloo"),
    ],
)
def test_backends(
    torch: Mapping[str, Any],
    backend: str,
    on_gpus: bool,
    verdict: Verdict,
    found: str,
    remedy: str,
) -> None:
    expect(partial(check_backend, torch, backend, on_gpus), verdict, found, remedy)


def ranks(number: int, **odd: Any) -> dict[int, dict[str, Any]]:
    """Facts of `number` ranks that agree; the last has `odd` instead."""
    made = {
        rank: {**TORCH, "environment": {"RANK": str(rank), "WORLD_SIZE": str(number)}}
        for rank in range(number)
    }
    made[number - 1].update(odd)
    return made


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


def test_the_odd_ranks_are_named_with_what_they_have() -> None:
    found = verdicts(check_ranks(ranks(4, torch="2.6.0", cuda_driver="")))["versions on ranks"]
    assert found == (
        FAILURE,
        "torch: rank 3 has 2.6.0, ranks 0-2 have 2.7.0+cu126; "
        "the CUDA driver: rank 3 has none, ranks 0-2 have 560.35.03",
    )


def test_of_two_ranks_that_differ_none_is_called_odd() -> None:
    found = verdicts(check_ranks(ranks(2, python="3.11.1")))["versions on ranks"]
    assert found == (FAILURE, "Python: rank 0 has 3.12.1, rank 1 has 3.11.1")


def test_a_rank_with_another_number_is_a_failure() -> None:
    found = verdicts(check_ranks(ranks(2, environment={"RANK": "0", "WORLD_SIZE": "2"})))
    verdict, said = found["RANK on ranks"]
    assert verdict is FAILURE
    assert said.startswith("RANK is 0 on rank 1: a group built from the environment would wait")
    unset = verdicts(check_ranks(ranks(1, environment={})))["RANK on ranks"]
    assert unset[1].startswith("RANK is unset on rank 0")


@pytest.mark.parametrize(
    ("own", "verdict", "found"),
    [
        ({"MASTER_PORT": "1"}, FAILURE, "MASTER_PORT: rank 2 has 1, ranks 0-1 have none"),
        ({"NCCL_P2P_DISABLE": "1"}, WARNING, "NCCL_P2P_DISABLE: rank 2 has 1, ranks 0-1 have none"),
        ({"CUDA_VISIBLE_DEVICES": "2", "LOCAL_RANK": "2"}, OK, "ranks 0-2: all the same"),
    ],
)
def test_variables_that_differ_between_ranks(
    own: Mapping[str, str], verdict: Verdict, found: str
) -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "3", **own}
    checks = verdicts(check_ranks(ranks(3, environment=environment)))
    assert checks["variables on ranks"] == (verdict, found)


@pytest.mark.parametrize(
    ("files", "verdict", "found", "remedy"),
    [
        (("train", "test", "model"), OK, "no file here hides a module", ""),
        (("queue", "train"), WARNING, "queue in this folder may be", "mv queue.py my_queue.py"),
        (("torch", "queue"), FAILURE, "torch in this folder is", "mv torch.py my_torch.py"),
    ],
)
def test_files_that_hide_modules(
    files: tuple[str, ...], verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_shadowing, files, ("torch", "numpy")), verdict, found, remedy)


# --------------------------------------------------------------------------- GPUs

GPUS = (
    Gpu("0", "GPU-aa11", "NVIDIA A", GIB, 80 * GIB),
    Gpu("1", "GPU-bb22", "NVIDIA A", 0, 80 * GIB),
)


@pytest.mark.parametrize(
    ("value", "gpus", "usable", "verdict", "found"),
    [
        (None, GPUS, 2, OK, "not set"),
        ("0,1", GPUS, 2, OK, "0,1"),
        ("GPU-bb", GPUS, 1, OK, "GPU-bb"),
        ("MIG-1234", GPUS, 1, OK, "MIG-1234"),
        ("", GPUS, 0, OK, "'' hides all GPUs"),
        ("-1", GPUS, 0, OK, "'-1' hides all GPUs"),
        ("0,0", GPUS, 0, FAILURE, "names GPU 0 twice: CUDA then has none"),
        ("1,GPU-bb22", GPUS, 0, FAILURE, "names GPU 1 twice"),
        ("7,7", (), 0, FAILURE, "names GPU 7 twice"),
        ("0,5", GPUS, 1, FAILURE, "names GPU 5, but there is: 0, 1; CUDA drops it"),
        ("0", (), 0, FAILURE, "names GPU 0, but there is: none"),
        ("0", (), 1, OK, "0"),  # a container without nvidia-smi
        ("0", (), None, OK, "0"),
    ],
)
def test_gpus_that_are_made_visible(
    value: str | None, gpus: tuple[Gpu, ...], usable: int | None, verdict: Verdict, found: str
) -> None:
    remedy = "" if verdict is OK else "Name each GPU once, of those there are"
    expect(partial(check_visible_devices, value, gpus, usable), verdict, found, remedy)


TOO_OLD = {**TORCH, "devices": 0, "cuda_error": "RuntimeError: driver too old"}


@pytest.mark.parametrize(
    ("world_size", "backend", "pool", "torch", "verdict", "found", "remedy"),
    [
        (4, "auto", (), CPU_TORCH, OK, "4 ranks on CPUs with gloo: no GPU is visible", ""),
        (4, "auto", ("0",), TORCH, OK, "4 ranks on CPUs with gloo: there is 1 GPU", ""),
        (4, "auto", ("0", "1"), CPU_TORCH, OK, "4 ranks on CPUs with gloo: there are 2 GPUs", ""),
        (2, "auto", ("0", "3"), TORCH, OK, "rank 0 on GPU 0, rank 1 on GPU 3; cpu:gloo,cuda", ""),
        (1, "nccl", ("0",), {}, OK, "rank 0 on GPU 0; nccl", ""),
        (2, "nccl", (), CPU_TORCH, FAILURE, "no GPU is visible", "Use gloo: %ddp_init --world-siz"),
        (
            4,
            "nccl",
            ("0", "1"),
            TORCH,
            FAILURE,
            "nccl needs a GPU per rank: 4 ranks, 2 GPUs",
            "%ddp_init --world-size 2 --backend nccl, or share GPUs with gloo: "
            "%ddp_init --world-size 4 --device cuda",
        ),
        (1, "auto", ("0",), CPU_TORCH, FAILURE, "2.7.0+cpu was built without CUDA", "--device cpu"),
        (1, "auto", ("0",), TOO_OLD, FAILURE, "(RuntimeError: driver too old)", "--device cpu"),
        (1, "auto", ("0",), {**TORCH, "devices": 0}, FAILURE, "it finds none", "--device cpu"),
    ],
)
def test_which_rank_gets_which_device(
    world_size: int,
    backend: str,
    pool: tuple[str, ...],
    torch: Mapping[str, Any],
    verdict: Verdict,
    found: str,
    remedy: str,
) -> None:
    expect(partial(check_devices, world_size, backend, pool, torch), verdict, found, remedy)


def test_gpus_with_room_and_without() -> None:
    assert check_gpus((), {}) == ()
    expect(partial(check_gpus, GPUS, {}), OK, "GPU 0, 1: there is room")
    full = (GPUS[0], replace(GPUS[1], used_bytes=79 * GIB))
    remedy = "leave them out: %ddp_init --gpus 0"
    expect(partial(check_gpus, full, {}), WARNING, "GPU 1 nearly full: 79 GiB of 80 GiB", remedy)


def test_gpus_of_several_kinds_may_be_numbered_in_two_ways() -> None:
    mixed = (GPUS[0], replace(GPUS[1], name="NVIDIA B"))
    _, numbers = check_gpus(mixed, {})
    expect(lambda: numbers, WARNING, "NVIDIA A, NVIDIA B", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
    assert len(check_gpus(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})) == 1


# --------------------------------------------------------------------------- machine


@pytest.mark.parametrize(
    ("available", "limit", "verdict", "found", "remedy"),
    [
        (8 * GIB, None, OK, "8 GiB available", ""),
        (8 * GIB, Limit(64 * GIB, 0), OK, "8 GiB available", ""),
        (8 * GIB, Limit(4 * GIB, GIB), OK, "3 GiB left of the container's 4 GiB", ""),
        (GIB, None, WARNING, "1 GiB available; 4 ranks want about 1.2 GiB", "fewer ranks: -n 3"),
        (8 * GIB, Limit(GIB, 2 * GIB), FAILURE, "0 B left of the container's 1 GiB", "-n 1"),
        (300 * MIB, None, FAILURE, "300 MiB available; 4 ranks want", "fewer ranks: -n 1"),
    ],
)
def test_memory(
    available: int, limit: Limit | None, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_memory, 4, available, limit), verdict, found, remedy)


@pytest.mark.parametrize(
    ("soft", "verdict", "found"),
    [
        (None, OK, "no limit"),
        (128 * GIB, OK, "128 GiB"),
        (2 * GIB, WARNING, "limited to 2 GiB a process (ulimit -v)"),
        (GIB, FAILURE, "too little for torch and its threads"),
    ],
)
def test_address_space(soft: int | None, verdict: Verdict, found: str) -> None:
    remedy = "" if verdict is OK else "ulimit -v unlimited"
    expect(partial(check_address_space, soft), verdict, found, remedy)


@pytest.mark.parametrize(
    ("size", "nccl_wanted", "verdict", "found", "remedy"),
    [
        ((16 * GIB, 15 * GIB), True, OK, "15 GiB free of 16 GiB", ""),
        ((64 * MIB, 64 * MIB), False, WARNING, "64 MiB free of 64 MiB: too little", "--shm-size"),
        ((16 * GIB, MIB), False, WARNING, "will die of it", "ls /dev/shm"),
        ((16 * GIB, MIB), True, FAILURE, "NCCL needs more", "ls /dev/shm"),
        (None, False, WARNING, "missing", "mount -t tmpfs"),
    ],
)
def test_shared_memory(
    size: tuple[int, int] | None, nccl_wanted: bool, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_shared_memory, size, nccl_wanted), verdict, found, remedy)


@pytest.mark.parametrize(
    ("soft", "hard", "world_size", "verdict", "found", "remedy"),
    [
        (None, None, 256, OK, "no limit", ""),
        (1024, 4096, 4, OK, "1,024 a process (ulimit -n)", ""),
        (256, None, 4, WARNING, "data loading takes more", "ulimit -n 65536"),
        (1024, 4096, 256, FAILURE, "256 ranks take up to 1,600", "ulimit -n 4096"),
        (1024, 1024, 256, FAILURE, "1,024 a process", "Ask the administrator"),
    ],
)
def test_open_files(
    soft: int | None,
    hard: int | None,
    world_size: int,
    verdict: Verdict,
    found: str,
    remedy: str,
) -> None:
    expect(partial(check_open_files, soft, hard, world_size), verdict, found, remedy)


@pytest.mark.parametrize(
    ("soft", "used", "limit", "verdict", "found", "remedy"),
    [
        (None, 0, None, OK, "no limit", ""),
        (4096, 300, None, OK, "room for 3,796 threads of 4,096 (ulimit -u)", ""),
        (500, 300, None, WARNING, "4 ranks take about 108", "ulimit -u unlimited"),
        (400, 500, None, FAILURE, "room for 0 threads of 400", "ulimit -u unlimited"),
        (4096, 300, Limit(100, 40), FAILURE, "60 threads of the container's 100", "--pids-limit"),
    ],
)
def test_processes(
    soft: int | None,
    used: int,
    limit: Limit | None,
    verdict: Verdict,
    found: str,
    remedy: str,
) -> None:
    expect(partial(check_processes, 4, 1, soft, used, limit), verdict, found, remedy)


@pytest.mark.parametrize(
    ("cores", "asked", "omp", "verdict", "found", "remedy"),
    [
        (16, 0, None, OK, "16 for 4 ranks", ""),
        (16, 4, "8", OK, "16 for 4 ranks", ""),
        (2, 0, None, WARNING, "4 ranks share 2: fine for learning", "For timings: -n 2"),
        (16, 8, None, WARNING, "4 ranks × 8 threads (--threads-per-rank) on 16", "4 threads a"),
        (16, 0, "16", WARNING, "4 ranks × 16 threads (OMP_NUM_THREADS) on 16", "4 threads a rank"),
        (16, 0, "many", WARNING, "OMP_NUM_THREADS=many is not a number", "OMP_NUM_THREADS=4"),
    ],
)
def test_cores(
    cores: int, asked: int, omp: str | None, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_cores, cores, 4, asked, omp), verdict, found, remedy)


@pytest.mark.parametrize(("text", "threads"), [(None, 0), ("4", 4), ("4,2", 4), ("x", 0), ("", 0)])
def test_threads_as_openmp_writes_them(text: str | None, threads: int) -> None:
    assert threads_of(text) == threads


YEAR_S = 365.25 * 86400


@pytest.mark.parametrize(
    ("now_s", "readings", "verdict", "found", "remedy"),
    [
        (56 * YEAR_S, (1.0, 1.0, 2.0), OK, "2026-01-01 00:00 UTC", ""),
        (0.0, (1.0, 2.0), WARNING, "it says 1970-01-01 00:00 UTC, but the package's", "set-ntp"),
        (200 * YEAR_S, (1.0, 2.0), WARNING, "it says 2170", "set-ntp true"),
        (56 * YEAR_S, (2.0, 1.0), FAILURE, "the monotonic clock goes back", "clock source"),
    ],
)
def test_clocks(
    now_s: float, readings: tuple[float, ...], verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_clock, now_s, 55 * YEAR_S, readings), verdict, found, remedy)


TMP = Folder("/tmp", "", 50 * GIB, 100_000)


@pytest.mark.parametrize(
    ("folder", "verdict", "found", "remedy"),
    [
        (TMP, OK, "/tmp, 50 GiB free", ""),
        (replace(TMP, free_files=None), OK, "/tmp, 50 GiB free", ""),
        (replace(TMP, free_bytes=100 * MIB), WARNING, "little for logs", "du -sh /tmp/*"),
        (replace(TMP, free_bytes=MIB), FAILURE, "/tmp, 1 MiB free", "du -sh /tmp/*"),
        (replace(TMP, free_files=3), FAILURE, "no more than 3 files", "du -sh /tmp/*"),
        (replace(TMP, trouble="Read-only file system"), FAILURE, "Read-only", "TMPDIR=/tmp"),
        (replace(TMP, path="/" + 80 * "x"), FAILURE, "115 of 107 bytes", "export TMPDIR=/tmp"),
        (replace(TMP, path="/" + 40 * "ü"), FAILURE, "115 of 107 bytes", "export TMPDIR=/tmp"),
        (replace(TMP, path="/" + 70 * "x"), OK, "50 GiB free", ""),
    ],
)
def test_the_temporary_folder(folder: Folder, verdict: Verdict, found: str, remedy: str) -> None:
    expect(partial(check_temporary_folder, folder, 107), verdict, found, remedy)


def test_the_socket_a_session_makes_is_the_one_whose_length_is_looked_at() -> None:
    from ddp_notebook.session.doctor import machine
    from ddp_notebook.session.setup import FOLDER_PREFIX

    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        path = f"/{Path(folder).name}/beacon.sock"
    assert len(path) == len(machine._SOCKET_NAME)
    assert path.startswith(machine._SOCKET_NAME[: len(FOLDER_PREFIX) + 1])


def test_how_ranks_will_start() -> None:
    expect(partial(check_fork, True, "linux"), OK, "they are forked")
    expect(partial(check_fork, False, "darwin"), OK, "macOS forbids forking")


def test_ranks_of_an_earlier_job() -> None:
    expect(partial(check_earlier_ranks, ()), OK, "none is left over")
    left = (EarlierRank(71, "0", "python train.py"), EarlierRank(72, "1", "python train.py"))
    found = "ranks 0-1 of a job whose launcher is gone still run, such as pid 71 (python train.py)"
    expect(partial(check_earlier_ranks, left), WARNING, found, "kill 71 72")
    expect(partial(check_earlier_ranks, left[:1]), WARNING, "rank 0 of a job", "kill 71")


# --------------------------------------------------------------------------- containers


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


def test_the_tightest_limit_of_a_cgroup_and_those_around_it_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/user/job\n")
    write(tmp_path / "fs/user/job", memory__max="max\n", memory__current="7\n", pids__max="max\n")
    write(
        tmp_path / "fs/user",
        memory__max="1000\n",
        memory__current="900\n",
        memory__stat="anon 400\ninactive_file 500\n",
        pids__max="50\n",
        pids__current="20\n",
    )
    assert memory_limit(tmp_path / "fs", membership) == Limit(1000, 400)
    assert process_limit(tmp_path / "fs", membership) == Limit(50, 20)
    assert Limit(50, 70).left == 0


def test_limits_of_version_1_are_read_too(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("8:pids:/\n4:cpu,memory:/docker/ab\n0::/\n")
    write(
        tmp_path / "fs/memory",  # in a container its own folder is the mount
        memory__limit_in_bytes="2000\n",
        memory__usage_in_bytes="1500\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 300\n",
    )
    write(tmp_path / "fs/pids", pids__max="64\n", pids__current="60\n")
    assert memory_limit(tmp_path / "fs", membership) == Limit(2000, 1200)
    assert process_limit(tmp_path / "fs", membership) == Limit(64, 60)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert memory_limit(tmp_path, membership) is None
    membership.write_text("4:memory:/../../x\n")
    files = {"memory__limit_in_bytes": f"{2**63 - 4096}\n", "memory__usage_in_bytes": "1\n"}
    write(tmp_path / "memory", **files)
    assert memory_limit(tmp_path, membership) is None
    assert process_limit(tmp_path, membership) is None


# --------------------------------------------------------------------------- facts


def test_a_port_that_is_listened_on_is_in_use_by_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert facts.try_port(port) == errno.EADDRINUSE
        holders = facts.holders_of(port, facts.connections())
    assert [(holder.pid, holder.listens) for holder in holders] == [(os.getpid(), True)]
    assert holders[0].command
    assert facts.try_port(port) == 0


def test_a_listener_is_the_holder_and_not_those_connected_to_it() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
    ):
        sockets = facts.connections()
        port, other = listener.getsockname()[1], near.getsockname()[1]
        assert [holder.listens for holder in facts.holders_of(port, sockets)] == [True]
        assert [holder.listens for holder in facts.holders_of(other, sockets)] == [False]


def test_without_the_right_to_see_sockets_nothing_is_claimed(tmp_path: Path) -> None:
    assert facts.holders_of(1, None) == ()
    ports = facts.local_ports(None)
    assert ports is None or ports.in_use is None


def test_names_are_looked_up() -> None:
    assert "127.0.0.1" in facts.look_up("127.0.0.1").addresses
    assert facts.look_up("no-such-host.invalid", timeout_s=30).error
    assert facts.look_up("." * 300, timeout_s=30).error
    assert facts.look_up("localhost", timeout_s=0).error in ("", "no answer within 0 s")


def test_this_machine_has_a_loopback_that_works() -> None:
    assert facts.try_loopback() == ""
    assert any("127.0.0.1" in each.addresses for each in facts.interfaces().values())


def test_a_folder_that_cannot_be_written_to_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts.temporary_folder().trouble == ""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert facts.temporary_folder().trouble == "No such file or directory"


def test_modules_of_a_folder_are_files_and_packages(tmp_path: Path) -> None:
    write(tmp_path, torch__py="", notes__txt="")
    write(tmp_path / "model", __init__py="")
    (tmp_path / "model" / "__init__.py").write_text("")
    (tmp_path / "data").mkdir()
    assert sorted(facts.modules_of(tmp_path)) == ["model", "torch"]
    assert list(facts.modules_of(tmp_path / "absent")) == []


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi: there is no GPU where this runs."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\necho '0, GPU-aa, NVIDIA A, 523, 81559'\necho '1, GPU-bb, NVIDIA A, [N/A], 1'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    first, second = facts.gpus()
    assert first == Gpu("0", "GPU-aa", "NVIDIA A", 523 * MIB, 81559 * MIB)
    assert (second.index, second.used_bytes) == ("1", 0)
    fake.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert facts.gpus() == ()


def test_limits_of_this_process_are_read() -> None:
    soft, hard = facts.resource_limit("RLIMIT_NOFILE")
    assert soft is None or hard is None or 0 < soft <= hard
    assert facts.resource_limit("RLIMIT_NONSENSE") == (None, None)


def test_torch_is_asked_in_a_python_of_its_own() -> None:
    found = facts.torch_facts()
    assert found["torch_error"] == ""
    assert found["torch"] == gather()["torch"]
    assert found["distributed"] and found["gloo"]


def test_a_python_that_is_not_done_in_time_or_fails_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert facts.torch_facts(0.01) == {"torch_error": "importing it takes longer than 0 s"}
    monkeypatch.setattr(facts, "_ASK_TORCH", "raise SystemExit('libcudart is missing')")
    error = facts.torch_facts()["torch_error"]
    assert error == "a Python that imports it ends with 1: libcudart is missing"
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert facts.torch_facts()["torch_error"].startswith("/no/such/python cannot be started")


def test_a_rank_tells_what_it_runs_as_json() -> None:
    found = gather()
    assert json.loads(json.dumps(found)) == found
    assert found["pid"] == os.getpid()
    assert found["devices"] is None, "CUDA is not touched on a rank"


def test_a_rank_without_torch_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    shown = subprocess.run(
        [sys.executable, "-c", "from ddp_notebook.agent.facts import gather; print(gather())"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert "'torch' is not a package" in shown.stdout


def test_only_variables_of_distributed_training_leave_a_rank() -> None:
    environment = {"RANK": "0", "HOME": "/root", "NCCL_DEBUG": "INFO", "AWS_SECRET": "x"}
    assert excerpt(environment) == {"NCCL_DEBUG": "INFO", "RANK": "0"}


def test_the_drivers_version_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) == ""
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert driver_version(file) == "550.54.15"


# --------------------------------------------------------------------------- all of them


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No Python is started to be asked about torch, and the environment is bare."""
    monkeypatch.setattr(facts, "torch_facts", lambda: CPU_TORCH)
    for name in ("CUDA_VISIBLE_DEVICES", "MASTER_PORT", *excerpt(os.environ)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def named(report: DoctorReport, name: str) -> Check:
    (found,) = [check for check in report.checks if check.name == name]
    return found


def test_a_healthy_machine_has_no_failure(quick: pytest.MonkeyPatch) -> None:
    report = examine(1)
    assert report.ok, str(report)
    assert report.world_size == 1
    assert len({check.name for check in report.checks}) == len(report.checks) > 20


def test_the_environment_is_looked_at(quick: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        quick.setenv("MASTER_PORT", str(port))
        quick.setenv("GLOO_SOCKET_IFNAME", "nope0")
        report = examine(1)
    assert not report.ok
    assert f"MASTER_PORT is in use by pid {os.getpid()}" in named(report, f"port {port}").found
    assert named(report, "GLOO_SOCKET_IFNAME").verdict is FAILURE
    assert named(report, "rendezvous variables").verdict is WARNING


def test_a_port_that_is_asked_for_goes_before_that_of_the_environment(
    quick: pytest.MonkeyPatch,
) -> None:
    quick.setenv("MASTER_PORT", "29500")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = named(examine(1, master_port=port), f"port {port}").found
    assert found.startswith("--master-port is in use")


def test_nccl_without_a_gpu_is_a_failure(quick: pytest.MonkeyPatch) -> None:
    quick.setenv("CUDA_VISIBLE_DEVICES", "")
    report = examine(2, backend="nccl")
    assert named(report, "devices").verdict is FAILURE
    assert named(report, "backend nccl").verdict is FAILURE


def test_ranks_that_run_are_asked_instead_of_a_fresh_python(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(facts, "torch_facts", lambda: pytest.fail("a Python was started"))
    report = examine(2, rank_facts=ranks(2, torch="2.6.1"))
    assert named(report, "versions on ranks").verdict is FAILURE
    assert named(report, "torch").found.startswith("2.7.0+cu126")


def test_what_the_system_does_not_show_is_no_reason_to_stop(quick: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    quick.setattr(facts, "available_bytes", refuse)
    quick.setattr(containers, "process_limit", refuse)
    report = examine(1)
    for name in ("memory", "processes"):
        expect(lambda name=name: named(report, name), WARNING, "could not be", "by hand")


def test_torch_that_is_missing_is_said_once(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(facts, "torch_facts", lambda: {"torch_error": "No module named 'torch'"})
    report = examine(1)
    assert named(report, "torch").verdict is FAILURE
    assert not [check for check in report.checks if check.name.startswith("backend")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "World size 0 makes no sense: .* Type: %ddp_doctor --world-size 4"),
        ({"world_size": 1, "backend": "mpi"}, "--backend is one of auto, gloo, nccl, not 'mpi'"),
        ({"world_size": 1, "master_port": 70000}, "--master-port 70000 is not a port"),
        ({"world_size": 1, "threads": -1}, "--threads-per-rank must be 1 or more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: Mapping[str, Any], message: str, quick: pytest.MonkeyPatch
) -> None:
    quick.setattr(facts, "torch_facts", lambda: pytest.fail("a Python was started"))
    with pytest.raises(UsageMistake, match=message):
        examine(**arguments)


def test_the_doctor_does_not_import_torch() -> None:
    code = (
        "import sys; from ddp_notebook.session.doctor import examine; examine(1)\n"
        "print('torch' in sys.modules, 'ipyparallel' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]


# --------------------------------------------------------------------------- the report

REPORT = DoctorReport(
    (
        Check.ok("Python", "3.12.1"),
        Check.failure("port 29500", "in use by pid 8 (\x1b[31mpython\x1b[0m <x> & y)", "kill 8"),
        Check.warning("cores", "4 ranks\nshare 2", "For timings: -n 2"),
        Check.ok("torch", "2.7.0"),
    ),
    world_size=4,
)
FINE = DoctorReport((REPORT.checks[0],), world_size=1, backend="gloo")


def test_the_worst_verdict_is_that_of_the_report() -> None:
    assert (REPORT.worst, REPORT.ok, REPORT.count(OK)) == (FAILURE, False, 2)
    assert (FINE.worst, FINE.ok) == (OK, True)
    assert DoctorReport((REPORT.checks[2],)).ok, "a warning is no failure"
    assert DoctorReport(()).worst is OK


def test_the_headline_says_whether_ddp_can_work() -> None:
    assert REPORT.headline == (
        "DDP cannot work here as it is (4 ranks, backend auto): 1 failure, 1 warning in 4 checks"
    )
    assert FINE.headline == "DDP can work here (1 rank, backend gloo): 1 check, all ok"


def test_a_report_is_json() -> None:
    wire = json.loads(str(REPORT))
    assert wire == REPORT.to_json()
    assert (wire["ok"], wire["worst"], wire["world_size"]) == (False, "failure", 4)
    assert wire["checks"][2] == {
        "name": "cores",
        "verdict": "warning",
        "found": "4 ranks\nshare 2",
        "remedy": "For timings: -n 2",
    }


def test_the_text_is_exactly_this() -> None:
    assert view.text(REPORT) == dedent(
        """\
        DDP cannot work here as it is (4 ranks, backend auto): 1 failure, 1 warning in 4 checks

        verdict    check       found
        ─────────  ──────────  ────────────────────────────────
        ✗ failure  port 29500  in use by pid 8 (python <x> & y)
                               → kill 8
        ! warning  cores       4 ranks share 2
                               → For timings: -n 2
        ✓ ok       Python      3.12.1
        ✓ ok       torch       2.7.0"""
    )
    assert view.text(DoctorReport(())) == "DDP can work here: 0 checks, all ok"


def test_long_words_are_folded_and_stay_within_the_width() -> None:
    long = Check.failure("port", "in use by " + "python " * 30, "type --this-long-option " * 9)
    lines = view.text(DoctorReport((long,))).splitlines()
    assert max(map(len, lines)) <= 120
    assert not [line for line in lines if line.endswith("-")], "no option is cut"
    assert sum("→" in line for line in lines) == 1


class Seen(HTMLParser):
    """The tags of a page, whether they are closed, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_says_what_the_text_says_and_closes_what_it_opens() -> None:
    page = Seen(view.html(REPORT))
    assert not page.open
    assert page.words == [
        REPORT.headline,
        *("verdict", "check", "found"),
        *("✗ failure", "port 29500", "in use by pid 8 (python <x> & y)", "→ kill 8"),
        *("! warning", "cores", "4 ranks share 2", "→ For timings: -n 2"),
        *("✓ ok", "Python", "3.12.1"),
        *("✓ ok", "torch", "2.7.0"),
    ]


def test_every_value_on_the_page_is_escaped() -> None:
    evil = '<script>alert(1)</script> & "x" \''
    page = view.html(DoctorReport((Check.warning(evil, evil, evil),), 1, evil))
    assert "script" not in Seen(page).tags
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp;") == 4


def test_a_page_needs_no_style_sheet_and_no_theme() -> None:
    page = view.html(REPORT)
    assert "<style" not in page
    assert "var(" not in page
    assert Seen(view.html(DoctorReport(()))).tags == ["div", "div"]


def test_the_colour_of_a_verdict_only_repeats_its_word() -> None:
    for check in REPORT.checks:
        words = Seen(view.html(DoctorReport((check,)))).words
        assert any(check.verdict.value in word for word in words[1:])


# --------------------------------------------------------------------------- in a shell


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in excerpt(os.environ)}
    return subprocess.run(
        [sys.executable, "-m", "ddp_notebook", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**kept, "PYTHONIOENCODING": "utf-8", **environment},
    )


def test_in_a_shell_the_text_is_printed_and_a_failure_is_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        shown = run_script("-n", "1", "--master-port", str(port))
    assert shown.returncode == 1
    assert shown.stdout.startswith("DDP cannot work here as it is (1 rank, backend auto): 1 fail")
    assert f"--master-port is in use by pid {os.getpid()}" in shown.stdout
    assert shown.stderr == ""


def test_in_a_shell_json_is_printed_and_no_failure_is_exit_code_0() -> None:
    shown = run_script("-n", "1", "--json", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert shown.returncode == 0, shown.stdout
    report = json.loads(shown.stdout)
    assert report["ok"] is True
    assert {"TORCH_DISTRIBUTED_DEBUG"} <= {check["name"] for check in report["checks"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0"), "Type: ddp-notebook doctor --world-size 4"),
        (("--master-port", "70000"), "--master-port 70000 is not a port"),
        (("--backend", "mpi"), "invalid choice: 'mpi'"),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
    ],
)
def test_in_a_shell_wrong_arguments_are_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    shown = run_script(*arguments)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr
