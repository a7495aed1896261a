"""Without room for our files ranks train as torch alone does, and the board says what is off."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import lacking, stuck

from ddp_notebook.errors import SetupFailed
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Category
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import pids_of

SMALL_BYTES = 1_000_000
"""Less than a collective log needs."""


@pytest.fixture
def cramped() -> Iterator[Session]:
    """Two ranks whose files may not grow beyond that: as on a full disk, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, before[1]))
    session = Session()
    try:
        session.init(InitOptions(world_size=2, device="cpu"))
        yield session
    finally:
        session.shutdown(keep_warm=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_kills_no_rank_and_is_said(cramped: Session) -> None:
    source = "for i in range(3):\n    x = torch.ones(4)\n    dist.all_reduce(x)\nx.sum().item()"
    result = cramped.run_cell(source)
    result.raise_for_error()
    assert result.outputs[-1].items[-1].data["text/plain"] == "8.0"
    (note,) = [note for note in cramped.status().notes if "not recorded" in note]
    assert note.startswith(
        "Ranks 0 and 1: Collectives are not recorded, nor compared: no room in /"
    )
    assert "File too large" in note
    why = cramped.why()
    assert not why.findings and not why.proven
    assert why.headline == "No problem found, but not everything could be checked."
    (known,) = why.notes
    assert known.startswith("Collectives of ranks 0 and 1 are not recorded (ranks 0 and 1: no ")
    assert "mismatches cannot be found" in known

    cramped.run_cell(TRAINING).raise_for_error()
    assert cramped.why().notes == (known,) and not cramped.why().findings


TRAINING = """
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""


def test_a_script_prints_on_where_its_output_has_no_room_and_a_folder_that_is_gone_is_said(
    cramped: Session, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "for _ in range(20):\n    print('x' * 100_000)\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\ntotal = x.item()\n"
    )
    result = cramped.run_script(str(script))
    result.raise_for_error()
    assert cramped.pull("total") == {0: 2.0, 1: 2.0}
    said = [item.text for group in result.outputs for item in group.items]
    assert any("printed text was lost in /" in text for text in said)

    folder = pids_of(cramped)["folder"]
    shutil.rmtree(folder)
    (note,) = cramped.why().notes
    assert note.startswith(f"The session's temporary folder {folder} is gone")
    with pytest.raises(SetupFailed, match=r"is gone.*%ddp_init --replace"):
        cramped.run_script(str(script))
    with pytest.raises(SetupFailed, match=r"is gone.*No rank was ended\."):
        cramped.restart()
    cramped.run_cell("rank").raise_for_error()


def test_a_hang_is_found_as_soon_where_the_folder_is_gone() -> None:
    """The ranks cannot be asked: their records and the ends of their cells tell enough."""
    session = Session()
    try:
        session.init(InitOptions(world_size=2, device="cpu"))
        session.run_cell("rank").raise_for_error()  # cells have a connection of their own
        shutil.rmtree(pids_of(session)["folder"])
        began_s = time.monotonic()
        (finding,) = stuck(session, "if rank == 0:\n    dist.barrier()").findings
        assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
        assert time.monotonic() - began_s < scaled_for_load(10)
    finally:
        session.shutdown(keep_warm=False)


def said_where_one_may_mount(
    script: str, folder: Path, *arguments: str
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """The lines that a script prints in a mount namespace of its own, and how it ended."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        lacking("no mount namespace here")
    path = folder / "mounts.py"
    path.write_text(script)
    words = ["unshare", "--mount", sys.executable, str(path), *arguments]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=300)
    return ended.stdout.splitlines(), ended


def test_a_file_system_that_becomes_read_only_is_said_before_a_rank_is_ended(
    tmp_path: Path,
) -> None:
    """In a mount namespace of its own, where the temporary folder is mounted again, read-only."""
    said, ended = said_where_one_may_mount(READ_ONLY, tmp_path)
    assert len(said) == 4, ended
    assert "cannot be written to any more" in said[0] and "No rank was ended." in said[0]
    assert "cannot be written to any more" in said[1] and "False" in said[1]
    assert said[2:] == ["None", "ready"], ended


READ_ONLY = """
import subprocess, tempfile
from ddp_notebook.errors import SetupFailed
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import processes_of
session = Session()
try:
    session.init(InitOptions(world_size=1, device="cpu"))
    folder = processes_of(session).folder
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    try:
        session.restart()
    except SetupFailed as error:
        print(error)
    print(*session.why().notes, session.why().proven)
    print(session.run_cell("rank").error)
    subprocess.run(["mount", "-o", "remount,bind,rw", folder], check=True)
    print("ready" if session.restart().snapshot.ready else "not ready")
finally:
    session.shutdown()
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()
"""


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("full", "OSError: [Errno 28] No space left on device"),
        ("read-only", "OSError: [Errno 30] Read-only file system"),
    ],
)
def test_without_room_in_shared_memory_ranks_work_and_what_needs_it_says_so(
    how: str, error: str, tmp_path: Path
) -> None:
    """The workers of a DataLoader pass batches there; nothing of ours is there.

    In a mount namespace of its own, with a small /dev/shm.
    """
    said, ended = said_where_one_may_mount(SHARED_MEMORY, tmp_path, how)
    assert len(said) == 5, ended
    assert said[0] == "True None", ended
    assert error in said[1] and "cell line 9" in said[1], ended
    assert "Ranks 0 and 1" in said[2], ended
    assert said[3:] == ["None", "True"], ended


SHARED_MEMORY = """
import contextlib, os, subprocess, sys
from ddp_notebook.session import InitOptions, Session
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
if sys.argv[1] == "full":
    file = os.open("/dev/shm/filled", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(4096))
elif sys.argv[1] == "read-only":
    subprocess.run(["mount", "-o", "remount,ro", "/dev/shm"], check=True)
LOADS = '''
class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        return torch.ones(50_000)

for batch in torch.utils.data.DataLoader(Batches(), num_workers=1):
    pass
'''
SUMS = "x = torch.ones(4); dist.all_reduce(x); assert x.sum() == 8"
session = Session()
try:
    board = session.init(InitOptions(world_size=2, device="cpu"))
    print(board.snapshot.ready, session.run_cell(SUMS).error)
    print(" ".join(str(session.run_cell(LOADS).error).split()))
    print(session.why().headline)
    session.abort()
    print(session.run_cell(SUMS).error)
    print(session.restart().snapshot.ready)
finally:
    session.shutdown()
"""
