"""Scripts as torchrun runs them: unchanged, again and again, and nothing of them stays behind."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from results import rank_pids, texts
from support import eventually

from ddp_notebook.errors import CellFailed, Stuck, UsageMistake
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.launch.devices import plan_devices
from ddp_notebook.model import Category
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import argparse, logging, multiprocessing, os, signal, subprocess, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import beside
import package


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index * index], dtype=torch.float64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--init", default="env")
    parser.add_argument("--file")
    parser.add_argument("--code", type=int, default=0)
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = {"rank": rank, "world_size": world_size}
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if options.init == "env":
        dist.init_process_group("gloo")
    elif options.init == "tcp":
        dist.init_process_group("gloo", init_method=f"tcp://{address}", **own)
    else:
        dist.init_process_group("gloo", init_method=f"file://{options.file}", **own)
    multiprocessing.set_start_method("fork")
    torch.set_default_dtype(torch.float64)
    logging.basicConfig(level=logging.DEBUG)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    net = DDP(torch.nn.Linear(1, 1))
    seen = 0.0
    for batch in DataLoader(Squares(), batch_size=2, num_workers=1):
        net(batch).sum().backward()
        seen += batch.sum().item()
    command = [sys.executable, "-c", "print('from a child')"]
    child = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    told = (__name__, beside.VALUE, package.NAME, seen, child, total.item(), sys.argv[1:])
    sys.exit(options.code) if options.code else None
    return told, torch.initial_seed()


if __name__ == "__main__":
    told, seed = main()
"""
LEFT = """
import multiprocessing, os, logging, signal, sys
left = (
    torch.get_default_dtype() == torch.float64,
    multiprocessing.get_start_method(allow_none=True) == "fork",
    logging.getLogger().level == logging.DEBUG,
    callable(signal.getsignal(signal.SIGUSR1)),
    "LEFT_BEHIND" in os.environ,
    os.getcwd() == "/",
    "package" in sys.modules,
)
drawn = torch.rand(1).item()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("VALUE = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from .inner import NAME\n")
    (tmp_path / "package" / "inner.py").write_text("NAME = 'inner'\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def told(session: Session) -> Mapping[int, Any]:
    """What the script said on each rank, by its own variables."""
    return {rank: list(value) for rank, value in session.pull("told").items()}


def test_a_script_runs_as_main_with_its_arguments_modules_and_children(
    ranks2: Session, script: Path
) -> None:
    own_file = script.parent / "rendezvous"
    ways: list[tuple[list[str], dict[str, Any]]] = [
        ([], {}),
        ([], {"store": "rank0"}),
        (["--init", "tcp"], {}),
        (["--init", "file", "--file", str(own_file)], {}),
    ]
    for arguments, options in ways:
        ranks2.run_script(str(script), arguments, **options).raise_for_error()
        expected = ["__main__", 1, "inner", 140.0, "from a child", 2.0, arguments]
        assert told(ranks2) == {0: expected, 1: expected}


def test_what_a_script_imports_beside_it_is_read_anew(ranks2: Session, script: Path) -> None:
    ranks2.run_cell("import sys").raise_for_error()
    ranks2.run_script(str(script)).raise_for_error()
    (script.parent / "beside.py").write_text("VALUE = 'changed'\n")
    ranks2.run_script(str(script)).raise_for_error()
    assert told(ranks2)[0][1] == "changed"
    other = script.parent / "other"
    other.mkdir()
    shutil.copy(script, other / "train.py")
    shutil.copytree(script.parent / "package", other / "package")
    (other / "beside.py").write_text("VALUE = 'of the other'\n")
    ranks2.run_script(str(other / "train.py")).raise_for_error()
    assert told(ranks2)[1][1] == "of the other"


def test_a_script_touches_nothing_of_the_sessions_processes(ranks2: Session, script: Path) -> None:
    seeded = "import random\nrandom.seed(7)\ntorch.manual_seed(7)\n"
    ranks2.run_cell(seeded + LEFT).raise_for_error()
    before = ranks2.pull("left"), ranks2.pull("drawn")
    ranks2.run_cell(seeded).raise_for_error()
    ranks2.run_script(str(script)).raise_for_error()
    ranks2.run_cell(LEFT).raise_for_error()
    assert (ranks2.pull("left"), ranks2.pull("drawn")) == before


def test_a_script_runs_in_the_notebooks_folder(
    ranks2: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nopen('rank-' + os.environ['RANK'], 'w').close()"
    )
    ranks2.run_cell("import os\nbefore = os.getcwd()").raise_for_error()
    monkeypatch.chdir(tmp_path)
    ranks2.run_script("script.py").raise_for_error()
    assert {"rank-0", "rank-1"} < {each.name for each in tmp_path.iterdir()}
    ranks2.run_cell("assert os.getcwd() == before").raise_for_error()


def test_a_script_imports_nothing_from_the_notebooks_folder_as_under_torchrun(
    ranks2: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_notebook.py").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import beside_the_notebook")
    monkeypatch.chdir(tmp_path)
    result = ranks2.run_script("scripts/train.py")
    shown = [item.text for group in result.tracebacks for item in group.items]
    assert "No module named 'beside_the_notebook'" in "".join(shown)


def test_ranks_of_a_script_that_share_a_gpu_by_nccl_are_hosts_of_their_own(
    ranks2: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is one for a GPU, and the ranks of this machine without one run the script."""
    plan = plan_devices(2, "auto", "auto", (), ("0",), share_gpu=True)
    monkeypatch.setattr(ranks2.pool.need("this test"), "devices", plan)
    names = ("NCCL_HOSTID", "LOCAL_RANK", "NCCL_NET", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
    script = tmp_path / "told.py"
    script.write_text(f"import os\ntold = [os.environ.get(name) for name in {names}]\n")
    ranks2.run_script(str(script)).raise_for_error()
    assert told(ranks2) == {r: [f"ddp-rank-{r}", "0", "Socket", "0", "2"] for r in (0, 1)}
    ranks2.run_script(str(script), as_python=True).raise_for_error()
    assert told(ranks2) == {0: [None, None, "Socket", "0", None]}


def test_a_module_runs_by_its_name_as_torchrun_m_does(
    ranks2: Session, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package" / "train.py").write_text(
        "import sys\nfrom .inner import NAME\nprint(__name__, __package__, NAME, sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    ranks2.run_cell("import os, sys\nbefore = os.getcwd(), list(sys.path)").raise_for_error()
    result = ranks2.run_script("package.train", ["--epochs", "2"], as_module=True)
    result.raise_for_error()
    assert [item.text for group in result.outputs for item in group.items] == [
        "__main__ package inner ['--epochs', '2']\n"
    ]
    ranks2.run_cell("assert (os.getcwd(), sys.path) == before").raise_for_error()


def test_random_numbers_of_ranks_and_runs_differ_as_those_of_new_processes(
    ranks2: Session, script: Path
) -> None:
    seeds = set()
    for _ in range(2):
        ranks2.run_cell("torch.manual_seed(0)").raise_for_error()
        ranks2.run_script(str(script)).raise_for_error()
        seeds.update(ranks2.pull("seed").values())
    assert len(seeds) == 4


def test_an_exit_code_is_the_result(ranks2: Session, script: Path) -> None:
    failed = ranks2.run_script(str(script), ["--code", "3"])
    assert isinstance(failed.error, CellFailed)
    assert "SystemExit: 3" in str(failed.error)
    ranks2.run_script(str(script), ["--code", "0"]).raise_for_error()


def test_a_script_on_one_rank_is_a_job_of_one(ranks2: Session, script: Path) -> None:
    ranks2.run_script(str(script), ranks=(1,)).raise_for_error()
    assert ranks2.pull("told", (1,))[1][5] == 1.0


AS_A_PROCESS = """
import asyncio, atexit, builtins, os, socket, sys, threading, time

assert not hasattr(sys, "ps1") and "get_ipython" not in vars(builtins)
assert sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
assert __file__ == os.path.abspath(sys.argv[0]) and os.environ["GROUP_RANK"] == "0"
assert not {"IPython", "ipykernel", "pydevd"} & set(sys.modules)
assert sys.__stdout__ is sys.stdout and sys.stdout.name == "<stdout>" and __loader__ is not None
assert os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]) != ""
sys.stdout.buffer.write(b"bytes\\n")


async def soon():
    await asyncio.sleep(0)
    return "awaited"


print(asyncio.run(soon()))
os.umask(0o077)
atexit.register(lambda: sys.stdout.write("at the end\\n"))


def late():
    time.sleep(0.2)
    sys.stdout.write("from a thread\\n")


threading.Thread(target=late).start()
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
builtins.print = lambda *_: None
"""


def test_a_script_is_a_process_of_its_own_again_and_again(ranks2: Session, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(AS_A_PROCESS)
    for _ in range(2):
        result = ranks2.run_script(str(path), store="rank0")
        result.raise_for_error()
        said = texts(result)
        assert said == "bytes\nawaited\nfrom a thread\nat the end\n"
    for port in ranks2.pull("port").values():  # whatever listened does so no more
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5).close()
    assert len(ranks2.run_cell("print('heard')").outputs) == 1


LEFT_IN_A_COLLECTIVE = """
import os, threading
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    threading.Thread(target=lambda: dist.all_reduce(torch.ones(1))).start()
"""


def test_a_thread_that_waits_in_a_collective_after_the_last_line_ends_the_run(
    ranks2: Session, tmp_path: Path
) -> None:
    """At its end Python waits for threads that are no daemons, and so does the rank."""
    path = tmp_path / "train.py"
    path.write_text(LEFT_IN_A_COLLECTIVE)
    result = ranks2.run_script(str(path))
    assert isinstance(result.error, Stuck) and result.diagnosis is not None, result.error
    assert result.diagnosis.findings[0].category is not Category.UNDECIDED
    ranks2.abort()


LAST_WORDS = """
import os, sys, warnings

warnings.simplefilter("ignore")  # Python 3.12 warns of a fork
sys.stdout.write("begun, ")
if os.fork() == 0:
    sys.exit(7)
code = os.waitstatus_to_exitcode(os.wait()[1])
sys.__stdout__.write(f"child {code}, ")
sys.stdout.buffer.write(b"bytes, ")
print(sys.argv, "last", end="")
os._exit(4) if sys.argv[1:] else sys.exit(256)
"""


def test_nothing_printed_waits_in_a_buffer_of_a_process_that_ends(
    ranks2: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torchrun, which has Python write at once; a folder is run by its __main__.py."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(LAST_WORDS)
    monkeypatch.chdir(tmp_path)
    result = ranks2.run_script("folder", ["now"])
    assert texts(result) == "begun, child 7, bytes, ['folder', 'now'] last"
    assert result.diagnosis is not None
    assert result.diagnosis.findings[0].category is Category.RANK_DIED
    result = ranks2.run_script("folder")
    result.raise_for_error()  # the system keeps eight bits of an exit code
    assert texts(result) == "begun, child 7, bytes, ['folder'] last"


def test_a_script_that_python_cannot_read_is_shown_as_python_shows_it(
    ranks2: Session, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text("for x in range(3)\n    pass\n")
    (traceback,) = ranks2.run_script(str(path)).tracebacks
    shown = "".join(item.text for item in traceback.items)
    assert shown.lstrip().startswith(f'File "{path}", line 1'), shown


def test_a_script_that_is_stuck_is_looked_at_and_does_not_hold_the_sessions_ranks(
    ranks2: Session, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "kept = int(os.environ['RANK']) + 40\nif kept == 40:\n    dist.barrier()\n"
    )
    ranks2.run_cell("mine = rank").raise_for_error()
    own = rank_pids(ranks2)
    stuck = ranks2.run_script(str(path)).error
    assert isinstance(stuck, Stuck)
    assert stuck.diagnosis.findings[0].category is Category.CONDITIONAL_COLLECTIVE
    assert ranks2.pull("kept") == {0: 40, 1: 41}
    for missing in (lambda: ranks2.pull("mine"), lambda: ranks2.variables(("mine",))):
        with pytest.raises(UsageMistake, match=r"variables of train\.py, .* own are kept: run a"):
            missing()
    assert "train.py" in str(ranks2.where((0,)))
    ranks2.run_cell("mine += 1\ndist.barrier()").raise_for_error()
    assert rank_pids(ranks2) == own
    assert ranks2.pull("mine") == {0: 1, 1: 2}
    assert ranks2.why().findings == ()


HANDLED = """
import signal, subprocess

class Bad(Exception):
    def __str__(self):
        subprocess.run(["true"])  # a child ends while the error is shown
        return "the users own words"

def handler(*_):
    raise RuntimeError("a worker was killed")

signal.signal(signal.SIGCHLD, handler)
raise Bad
"""


def test_a_handler_of_ended_children_does_not_end_what_shows_an_error(
    ranks2: Session, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(HANDLED)
    (traceback,) = ranks2.run_script(str(path)).tracebacks
    shown = "".join(item.text for item in traceback.items)
    assert "Bad: the users own words" in shown and "a worker was killed" not in shown


HOLDS_A_LOCK_AND_ENDS = """
import multiprocessing as mp, os, time
import torch, torch.distributed as dist

def simulate(lock, told):
    with lock:
        told.set()
        while {lives}: time.sleep(0.01)
        os._exit(4)

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    fork = mp.get_context("fork")
    lock, told = fork.Lock(), fork.Event()
    fork.Process(target=simulate, args=(lock, told), daemon=True).start()
    told.wait()
    with lock: print("never")
dist.all_reduce(torch.ones(1))
"""


def test_a_lock_of_a_process_that_lives_is_no_deadlock(ranks2: Session, tmp_path: Path) -> None:
    path, done = tmp_path / "train.py", tmp_path / "done"
    lives = f"not os.path.exists({str(done)!r})"
    path.write_text(HOLDS_A_LOCK_AND_ENDS.replace("{lives}", lives).replace("os._exit(4)", "pass"))
    ranks2.run_script(str(path), store="rank0", detach=True)

    def waits() -> bool:
        doing = ranks2.why().doing or {}
        return "waiting in `" in doing.get(0, "") and "train.py, line 17" in doing.get(1, "")

    eventually(waits, 30, "rank 1 at the lock, rank 0 waiting for it")
    assert not [finding for finding in ranks2.why().findings if not finding.passing]
    done.touch()
    ranks2.wait(60).raise_for_error()


LEAVES = """
import atexit, sys
import torch, torch.distributed as dist

def pick(number, trials):
    if number >= len(trials):
        sys.exit(0)
    return trials[number]

dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)
pick(dist.get_rank(), [0.1])
dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_leaves_by_sys_exit_is_told_with_its_line(
    ranks2: Session, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(LEAVES)
    ranks2.run_script(str(path), store="rank0")
    finding = ranks2.why().findings[0]
    assert (finding.category, finding.ranks) == (Category.EARLY_EXIT, (1,))
    (line,) = (line for line in finding.evidence if "`sys.exit()` at train.py" in line)
    assert "behind `if number >= len(trials)" in line


SPAWNING = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp


def work(rank, world_size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"child {rank} of {world_size}: {int(total)}, {os.environ['DDP_NOTEBOOK']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if int(os.environ["WORLD_SIZE"]) == 1:
        mp.spawn(work, args=(2, int(sys.argv[1])), nprocs=2)
    else:
        mp.start_processes(print, nprocs=1, start_method="fork")
"""


def test_a_script_that_starts_its_ranks_itself_runs_on_one_rank_and_says_so_on_several(
    ranks2: Session, tmp_path: Path
) -> None:
    """By torchrun's variables they would wait for a store that nobody has started."""
    (tmp_path / "spawning.py").write_text(SPAWNING)
    path, port = str(tmp_path / "spawning.py"), free_port("127.0.0.1")
    alone = ranks2.run_script(path, [str(port)], ranks=(0,))
    alone.raise_for_error()
    assert alone.diagnosis is None
    written = ranks2.output(0)
    assert "child 0 of 2: 2, 1" in written and "child 1 of 2: 2, 1" in written, written
    assert "by itself" not in written
    ranks2.run_script(path).raise_for_error()
    for rank in (0, 1):
        assert "spawning.py starts a process by itself, on each of 2 ranks" in ranks2.output(rank)
        assert "%ddp_run --python spawning.py" in ranks2.output(rank)
