"""What a rank knows of its GPU without asking it. A lock stands for its wait: no GPU is here."""

from __future__ import annotations

import importlib
import inspect
import itertools
import linecache
import sys
import threading
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_notebook.rank import gpu
from ddp_notebook.rank.calls import VariableToSend
from ddp_notebook.rank.cells import values
from ddp_notebook.rank.inspect.waiting import Awaited, Waiting
from ddp_notebook.rank.training import digests


class Value:
    """Whatever is asked of it waits in C for a lock."""

    def __init__(self, lock: Any) -> None:
        self.item = self.tolist = self.digest = lock.acquire


@pytest.fixture
def lock() -> Iterator[Any]:
    lock = threading.Lock()
    with lock:
        yield lock


def frame_in(source: str, **names: Any) -> FrameType:
    """The frame of `source`, in which a thread waits."""
    name = f"<gpu test {source!r}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    code = compile(source, name, "exec")
    thread = threading.Thread(target=exec, args=(code, names), daemon=True)
    thread.start()
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None and frame.f_code is code:
            return frame


@pytest.mark.parametrize(
    ("source", "waits"),
    [
        ("x.item()", True),
        ("total = 1 + (x\n    .tolist())", True),
        ("print(x.item())", True),
        ("x.digest()", False),
        ("digest = x.item\ndigest()", False),
    ],
)
def test_a_call_that_may_wait_for_a_gpu_is_told_by_what_it_calls(
    source: str, waits: bool, lock: Any
) -> None:
    frame = frame_in(source, x=Value(lock))
    assert_settles(frame, waits)


def assert_settles(frame: FrameType, waits: bool) -> None:
    """The thread may not have come to its wait yet."""
    for _ in range(1000):
        if gpu.may_wait_in(frame) is waits:
            break
        threading.Event().wait(0.001)
    assert gpu.may_wait_in(frame) is waits


@pytest.mark.parametrize(
    "line", ["x.kernel()", "y = 2 + (x @\n    True)", "if x:\n    y = -x", "y = 1\ny += x"]
)
@pytest.mark.parametrize("cuda", [True, False])
def test_what_computes_with_a_tensor_of_a_gpu_may_wait_for_it(
    line: str, cuda: bool, lock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no tensor of a GPU here. Another class stands for it, whose operators wait in C for a
    # lock, as a launch does behind a full queue of a GPU's.
    acquire = dict.fromkeys(("kernel", "__matmul__", "__neg__", "__radd__"), lock.acquire)
    tensor = type("Tensor", (), acquire)()
    assert not gpu.is_on_gpu(torch.ones(2)) and not gpu.is_on_gpu(tensor)
    monkeypatch.setattr(gpu, "is_on_gpu", lambda value: cuda and value is tensor)
    frame = frame_in(line, x=tensor)
    assert_settles(frame, cuda)


def run_as(module: str, source: str, lock: Any) -> FrameType:
    """The frame of code of a module of torch's, in which a thread waits."""
    return frame_in(source, __name__=module, x=Value(lock))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("torch.amp.grad_scaler", "sum(v.item() for v in optimizer_state["),
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "_event.synchronize()"),
        ("torch.cuda.streams", "super().synchronize()"),
        ("torch._tensor_str", ".item()"),
        ("torch.autograd.graph", ".run_backward("),
        ("torch.utils.data._utils.pin_memory", ".pin_memory()"),
    ],
)
def test_in_a_module_of_torchs_every_call_may(module: str, line: str, lock: Any) -> None:
    # An optimizer that reads (GradScaler), FSDP2, synchronize, print(tensor), the next backward, a
    # DataLoader with pinned memory: each waits in a call in C on a line of torch's own Python.
    assert line in inspect.getsource(importlib.import_module(module)), "as in this torch"
    assert gpu.may_wait_in(run_as(module, "x.digest()", lock))


def test_a_thread_that_the_main_one_waits_for_may_wait_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch, lock: Any
) -> None:
    one = SimpleNamespace(issued=lambda: 9, waits_for=lambda: 3)
    waiting = Waiting(Any, Any, one, SimpleNamespace(is_users=None))  # type: ignore[arg-type]
    pins = run_as("torch.utils.data._utils.pin_memory", "x.digest()", lock)
    awaited = Awaited(threading.Thread(), pins, 2)
    clock_s = itertools.count(100.0)
    monkeypatch.setattr(gpu, "in_use", lambda: True)
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock_s)))
    assert [waiting._hung_on_gpu(awaited) for _ in range(2)] == [None, 3]


def test_a_gpu_that_works_off_a_queue_of_collectives_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, lock: Any
) -> None:
    queue = SimpleNamespace(issued=lambda: 9, waits_for=lambda: 3)
    waiting = Waiting(Any, Any, queue, SimpleNamespace(is_users=None))  # type: ignore[arg-type]
    awaited = Awaited(threading.main_thread(), frame_in("x.item()", x=Value(lock)), 2)
    clock_s = itertools.count(100.0)
    monkeypatch.setattr(gpu, "in_use", lambda: True)
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock_s)))
    assert [waiting._hung_on_gpu(awaited) for _ in range(2)] == [None, 3]
    queue.waits_for = lambda: 4
    assert [waiting._hung_on_gpu(awaited) for _ in range(2)] == [None, 4], "the third was done"


def test_what_a_gpu_still_works_on_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(4)
    assert gpu.is_readable(tensor) and digests.digest("weight", tensor) is not None
    assert values.get(VariableToSend("x", False), {"x": [tensor]}).pickle
    monkeypatch.setattr(gpu, "is_readable", lambda tensor: False)
    assert digests.digest("weight", tensor) is None
    error = values.get(VariableToSend("x", False), {"x": [tensor]}).error
    assert error.startswith("a list cannot be sent: its GPU is still working")
