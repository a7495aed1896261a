"""The doctor's checks of variables and of the network, with facts given."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from functools import partial

import pytest
from doctor_cases import FAILURE, OK, WARNING, expect

from ddp_notebook.doctor.checks import (
    Holder,
    Interface,
    Lookup,
    check_host_name,
    check_interfaces,
    check_known_trouble,
    check_master_addr,
    check_port,
    check_rendezvous,
    nccl_interfaces,
    port_of,
)
from ddp_notebook.model.doctor import Verdict

# --------------------------------------------------------------------------- variables


@pytest.mark.parametrize(
    ("environment", "verdict", "found", "remedy"),
    [
        ({"PATH": "/bin"}, OK, "none is set", ""),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            WARNING,
            "left over: RANK=0 WORLD_SIZE=2. %ddp_init sets others for its ranks",
            'unset RANK WORLD_SIZE. In the notebook: import os; os.environ.pop("RANK"), and',
        ),
        ({"LOCAL_RANK": "0"}, WARNING, "left over: LOCAL_RANK=0", "unset LOCAL_RANK. In"),
        (
            {"RANK": "0", "TORCHELASTIC_RUN_ID": "7"},
            WARNING,
            "set by torchrun, which started this process: RANK=0",
            "unset RANK",
        ),
        ({"RANK": "5", "WORLD_SIZE": "2"}, FAILURE, "RANK=5 with WORLD_SIZE=2: ranks are", "unset"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, FAILURE, "ranks are 0 to 1", "unset"),
        ({"RANK": "one"}, FAILURE, "RANK=one is not a number of 0 or more", "unset RANK"),
        ({"RANK": "-1"}, FAILURE, "RANK=-1 is not a number", "unset RANK"),
        ({"WORLD_SIZE": ""}, FAILURE, "WORLD_SIZE= is not a number", "unset WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, FAILURE, "WORLD_SIZE must be at least 1, not 0", "unset"),
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
        ({}, OK, "none known to cause trouble", ""),
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
def test_variables_known_to_make_trouble(
    environment: Mapping[str, str], verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_known_trouble, environment), verdict, found, remedy)


def test_each_variable_that_makes_trouble_has_a_line_of_its_own() -> None:
    checks = check_known_trouble({"NCCL_BLOCKING_WAIT": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert [check.name for check in checks] == ["TORCH_DISTRIBUTED_DEBUG", "NCCL_BLOCKING_WAIT"]


@pytest.mark.parametrize(
    ("text", "port"), [(None, 0), ("29500", 29500), ("70000", 0), ("x", 0), ("", 0), (" 80 ", 80)]
)
def test_a_master_port_that_is_none_is_not_looked_at(text: str | None, port: int) -> None:
    assert port_of({} if text is None else {"MASTER_PORT": text}) == port


# --------------------------------------------------------------------------- network

TRAINING = Holder(812, "python train.py")


@pytest.mark.parametrize(
    ("port", "refused", "holders", "verdict", "found", "remedy"),
    [
        (29500, 0, (), OK, "free", ""),
        (
            29500,
            errno.EADDRINUSE,
            (TRAINING,),
            FAILURE,
            "--master-port is in use by pid 812 (python train.py)",
            "Leave --master-port out (%ddp_init chooses a free port), or give another one. If it "
            "is a job of yours that should be over: kill 812",
        ),
        (
            29500,
            errno.EADDRINUSE,
            (Holder(None, ""),),
            FAILURE,
            "in use by a process of another user",
            "give another one.",
        ),
        (29500, errno.EADDRINUSE, (), FAILURE, "by a process that cannot be ident", "another one."),
        (
            40000,
            errno.EADDRINUSE,
            (Holder(9, ""),),
            FAILURE,
            "pid 9 (its command is not known)",
            "kill 9",
        ),
        (80, errno.EACCES, (), FAILURE, "below 1024", "give another one."),
        (29500, errno.EADDRNOTAVAIL, (), FAILURE, "(EADDRNOTAVAIL)", "give another one."),
    ],
)
def test_the_port_of_the_store(
    port: int, refused: int, holders: tuple[Holder, ...], verdict: Verdict, found: str, remedy: str
) -> None:
    look = partial(check_port, port, "--master-port", refused, holders)
    expect(look, verdict, found, remedy)


def test_a_port_of_the_environment_is_named_by_its_variable() -> None:
    look = partial(check_port, 29500, "MASTER_PORT", errno.EADDRINUSE, [TRAINING])
    expect(look, FAILURE, "MASTER_PORT is in use", "Give another MASTER_PORT, or unset it")


OWN = ("127.0.0.1", "10.0.0.7")


@pytest.mark.parametrize(
    ("lookup", "several_hosts", "verdict", "found", "remedy"),
    [
        (Lookup("box", ("10.0.0.7",)), True, OK, "box resolves to 10.0.0.7", ""),
        (Lookup("box", ("127.0.1.1",)), False, OK, "which is enough on one host", ""),
        (Lookup("box", ("::1", "127.0.1.1")), True, WARNING, "connect to themselves", "GLOO_SOCK"),
        (Lookup("box", error="Name or service not known"), False, WARNING, "box does not", "/etc/"),
        (Lookup("box", ("10.9.9.9",)), False, WARNING, "no address of this host", "GLOO_SOCKET"),
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
        ("GLOO_SOCKET_IFNAME", "^docker", FAILURE, "only NCCL reads ^ and ="),
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
    expect(look, WARNING, "ib: no interface matches (only NCCL reads it)", "Unset NCCL_SOCKET")


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
def test_how_nccl_reads_interfaces(value: str, chosen: tuple[str, ...]) -> None:
    assert nccl_interfaces(value, INTERFACES) == chosen
