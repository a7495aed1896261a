"""What we use beyond the public API of torch, ipyparallel, IPython: this fails when it changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support import eventually

from ddp_notebook.cluster import has_private_api
from ddp_notebook.session import InitOptions, Session

FORGET = """
import torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed import distributed_c10d as c10d
from ddp_notebook.agent import torch_private

for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag",
             "tags_to_pg", "pg_coalesce_state", "group_count"):
    assert hasattr(c10d._world, name), name
assert callable(c10d._update_default_pg) and callable(c10d._unregister_all_process_groups)

def make():
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

make()
name = dist.group.WORLD.group_name
assert torch_private.set_group_timeout(timedelta(hours=24))
torch_private.forget_groups()
assert not dist.is_initialized()
c10d._world.group_count = 5   # what a half-made group leaves behind
torch_private.forget_groups()
make()
assert dist.group.WORLD.group_name == name, "group names are counted from 0 again"
x = torch.ones(2)
dist.all_reduce(x)
print("ok")
"""


def test_torch_still_has_what_forgetting_groups_needs() -> None:
    done = subprocess.run([sys.executable, "-c", FORGET], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr


def test_torch_still_lets_a_store_take_a_listening_socket() -> None:
    code = (
        "import socket, torch.distributed as dist\n"
        "s = socket.create_server(('127.0.0.1', 0)); port = s.getsockname()[1]\n"
        "store = dist.TCPStore('127.0.0.1', port, None, True, wait_for_workers=False,"
        " master_listen_fd=s.detach())\n"
        "other = dist.TCPStore('127.0.0.1', port, None, False)\n"
        "other.set('k', 'v'); print(store.get('k').decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "v", done.stderr


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    made.init(InitOptions(world_size=1, device="cpu"))
    yield made
    made.shutdown()


def test_ipyparallel_still_has_what_forgetting_an_engine_needs(session: Session) -> None:
    processes: Any = session._processes
    assert has_private_api(processes.cluster._client)


def test_ipython_still_has_what_running_a_cell_as_one_module_needs(session: Session) -> None:
    source = (
        "import inspect\n"
        "shell = get_ipython()\n"
        "names = list(inspect.signature(type(shell).run_ast_nodes).parameters)[:6]\n"
        "there = [callable(each) for each in (shell._showtraceback, shell.compile.get_code_name,\n"
        "         shell.displayhook.quiet, shell.displayhook.fill_exec_result)]"
    )
    session.run_cell(source).raise_for_error()
    expected = ["self", "nodelist", "cell_name", "interactivity", "compiler", "result"]
    assert session.pull("names")[0] == expected
    assert session.pull("there")[0] == [True] * 4


def test_ipykernel_still_lets_a_rank_keep_its_state_to_itself(session: Session) -> None:
    session.run_cell(
        "kernel = get_ipython().kernel\n"
        "states = []\n"
        "send = kernel.session.send\n"
        "def spy(stream, kind, content=None, *a, **k):\n"
        "    if kind == 'status': states.append(content['execution_state'])\n"
        "    return send(stream, kind, content, *a, **k)\n"
        "kernel.session.send = spy"
    ).raise_for_error()
    session.run_cell("x = 1").raise_for_error()
    assert session.pull("states")[0] == ["busy"], "a cell says nothing, a call for a value does"


def test_ipyparallel_keeps_nothing_of_cells_that_are_over(session: Session) -> None:
    client: Any = session._processes.cluster._client  # type: ignore[union-attr]
    for _ in range(5):
        session.run_cell("x = 1").raise_for_error()

    def kept() -> int:
        return len(client._output_futures) + len(client._futures) + len(client.outstanding)

    eventually(lambda: not kept(), 5, "the client forgot the messages of the cells")
