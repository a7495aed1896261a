"""Stores that cannot be reached: those that the user's code opens, files, and what is no store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import eventually, stuck

from ddp_notebook.cluster.channels import EventReceiver
from ddp_notebook.errors import CellFailed, Stuck
from ddp_notebook.model import Category, Event, StoreFailed
from ddp_notebook.rank.setup import listening, store_process

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def port() -> int:
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_store_that_every_rank_connects_to_and_none_opens_is_a_hang_that_abort_ends(
    ranks: Any, port: int
) -> None:
    kept = "kept = rank + 7"
    ranks.run_cell(kept).raise_for_error()
    diagnosis = stuck(ranks, f"own = dist.TCPStore('127.0.0.1', {port}, 3, is_master=False)")
    finding = diagnosis.findings[0]
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert "no rank opens one with `is_master=True`" in finding.cause
    ranks.abort()
    assert ranks.pull("kept") == {0: 7, 1: 8, 2: 9}
    ranks.run_cell("dist.barrier()").raise_for_error()


def test_a_store_whose_host_waits_for_a_rank_that_never_comes_is_a_hang(
    ranks: Any, port: int
) -> None:
    source = f"if rank != 2:\n    dist.TCPStore('127.0.0.1', {port}, 3, is_master=rank == 0)"
    finding = stuck(ranks, source).findings[0]
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (2,)), finding
    assert "never called `TCPStore`" in finding.cause and "`if rank != 2`" in finding.remedy
    ranks.abort()
    ranks.run_cell("dist.barrier()").raise_for_error()


def test_a_store_of_the_users_own_works_as_without_us(ranks: Any, port: int) -> None:
    ranks.run_cell(
        f"own = dist.TCPStore('127.0.0.1', {port}, world_size=3, is_master=(rank == 0))\n"
        "own.set(f'rank {rank}', str(rank))\n"
        "seen = [own.get(f'rank {r}').decode() for r in range(3)]\n"
        "dist.barrier()\ndel own"
    ).raise_for_error()
    assert ranks.pull("seen") == {rank: ["0", "1", "2"] for rank in range(3)}
    assert ranks.why().findings == ()
    with pytest.raises(CellFailed, match="incompatible constructor arguments"):
        ranks.run_cell("dist.TCPStore(5)").raise_for_error()


@pytest.fixture
def another_program() -> Iterator[int]:
    """The port of a server that answers, and is no store."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-none of torch's\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_another_program_at_the_port_of_the_store_is_told_as_that(
    ranks: Any, another_program: int, tmp_path: Path
) -> None:
    train = tmp_path / "train.py"
    train.write_text(
        "import os\nimport torch.distributed as dist\n"
        f"dist.init_process_group('gloo', 'tcp://127.0.0.1:{another_program}', "
        "rank=int(os.environ['RANK']), world_size=3)\n",
        "utf-8",
    )
    error = ranks.run_script(str(train)).error
    assert isinstance(error, Stuck)
    finding = error.diagnosis.findings[0]
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert f"Another program answers at 127.0.0.1:{another_program}" in finding.cause


def test_the_file_of_a_store_in_a_folder_that_is_missing_is_a_hang_that_ends_once_it_is_there(
    ranks: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    train = tmp_path / "train.py"
    train.write_text(
        "import os\nimport torch, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', 'file://{folder}/store', "
        "rank=int(os.environ['RANK']), world_size=3)\ntotal = torch.ones(1)\n"
        "dist.all_reduce(total)\ntotal = total.item()\ndist.destroy_process_group()\n",
        "utf-8",
    )
    ranks.run_script(str(train), detach=True)
    all_ranks = [(Category.FILESYSTEM, (0, 1, 2))]
    eventually(
        lambda: [(f.category, f.ranks) for f in ranks.why_now().findings] == all_ranks,
        what="one finding of all ranks",
    )
    finding = ranks.why_now().findings[0]
    assert f"`{folder}` does not exist on ranks 0-2" in finding.cause
    folder.mkdir()
    ranks.wait().raise_for_error()
    assert ranks.pull("total") == dict.fromkeys(range(3), 3.0)


def test_what_torchs_store_raises_is_told_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no listening socket, please")

    monkeypatch.setattr(listening, "TCPStore", refuses)
    heard: list[Event] = []
    receiver = EventReceiver(tmp_path, heard.extend)
    try:
        store_process.main(receiver.url, receiver.source, "127.0.0.1", 0)
        eventually(lambda: heard)
    finally:
        receiver.close()
    (failed,) = heard
    assert isinstance(failed, StoreFailed)
    assert failed.cause == "torch's store cannot open: no listening socket, please"
