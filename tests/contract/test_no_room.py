"""Without room for our files ranks train as torch alone does, and the board says what is off."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_notebook.errors import SetupFailed
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
    assert note.startswith("Ranks 0-1: Collectives are not recorded, nor compared: no room in /")
    assert "File too large" in note
    why = cramped.why()
    assert not why.findings and not why.proven
    assert why.headline == "No problem found, but not everything could be looked at."
    (known,) = why.notes
    assert known.startswith("Collectives of ranks 0-1 are not recorded (ranks 0-1: no room in /")
    assert "not known whether they match" in known

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


def test_a_file_system_that_becomes_read_only_is_said_before_a_rank_is_ended(
    tmp_path: Path,
) -> None:
    """In a mount namespace of its own, where the temporary folder is mounted again, read-only."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no mount namespace here")
    script = tmp_path / "becomes_read_only.py"
    script.write_text(READ_ONLY)
    words = ["unshare", "--mount", sys.executable, str(script)]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=300)
    said = ended.stdout.splitlines()
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
