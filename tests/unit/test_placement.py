"""Ranks on several hosts: where each is, and how a process is named among hosts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch import host_facts
from ddp_notebook.launch.environment import rank_environment
from ddp_notebook.launch.placement import Hello, HostSpec, Placement, parse_hosts, place
from ddp_notebook.launch.process_ids import host_of, pid_of, process_id
from ddp_notebook.model import Collective, collective_log
from ddp_notebook.session import InitOptions, far_hosts
from ddp_notebook.session.collective_logs import _shifted

MOST_PID = (1 << 22) - 1


@pytest.mark.parametrize("host", [0, 1, 5, 300])
@pytest.mark.parametrize("pid", [1, 4711, MOST_PID])
def test_a_process_is_named_by_host_and_pid(host: int, pid: int) -> None:
    number = process_id(host, pid)
    assert (host_of(number), pid_of(number)) == (host, pid)
    assert host or number == pid, "on the notebook's own machine it is the pid"


def test_hosts_are_read_as_users_write_them() -> None:
    assert parse_hosts("gpu01, me@gpu02:4") == (HostSpec("gpu01"), HostSpec("me@gpu02", 4))
    file = "# of the lab\ngpu01 slots=2\n\ngpu02:3  # the new one\ngpu03 :1\ngpu04\n"
    assert [(h.name, h.ranks) for h in parse_hosts(file)] == [
        ("gpu01", 2),
        ("gpu02", 3),
        ("gpu03", 1),
        ("gpu04", 0),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-oProxyCommand=x", "is no host"),
        ("a;b", "is no host"),
        ("a:x", "is no host"),
        ("a:-1", "is no host"),
        ("a b", "is no host"),
        ("a,b,a:2", "named twice"),
        (" , ", "No host is named"),
        ("# none", "No host is named"),
    ],
)
def test_what_is_no_host_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageMistake, match=said):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("world_size", "hosts", "sizes"),
    [
        (4, "a,b", (2, 2)),
        (5, "a,b,c", (2, 2, 1)),
        (6, "a,b:4", (2, 4)),
        (7, "a:1,b,c", (1, 3, 3)),
        (3, "a:1,b:2", (1, 2)),
    ],
)
def test_ranks_are_placed_in_blocks(world_size: int, hosts: str, sizes: tuple[int, ...]) -> None:
    placement = place(world_size, parse_hosts(hosts))
    assert placement.sizes == sizes and placement.world_size == world_size
    on = [placement.host(rank) for rank in range(world_size)]
    assert on == [h for h, size in enumerate(sizes, 1) for _ in range(size)]
    assert [placement.local(rank) for rank in range(world_size)] == [
        (index, size) for size in sizes for index in range(size)
    ]
    assert [placement.ranks(host) for host in placement.hosts] == [
        tuple(rank for rank in range(world_size) if on[rank] == host) for host in placement.hosts
    ]


@pytest.mark.parametrize(
    ("world_size", "hosts", "fits"), [(1, "a,b", 2), (3, "a:2,b:2", 4), (5, "a:2,b:2", 4)]
)
def test_numbers_that_do_not_fit_are_refused_with_those_that_do(
    world_size: int, hosts: str, fits: int
) -> None:
    with pytest.raises(UsageMistake, match=f"Type: --world-size {fits}$"):
        place(world_size, parse_hosts(hosts))


def test_without_hosts_all_ranks_are_here() -> None:
    placement = place(3, ())
    assert not placement.far and list(placement.hosts) == [0]
    assert [placement.host(rank) for rank in range(3)] == [0, 0, 0]
    assert placement.local(2) == (2, 3) and placement.group(2) == (0, 1)
    assert "GROUP_RANK" not in rank_environment(0, placement, 1, {})


def test_some_ranks_of_several_hosts_count_their_hosts_anew() -> None:
    placement = place(6, parse_hosts("a:2,b:2,c:2"))
    among = placement.among((1, 4, 5))
    assert among == Placement((1, 2), ("a", "c"))
    assert [among.local(index) for index in range(3)] == [(0, 1), (0, 2), (1, 2)]
    assert [among.group(index) for index in range(3)] == [(0, 2), (1, 2), (1, 2)]
    assert place(4, ()).among((1, 3)) == Placement((2,))


def test_more_ranks_than_a_machine_holds_are_refused() -> None:
    with pytest.raises(UsageMistake, match="at most 256 a host"):
        place(600, parse_hosts("a,b"))
    assert InitOptions(world_size=512, hosts=parse_hosts("a,b")).placement.sizes == (256, 256)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init_method": "file"}, "all hosts see"),
        ({"launcher": "process"}, "leave --launcher out"),
        ({"give_up_after_s": 1.0}, "10 or more"),
        ({"world_size": 0}, "is too small"),
    ],
)
def test_options_that_cannot_be_on_other_hosts_are_refused(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageMistake, match=said):
        InitOptions(**{"world_size": 2, "hosts": parse_hosts("a,b"), **options})  # type: ignore[arg-type]


# -- what hosts say --------------------------------------------------------------------------


def hello(**said: object) -> Hello:
    usual = {
        **host_facts.machine(),
        "gpus": (),
        "address": "10.0.0.1",
        "folder": "",
        "current_folder": "",
        "shared_folder": False,
        "clock_offset_ns": 0,
        "limits": "",
    }
    return Hello(**{**usual, **said})  # type: ignore[arg-type]


def test_a_machine_says_all_that_a_hello_needs() -> None:
    assert hello().cores >= 1 and hello().product and asdict(hello())


def test_each_host_gives_its_own_gpus() -> None:
    options = InitOptions(world_size=4, hosts=parse_hosts("a,b"))
    gpus = {1: hello(gpus=("0", "1"), for_gpus=True), 2: hello(gpus=("4", "5"), for_gpus=True)}
    plan = far_hosts._devices(options, options.placement, gpus)
    assert plan.backend == "cpu:gloo,cuda:nccl"
    assert plan.devices == ("cuda:0", "cuda:1") * 2 and plan.gpus == ("0", "1", "4", "5")
    assert plan.environment[3]["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_a_host_without_gpus_has_all_ranks_on_cpus() -> None:
    options = InitOptions(world_size=3, hosts=parse_hosts("a:2,b"))
    unequal = {1: hello(gpus=("0", "1"), for_gpus=True), 2: hello(gpus=())}
    plan = far_hosts._devices(options, options.placement, unequal)
    assert plan.devices == ("cpu",) * 3 and plan.backend == "gloo"
    assert plan.notes == ("No GPU is visible on b: all ranks run on CPUs, with gloo.",)


def test_a_host_whose_ranks_share_a_gpu_has_all_use_gloo() -> None:
    options = InitOptions(world_size=4, hosts=parse_hosts("a,b"))
    unequal = {1: hello(gpus=("0", "1"), for_gpus=True), 2: hello(gpus=("0",), for_gpus=True)}
    plan = far_hosts._devices(options, options.placement, unequal)
    assert plan.backend == "gloo" and plan.gpus == ("0", "1", "0", "0")


def test_a_host_that_lacks_what_was_asked_for_is_named() -> None:
    options = InitOptions(world_size=2, device="cuda", hosts=parse_hosts("a,b"))
    unequal = {1: hello(gpus=("0",), for_gpus=True), 2: hello(gpus=())}
    with pytest.raises(UsageMistake, match=r"^Host b: --device cuda needs GPUs"):
        far_hosts._devices(options, options.placement, unequal)


def test_times_of_another_clock_are_shifted_and_what_is_not_over_stays_so() -> None:
    done = Collective(0, 0, "all_reduce", issued_ns=100, done_ns=200)
    open_one = Collective(0, 1, "all_reduce", issued_ns=300)
    log = collective_log.LogTail(1, 0, (done, open_one))
    shifted = _shifted(log, -50).records
    assert [(r.issued_ns, r.done_ns) for r in shifted] == [(50, 150), (250, 0)]
    assert _shifted(log, 0) is log


def test_a_part_of_a_file_and_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_bytes("aé".encode() + b"\xff")
    ask = host_facts.QUESTIONS
    assert ask["file_part"](path=str(file), begin=1, size=2) == "é".encode().decode("latin-1")
    assert ask["file_part"](path=str(file), begin=4, size=9) == ""
    assert ask["file_part"](path=str(tmp_path), begin=0, size=9) == ""
    assert len(ask["digest"](path=str(file))) == 64
    assert ask["digest"](path=str(tmp_path / "none")) == ""
    assert ask["free_port"](address="203.0.113.9") == 0
    assert ask["facing"](address="127.0.0.1")["address"] == "127.0.0.1"
