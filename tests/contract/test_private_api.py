"""What we use beyond the public API of torch, ipyparallel, IPython: this fails when it changes."""

from __future__ import annotations

import inspect
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from support import eventually, pids_of, run_with_torch

from ddp_notebook.cluster.ipyparallel_private import has_private_api
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.rank import calls
from ddp_notebook.session import Session
from ddp_notebook.testing import cluster_of

FORGET = """
import torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed import distributed_c10d as c10d
from ddp_notebook.rank import torch_private

for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag",
             "tags_to_pg", "pg_coalesce_state", "group_count"):
    assert hasattr(c10d._world, name), name
assert torch_private.unwaited_results() == 0
assert callable(torch._C._distributed_c10d._get_work_registry_size)
assert callable(c10d._update_default_pg) and callable(c10d._unregister_all_process_groups)

def make():
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

make()
name = dist.group.WORLD.group_name
assert torch_private.set_group_timeout(timedelta(hours=24), dist.group.WORLD)
assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=24)
torch_private.forget_groups()
assert not dist.is_initialized()
c10d._world.group_count = 5   # what a half-made group leaves behind
torch_private.forget_groups()
make()
assert dist.group.WORLD.group_name == name, "group names are counted from 0 again"
x = torch.ones(2)
dist.all_reduce(x)
"""


def test_torch_still_has_what_forgetting_groups_needs(tmp_path: Path) -> None:
    run_with_torch(FORGET, tmp_path)


SPLIT = """
import tempfile
import torch
import torch.distributed as dist
from pathlib import Path
from ddp_notebook.model import collective_log
from ddp_notebook.rank.collectives.observer import ObservedGroup
from ddp_notebook.rank.component import Lifecycle, Run
from ddp_notebook.rank.rank_process import Events, RankProcess
from ddp_notebook.rank.watched import Watched

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    life = Lifecycle(Watched(RankProcess(0, Events(), folder, folder / "ask")).components())
    life.attach()
    life.run_begins(Run(1))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    world = dist.group.WORLD
    # torch splits groups of accelerators alone.
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda: torch.device("cpu")
    world.bound_device_id = torch.device("cpu", 0)
    backend = world._get_backend(torch.device("cpu"))
    if not getattr(backend, "supports_splitting", False):
        raise SystemExit  # as gloo in an older torch
    options = backend.options
    half = dist.split_group(split_ranks=[[0]], group_desc="half", pg_options=options)
    inner = dist.split_group(half, split_ranks=[[0]], pg_options=options)
    for group in (half, inner):
        assert isinstance(group, ObservedGroup)
        dist.all_reduce(torch.ones(2), group=group)
    log = collective_log.read((folder / "ring-0").read_bytes(), 0)
    assert [record.called for record in log.records] == ["half", ""]
    assert [record.group for record in log.records] == [half.group_name, inner.group_name]
    assert log.groups[half.group_name] == (0,)
    dist.destroy_process_group()
"""


def test_a_group_that_was_split_off_another_is_observed(tmp_path: Path) -> None:
    """It ended the process: torch looked for the store of a group that has none of its own."""
    run_with_torch(SPLIT, tmp_path)


RULES = """
import torch._dynamo
from ddp_notebook.rank import torch_private

rules = torch._dynamo.trace_rules
rules.get_torch_obj_rule_map()
assert torch_private.forget_rules() and not rules.get_torch_obj_rule_map.cache_info().currsize
"""


def test_torch_still_has_what_forgetting_its_compilers_rules_needs(tmp_path: Path) -> None:
    run_with_torch(RULES, tmp_path)


COMPILED = """
import torch
from ddp_notebook.rank import torch_private

told, ran, plain = [], [], True
def chosen(root, codes):
    told.append((root.co_name, {code.co_name for code in codes}))
    return plain
def backend(graph, _):
    return lambda *inputs: ran.append(1) or graph.forward(*inputs)
def inner(x):
    return x * 2
def outer(x):
    return inner(x) + 1
assert torch_private.on_compiled(chosen, load=True)
compiled = torch.compile(outer, backend=backend)
assert compiled(torch.ones(1)) == 3 and ("outer", {"outer", "inner"}) in told and not ran, told
compiled(torch.ones(1))
assert not ran, "it is compiled after all"
plain = False
for code in (outer.__code__, inner.__code__):
    torch_private.compile_again(code)
assert compiled(torch.ones(1)) == 3 and ran == [1], "it is never compiled again"
"""


def test_torch_still_has_what_running_compiled_code_as_python_needs(tmp_path: Path) -> None:
    run_with_torch(COMPILED, tmp_path)


COMPILED_DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
graphs = []
def backend(graph, _):
    graphs.append(graph)
    return graph.forward
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
model = torch.compile(DistributedDataParallel(layers), backend=backend)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
"""


def test_a_compiled_ddp_object_is_counted_and_compiled_as_without_us(
    ranks2: Session, tmp_path: Path
) -> None:
    """torch leaves a module of its own as it is, unless it has a hook."""
    one = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    alone = COMPILED_DDP.replace("graphs = []", f"graphs = []\n{one}")
    run_with_torch(f"{alone}\nassert not graphs, graphs", tmp_path)
    seen = (
        "import gc\n"
        "replicas = [each for each in gc.get_objects() if type(each).__name__ == 'Replica']\n"
        "counted = [replica.forwards for replica in replicas if replica.module() is layers]\n"
        "graphs = len(graphs)"
    )
    ranks2.run_cell(f"{COMPILED_DDP}\n{seen}").raise_for_error()
    assert ranks2.pull("graphs") == {0: 0, 1: 0}
    assert ranks2.pull("counted") == {0: [3], 1: [3]}


EVALUATED = """
import torch, torch.distributed as dist
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
layers.load_state_dict(layers.state_dict())
layers.eval()
graphs = []
def backend(graph, _):
    graphs.append([node.name for node in graph.graph.nodes if node.op.startswith('call')])
    return graph.forward
model = torch.compile(layers, backend=backend, fullgraph=True)
with torch.no_grad():
    total = model(torch.ones(2, 4)).sum()
dist.all_reduce(total)
"""


def test_a_model_that_is_only_evaluated_is_compiled_as_without_us(ranks2: Session) -> None:
    ranks2.run_cell(EVALUATED).raise_for_error()
    (graph,) = ranks2.pull("graphs")[0]
    assert len(graph) == 2, "a linear layer and a ReLU"


def test_torch_still_has_the_functions_by_which_a_rank_in_set_up_is_known(tmp_path: Path) -> None:
    code = (
        "from torch.distributed import distributed_c10d\n"
        "import importlib\n"
        "rendezvous = importlib.import_module('torch.distributed.rendezvous')\n"
        "from ddp_notebook.rank.inspect import frames as p\n"
        "assert all(hasattr(rendezvous, name) for name in p.STORE_FUNCTIONS)\n"
        "assert all(hasattr(distributed_c10d, name) for name in p.GROUP_FUNCTIONS)"
    )
    run_with_torch(code, tmp_path)


def test_torch_still_lets_a_store_take_a_listening_socket(tmp_path: Path) -> None:
    code = (
        "import socket, torch.distributed as dist\n"
        "s = socket.create_server(('127.0.0.1', 0)); port = s.getsockname()[1]\n"
        "store = dist.TCPStore('127.0.0.1', port, None, True, wait_for_workers=False,"
        " master_listen_fd=s.detach())\n"
        "other = dist.TCPStore('127.0.0.1', port, None, False)\n"
        "other.set('k', 'v'); assert store.get('k') == b'v'"
    )
    run_with_torch(code, tmp_path)


def test_torchs_store_still_answers_as_we_ask_it(tmp_path: Path) -> None:
    code = (
        "import socket, torch.distributed as dist\n"
        "from ddp_notebook.rank import torch_private\n"
        "for libuv in (True, False):\n"
        "    store = dist.TCPStore('127.0.0.1', 0, 1, True, use_libuv=libuv)\n"
        "    with socket.create_connection(('127.0.0.1', store.port), 60) as connection:\n"
        "        assert torch_private.is_store(connection), libuv\n"
        "    store.set('k', 'v'); assert store.get('k') == b'v'\n"
        "with socket.create_server(('127.0.0.1', 0)) as other:\n"
        "    connection = socket.create_connection(other.getsockname(), 0.01)\n"
        "    assert torch_private.is_store(connection) is None\n"
        "    other.accept()[0].close()\n"
        "    connection.settimeout(60)\n"
        "    assert torch_private.is_store(connection) is False\n"
    )
    run_with_torch(code, tmp_path)


def test_ipyparallel_still_has_what_forgetting_an_engine_needs(ranks2: Session) -> None:
    assert has_private_api(cluster_of(ranks2)._client)


def test_ipython_still_has_what_running_a_cell_as_one_module_needs(ranks2: Session) -> None:
    source = (
        "import inspect\n"
        "shell = get_ipython()\n"
        "names = list(inspect.signature(type(shell).run_ast_nodes).parameters)[:6]\n"
        "there = [callable(each) for each in (shell._showtraceback, shell.compile.get_code_name,\n"
        "         shell.displayhook.quiet, shell.displayhook.fill_exec_result)]"
    )
    ranks2.run_cell(source).raise_for_error()
    expected = ["self", "nodelist", "cell_name", "interactivity", "compiler", "result"]
    assert ranks2.pull("names")[0] == expected
    assert ranks2.pull("there")[0] == [True] * 4


def test_ipykernel_still_lets_a_rank_not_list_all_modules(ranks2: Session) -> None:
    modules = "getattr(get_ipython().kernel, '_kernel_modules', ())"  # before 7 it lists none
    ranks2.run_cell(f"listed = len({modules})").raise_for_error()
    assert ranks2.pull("listed") == {0: 0, 1: 0}


def test_traitlets_still_lets_a_rank_configure_one_logger(ranks2: Session) -> None:
    ranks2.run_cell(
        "from traitlets.config import application\n"
        "by = application.dictConfig.__module__\n"
        "handlers = len(get_ipython().kernel.parent.log.handlers)"
    ).raise_for_error()
    assert ranks2.pull("by") == dict.fromkeys((0, 1), "ddp_notebook.rank.engine_private")
    assert ranks2.pull("handlers") == {0: 1, 1: 1}


def test_ipyparallels_controller_still_is_one_process(ranks2: Session) -> None:
    assert psutil.Process(pids_of(ranks2).controller).children() == []


def test_ipyparallels_controller_still_knows_which_engines_register() -> None:
    """Else its heart beats twenty times a second for ever."""
    from ipyparallel.controller import app, heartmonitor, hub

    assert "HeartMonitor(" in inspect.getsource(heartmonitor._setup_heartmonitor)
    assert callable(heartmonitor.HeartMonitor.beat) and callable(app.IPController.instance)
    assert "incoming_registrations" in hub.Hub.class_trait_names()
    assert "self.hub = Hub(" in inspect.getsource(app.IPController)


def test_ipyparallel_still_has_the_names_of_its_engines(ranks2: Session) -> None:
    client = cluster_of(ranks2)._client
    assert callable(client._send)
    assert isinstance(client._engines[0], str), "by which a new engine is told from the last one"


def test_a_rank_that_cannot_answer_is_left_out_in_time(ranks2: Session) -> None:
    cluster = cluster_of(ranks2)
    pid = ranks2.record.snapshot.ranks[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        found = cluster.ask((0, 1), calls.REPORT, calls.Nothing(), 1.0)
        assert time.monotonic() - started < scaled_for_load(3.0)
        assert set(found) == {0}
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(
        lambda: 1 in cluster.ask((1,), calls.REPORT, calls.Nothing(), 1.0),
        10,
        "an answer of rank 1",
    )


def test_a_rank_answers_while_its_main_thread_is_blocked_and_is_freed_from_there(
    ranks2: Session,
) -> None:
    cluster = cluster_of(ranks2)
    unknown = calls.Question("no such question", calls.Nothing, calls.Nothing)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(ranks2.run_cell, "dist.all_reduce(torch.ones(1))", (0,))

        def evidence() -> Any:
            found = cluster.ask((0, 1), calls.REPORT, calls.Nothing(), 5.0)
            return found if found[0].activity == "waiting" else None

        try:
            found = eventually(evidence, 10, "rank 0 in the all_reduce")
            assert (found[0].inside, found[0].initialized) == ("collective", True)
            assert (found[1].activity, found[1].rank) == ("idle", 1)
            assert cluster.ask((0,), calls.SOFTWARE, calls.Nothing(), 5.0)[0].facts
            assert "cannot be asked" in cluster.ask((0,), unknown, calls.Nothing(), 5.0)[0].why
            assert not blocked.done(), "asking changed nothing"
        finally:
            freed = cluster.ask((0,), calls.FREE, calls.Nothing(), 5.0)
        assert freed[0].closed > 0
        assert "rank 0 raised" in str(blocked.result(10).error)


def test_a_rank_formats_no_traceback_that_nobody_reads(ranks2: Session) -> None:
    result = ranks2.run_cell(
        "from IPython.core.getipython import get_ipython\n"
        "shell = get_ipython()\n"
        "if hasattr(type(shell), '_format_exception_for_storage'):\n"
        "    kept = shell._format_exception_for_storage(ValueError('why'))\n"
        "    assert kept == {'ename': 'ValueError', 'evalue': 'why', 'traceback': []}, kept"
    )
    result.raise_for_error()


IN_USE = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from pathlib import Path
from types import SimpleNamespace
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.core import RankCore
from ddp_notebook.rank.rank_process import Events, RankProcess
from ddp_notebook.rank.training import ddp

runtime = RankCore(RankProcess(0, Events(), Path.cwd(), Path.cwd() / 'ask'))
hooks, tracker = runtime.hooks, runtime.tracker
hooks.attach()

def make():
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)
    def forward(self, x):
        return self.a(x)

make()
net = DDP(Toy())
assert ddp.unready(net) == []
seen = []
def look(gradient):
    seen.append(torch_private.in_backward())
weight = net.module.a.weight
weight.register_hook(look)
net(torch.ones(1, 2)).sum().backward()
assert ddp.unready(net) == [2, 3], "b.weight and b.bias"
assert seen == [True] and not torch_private.in_backward()
assert not torch_private.is_forgotten(net.process_group)
torch_private.forget_groups()
assert torch_private.is_forgotten(net.process_group)
make()
assert hooks.reattach() == () and net.process_group is dist.group.WORLD
assert ddp.unready(net) == [], "its last backward is forgotten"
net.module.forward = lambda x: net.module.a(x) + net.module.b(x)
net.zero_grad()
net(torch.ones(1, 2)).sum().backward()
assert ddp.unready(net) == [] and net.module.b.bias.grad.item() == 1
count = len(net.module._forward_pre_hooks)
del net.module.forward
torch.jit.script(net.module)
assert count == 1 == len(net.module._forward_pre_hooks)

def local():
    @torch.jit.script
    def twice(x: torch.Tensor):
        return x * 2
    def more(x: torch.Tensor):
        return twice(x) + 1
    return torch.jit.script(more)

assert local()(torch.ones(1)).item() == 3, "names are still found where they are"
assert not tracker.broken
assert "__del__" in vars(DDP), "torch has none of its own"
"""


def test_torch_still_has_what_telling_of_ddp_objects_in_use_needs(tmp_path: Path) -> None:
    run_with_torch(IN_USE, tmp_path)


LOADING = """
import inspect, sys, threading
import torch
from torch.utils.data import DataLoader, _utils, dataloader
from ddp_notebook.rank import torch_private

go = torch.multiprocessing.get_context("fork").Event()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        go.wait()
        return i

found = []
def frames():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        yield frame
        frame = frame.f_back

def look():
    while not found:
        threading.Event().wait(0.01)
        loading = torch_private.loading(frames(), awaited=True)
        if loading is not None and loading.due:
            # Nothing is pinned without a GPU: this thread stands for the one that does so.
            iterator._pin_memory_thread = threading.current_thread()
            pins = {torch_private.pinning_thread(frame) for frame in frames()}
            assert pins == {None, threading.current_thread()}, pins
            del iterator._pin_memory_thread
            found.append(loading)
    go.set()

iterator = iter(DataLoader(Data(), num_workers=2, collate_fn=lambda batch: batch[0]))
assert isinstance(iterator, dataloader._MultiProcessingDataLoaderIter)
thread = threading.Thread(target=look)
thread.start()
assert next(iterator) == 0
thread.join()
pids = [process.pid for process in iterator._workers]
assert found[0].due == pids[0] and found[0].owing == tuple(sorted(pids)), (found, pids)
assert found[0].everyone == tuple(pids)
assert torch_private.loading(frames()) is None
assert torch_private.loader_iterator() is not None
assert list(iterator) == [1, 2, 3]
assert "self._pin_memory_thread = pin_memory_thread" in inspect.getsource(dataloader)
assert _utils.pin_memory.__name__ == torch_private.PINS
assert _utils.MP_STATUS_CHECK_INTERVAL == 5.0
with torch_private.impatient_loaders():
    assert _utils.MP_STATUS_CHECK_INTERVAL < 1
assert _utils.MP_STATUS_CHECK_INTERVAL == 5.0
"""


def test_torch_still_has_what_tells_the_workers_of_a_loader(tmp_path: Path) -> None:
    run_with_torch(LOADING, tmp_path)


HOOKED = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_notebook.rank import torch_private as p
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
net = DDP(torch.nn.Linear(64, 64))
assert p.hook_names(net) == []
def my_hook(state, bucket):
    raise NotImplementedError
net = DDP(torch.nn.Linear(2, 2))
net.register_comm_hook(None, my_hook)
assert p.hook_names(net) == p.hooks_that_may_part(net) == ["my_hook"]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
for state, hook in (
    (None, default_hooks.allreduce_hook),
    (dist.group.WORLD, default_hooks.fp16_compress_hook),
    (powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook),
):
    net = DDP(torch.nn.Linear(2, 2))
    net.register_comm_hook(state, hook)
    assert p.hook_names(net) == [hook.__name__] and p.hooks_that_may_part(net) == []
assert p.hook_names(object()) == []
"""


def test_torch_still_tells_the_communication_hooks_of_a_ddp_object(tmp_path: Path) -> None:
    run_with_torch(HOOKED, tmp_path)


IN_PARTS = """
import importlib, inspect, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.training import fsdp_private, pipelines, split

store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
named = lambda function: set(function.__code__.co_varnames)

model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
fully_shard(model[0])
fully_shard(model)
model(torch.ones(1, 4)).sum().backward()
units = {unit.name: unit for unit in fsdp_private.units(model._get_fsdp_state()._state_ctx)}
assert {name: unit.parameters for name, unit in units.items()} == {"0": 10, "": 6}, units
ranks, sharded = fsdp_private.sharded_in(model.parameters(), {})
assert units["0"].mesh == ranks == (0,) and len(sharded) == 4
module = importlib.import_module(fsdp_private.PARAM_GROUP_MODULE)
(group,) = fsdp_private.groups_of(model[0]._get_fsdp_state())
of_unit = SimpleNamespace(f_globals=vars(module), f_locals={"self": group})
assert type(group) is module.FSDPParamGroup and "0 (FSDP2" in fsdp_private.purpose([of_unit])
held = fsdp_private.held_by_units()[id(model[0]), "weight"]
assert held.tensor is model[0].weight and held.gathers == ("forward", "backward"), held
assert held.group == (0,) and fsdp_private.spec(held.tensor)[0] == ("Shard(0)",), held
redistribute = importlib.import_module(fsdp_private._REDISTRIBUTE_MODULE)
assert {"current_spec", "target_spec"} <= named(redistribute.redistribute_local_tensor)

flat = FSDP(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
assert list(fsdp_private.flat([flat]).values()) == [(0,)], fsdp_private.flat([flat])
assert fsdp_private.sharded_in(flat.parameters(), fsdp_private.flat([flat]))[0] == (0,)
given = list(inspect.signature(DTensor.from_local).parameters)[:3]
assert given == ["local_tensor", "device_mesh", "placements"] and split._TENSOR in sys.modules
assert getattr(torch.nn.Module, torch_private.CALL_OF_MODULE).__module__ == split._MODULE
assert hasattr(torch.nn.Module, "_compiled_call_impl")

schedule = ScheduleGPipe(PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device("cpu")), 3)
part = pipelines.part_of(
    SimpleNamespace(f_globals=vars(schedules), f_locals={"self": schedule}, f_back=None)
)
assert (part.schedule, part.stages, part.num_stages) == ("GPipe", (0,), 1), part
assert (part.micro_batches, part.meant, part.members) == (3, (0,), (0,)), part
assert schedules.__name__ == pipelines.SCHEDULES_MODULE
assert {"i", "bwd_sends_to_wait"} <= named(ScheduleGPipe._step_microbatches)
assert {"fwd_mb_index", "bwd_mb_index"} <= named(Schedule1F1B._step_microbatches)
listed = schedules._PipelineScheduleRuntime._step_microbatches.__code__
inner = (c for c in listed.co_consts if getattr(c, "co_name", "") == "_perform_action")
assert "action" in next(inner, listed).co_varnames  # torch 2.8 has no function of its own for it
dist.destroy_process_group()
"""


def test_torch_still_has_what_telling_of_models_in_parts_needs(tmp_path: Path) -> None:
    run_with_torch(IN_PARTS, tmp_path)
