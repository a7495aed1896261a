"""What agents do on two far hosts, by a real sshd on each, without a session on top of them."""

from __future__ import annotations

import json
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import zmq
from far_agents import NAMES, Reached, two_hosts
from support import eventually, spared_processes

import ddp_notebook
from ddp_notebook.launch.process_ids import host_of, pid_of

SENDS = """
import os, sys, zmq
folder = os.environ["FOLDER"]
context = zmq.Context()
s = context.socket(zmq.PUSH); s.connect(f"ipc://{folder}/events.sock")
for n in range(int(sys.argv[1])): s.send_multipart([b"7", b"%d" % n])
context.destroy(60_000)
"""
LISTENS = """
import os, socket, struct, threading
path = os.environ["FOLDER"] + "/ask-0"
if os.path.exists(path): os.unlink(path)
os.umask(0o077)
listener = socket.socket(socket.AF_UNIX); listener.bind(path); listener.listen()
def serve(c):
    while True:
        head = c.recv(4, socket.MSG_WAITALL)
        if len(head) < 4: return
        (size,) = struct.unpack("!I", head)
        c.sendall(struct.pack("!I", size) + b"x" * size)
while True: threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest.fixture(scope="module")
def far(
    nothing_left_behind_by_the_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reached]:
    with two_hosts(tmp_path_factory.mktemp("far")) as hosts:
        made = Reached(hosts)
        try:
            made.reach()
            ssh = [host.ssh.pid for host in made.client._far.values()]
            with spared_processes([made.local.pid, *ssh], str(made.folder)):
                yield made
        finally:
            made.close()
        hosts.nothing_left()


def test_a_host_says_what_it_is(far: Reached) -> None:
    for host, name in enumerate(NAMES, 1):
        hello = far.client.hello(host)
        assert hello.name == name
        assert hello.address == far.hosts.address(name)
        assert hello.python == sys.version.split()[0]
        assert hello.product == ddp_notebook.__version__
        assert hello.cores >= 1
        assert hello.memory_bytes > 1 << 20
        assert hello.limits == ""
        assert hello.current_folder == str(Path.cwd())
        assert hello.shared_folder
        assert hello.folder != str(far.folder)
    # The second host's clock is far ahead: what is added to it gives this machine's.
    assert abs(far.client.hello(1).clock_offset_ns) < 1e9
    assert abs(far.client.hello(2).clock_offset_ns / 1e9 + 100_000) < 1
    assert [at for host, at in far.seen if host == 2][:2] == ["reached", "agent"]


def test_a_process_starts_there_writes_here_and_its_exit_is_known(far: Reached) -> None:
    source = "import os, socket; print(socket.gethostname(), os.getpid(), flush=True); os._exit(7)"
    for host, name in enumerate(NAMES, 1):
        number, ended = far.start(source, host=host)
        assert host_of(number) == host
        assert ended.result(20) == 7
        assert f"{name} {pid_of(number)}\n" in far.log(host)  # its last words are here by then
        assert far.client.peak_bytes[number] > 1 << 20


def test_what_the_notebook_has_set_travels_and_nothing_else_of_it(far: Reached) -> None:
    source = "import json, os; print('ENV' + json.dumps(dict(os.environ)), flush=True)"
    names = {"MINE": "yes", "SLURM_JOB_ID": "3", "IPP_CONNECTION_INFO": "{}", "GONE": "/not/there"}
    _, ended = far.start(source, **names)
    assert ended.result(20) == 0
    there = json.loads(far.log().rpartition("ENV")[2])
    assert there["MINE"] == "yes"
    assert there["DDP_NOTEBOOK_HOST"] == "1"
    assert there["FOLDER"] == far.client.hello(1).folder
    assert not {"SLURM_JOB_ID", "IPP_CONNECTION_INFO", "GONE", "SSH_CONNECTION"} & there.keys()
    assert Path(there["FOLDER"]).name not in str(far.folder)


def test_a_signal_reaches_it(far: Reached) -> None:
    number, ended = far.start("import signal; print('up', flush=True); signal.pause()")
    far.client.signal(number, signal.SIGTERM)
    assert ended.result(20) == -signal.SIGTERM
    far.client.signal(number, signal.SIGTERM)  # it has ended: nothing happens


def test_what_cannot_start_is_an_error_with_the_hosts_name(far: Reached) -> None:
    spec = {
        "calls": [["no.such:thing", {}]],
        "env": {},
        "cwd": "/no/such/folder",
        "log": str(far.folder / "log" / "rank-1.log"),
        "host": 1,
    }
    ended: Future[int] = Future()
    far.client.spawn(spec, ended.set_result)
    assert ended.result(20) == 1
    assert "/no/such/folder" in far.log()


def test_events_arrive_in_order(far: Reached) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind(f"ipc://{far.folder}/events.sock")
        pull.rcvtimeo = 60_000
        _, ended = far.start(SENDS, "3000", host=2)
        messages = [pull.recv_multipart() for _ in range(3000)]
    assert messages == [[b"7", b"%d" % n] for n in range(3000)]
    assert ended.result(20) == 0


def exchange(connection: socket.socket, size: int) -> int:
    connection.sendall(struct.pack("!I", size))
    (length,) = struct.unpack("!I", connection.recv(4, socket.MSG_WAITALL))
    received = 0
    while received < length:
        received += len(connection.recv(min(1 << 16, length - received)))
    return received


def test_a_socket_here_leads_to_the_process_there(far: Reached) -> None:
    number, ended = far.start(LISTENS)
    path = str(far.folder / "ask-0")
    with socket.socket(socket.AF_UNIX) as stays, socket.socket(socket.AF_UNIX) as other:
        for each in (stays, other):
            each.settimeout(20)
            each.connect(path)
        for size in (1, 7, 10_000_000, 3):
            assert exchange(stays, size) == size
            assert exchange(other, size) == size
        far.client.signal(number, signal.SIGKILL)
        assert ended.result(20) == -signal.SIGKILL
        assert stays.recv(1) == b""  # its end is seen here
    eventually(lambda: not _connects(path), 5, "nobody listens for a process that has ended")


def _connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as asker:
        try:
            asker.connect(path)
        except OSError:
            return False
        return True


def test_an_answer_is_read_to_its_end_though_the_process_has_ended(far: Reached) -> None:
    source = LISTENS.replace('b"x" * size)', 'b"x" * size); os._exit(0)')
    _, ended = far.start(source)
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(20)
        asker.connect(str(far.folder / "ask-0"))
        asker.sendall(struct.pack("!I", 4_000_000))
        assert ended.result(20) == 0
        received = 0
        while piece := asker.recv(1 << 16):
            received += len(piece)
    assert received == 4_000_004


def test_a_host_answers_questions_about_its_processes(far: Reached) -> None:
    number, ended = far.start("import signal; signal.pause()", host=2)
    pid = pid_of(number)
    far.client.signal(number, signal.SIGSTOP)
    eventually(lambda: far.client.question(2, "stopped", pids=[pid, 1]) == [pid], 5)
    assert far.client.question(1, "stopped", pids=[pid]) == []  # no such process, or another one
    far.client.signal(number, signal.SIGKILL)
    assert ended.result(20) == -signal.SIGKILL
    facing = far.client.question(2, "facing", address=far.hosts.address("far-a"))
    assert facing == {"address": far.hosts.address("far-b"), "interface": "eth0"}
    _, ended = far.start("print('in a log', flush=True)")
    assert ended.result(20) == 0
    path = f"{far.folder}/log/rank-1.log"  # a path of the folder here means the one there
    part = far.client.question(1, "file_part", path=path, begin=len(far.log()) - 4, size=3)
    assert part == "log"


def test_nothing_of_ours_listens_beyond_loopback(far: Reached) -> None:
    for name in NAMES:
        table = far.hosts.run(name, "cat", "/proc/net/tcp", "/proc/net/tcp6").stdout
        rows = [line.split() for line in table.splitlines()]
        listening = {row[1] for row in rows if len(row) > 3 and row[3] == "0A"}
        beyond = {at for at in listening if not at.startswith(("0100007F", "0" * 24 + "01000000"))}
        assert {int(at.partition(":")[2], 16) for at in beyond} == {22}
        assert len(listening - beyond) >= 6  # the controller's ports


def test_no_secret_is_in_the_arguments_or_readable_by_others(far: Reached) -> None:
    keys = [bytes.fromhex(host._settings["key"]) for host in far.client._far.values()]
    connection = json.loads((far.folder / "security/ipcontroller-ddp-engine.json").read_text())
    secrets = [*(key.hex() for key in keys), connection["key"]]
    for host, name in enumerate(NAMES, 1):
        listed = far.hosts.run(name, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
        ssh = Path(f"/proc/{far.client._far[host].ssh.pid}/cmdline").read_text()
        for secret in secrets:
            assert secret not in listed
            assert secret not in ssh
        folder = far.client.hello(host).folder
        modes = far.hosts.run(name, "find", folder, "-perm", "/077", "!", "-type", "l").stdout
        assert modes == ""
