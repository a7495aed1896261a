"""Which thread holds a rank up, in which library it waits, and for which key of a store."""

from __future__ import annotations

import inspect
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import eventually
from torch.utils.data import dataloader
from torch.utils.data._utils import pin_memory

from ddp_notebook.rank.collectives import observer
from ddp_notebook.rank.inspect import frames, process, store_keys, waiting


@contextmanager
def running(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """A thread that is at `work`; whoever is in here ends it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def waits_for(thread: threading.Thread) -> threading.Thread | None:
    current = sys._current_frames()
    stack = frames.frames_of(current.get(thread.ident or 0))
    return waiting._waits_for_thread(stack, current)


def test_who_joins_a_thread_is_held_up_by_it() -> None:
    ended = threading.Event()
    with running(ended.wait) as inner, running(inner.join) as outer:
        eventually(lambda: waits_for(outer) is inner, 10, "the outer one joins")
        assert waits_for(inner) is None
        ended.set()


def test_who_joins_for_some_seconds_only_is_not() -> None:
    ended = threading.Event()
    with running(ended.wait) as inner, running(lambda: inner.join(60)) as outer:
        eventually(lambda: frames_in(outer, "join"), 10, "the outer one joins")
        assert waits_for(outer) is None
        ended.set()


def test_who_waits_for_a_result_is_held_up_by_the_thread_that_computes_it() -> None:
    ended = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ended.wait)
        names: list[str] = []

        def work() -> None:
            names.append(threading.current_thread().name)
            ended.wait()

        future = pool.submit(work)
        with running(future.result) as outer:
            other = eventually(lambda: waits_for(outer), 10, "the outer one waits")
            assert other is not None
            assert [other.name] == names
            ended.set()


def frames_in(thread: threading.Thread, name: str) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return any(each.f_code.co_name == name for each in frames.chain(frame))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    for name in ("get", "wait", "multi_get"):
        monkeypatch.setattr(dist.Store, name, getattr(dist.Store, name))
    store_keys.StoreKeys().attach()
    return dist.HashStore()


def key_of(thread: threading.Thread) -> str:
    return store_keys.awaited(frames.chain(sys._current_frames().get(thread.ident or 0)))


def test_the_key_that_a_thread_waits_for_is_known_until_it_is_set(store: dist.Store) -> None:
    with running(lambda: store.get("ready")) as thread:
        eventually(lambda: key_of(thread) == "ready", 10, "it waits")
        store.set("ready", "1")
    assert store.get("ready") == b"1"
    with running(lambda: store.wait(["ready", "set"])) as thread:
        eventually(lambda: key_of(thread) == "ready, set", 10, "it waits")
        store.set("set", "1")


def test_who_gives_up_soon_does_not_count_as_waiting_for_a_key(store: dist.Store) -> None:
    def work() -> None:
        store.wait(["stop"], timedelta(seconds=30))

    with running(work) as thread:
        eventually(lambda: frames_in(thread, "waits_for_key"), 10, "it waits")
        assert key_of(thread) == ""
        store.set("stop", "1")


def test_what_is_seen_of_a_thread_that_goes_on_meanwhile_is_of_another_moment() -> None:
    first, second = threading.Event(), threading.Event()

    def both() -> None:
        first.wait()
        second.wait()

    with running(both) as thread:
        eventually(lambda: frames_in(thread, "wait"), 10, "it waits")
        frame = sys._current_frames()[thread.ident or 0]
        seen = waiting.Awaited(thread, frame, frame.f_lasti)
        assert not seen.has_moved
        first.set()
        eventually(lambda: seen.has_moved, 10, "it goes on")
        second.set()


def test_every_function_of_torch_that_may_wait_for_others_is_known_by_its_name() -> None:
    """torch adds names: reduce_scatter_single is what FSDP2 calls from 2.13 on."""
    functions = vars(dist.distributed_c10d).items()
    public = [(name, f) for name, f in functions if type(f) is FunctionType and name[0] != "_"]
    may_wait = {name for name, f in public if "async_op" in inspect.signature(f).parameters}
    assert may_wait
    assert may_wait <= set(frames.WAITING_IN)


OBSERVED: dict[str, Callable[[Callable[[], object]], None]] = {}
exec(  # a frame that is known by its file: the observer's
    compile("def observed(wait):\n    number = 7\n    wait()", observer.__file__, "exec"), OBSERVED
)


def in_backward(hook: Callable[[], object], deep: int) -> None:
    """`hook` runs in a backward; nested so deep that a thread of the engine's does, from 60 on."""
    x = torch.ones(1, requires_grad=True)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, deep: int) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            nonlocal deep
            deep -= 1
            if deep:
                with torch.enable_grad():
                    Nested.apply(x, deep).backward()
            else:
                hook()
            return gradients[0], None

    Nested.apply(x, deep).backward()


def record_of_engine(thread: threading.Thread) -> int | None:
    frame = sys._current_frames().get(thread.ident or 0)
    return waiting._record_of_engine(waiting.Awaited(thread, frame))


def test_who_waits_for_a_thread_of_autograds_waits_for_its_collective() -> None:
    ended = threading.Event()
    work = partial(in_backward, partial(OBSERVED["observed"], ended.wait), deep=70)
    with running(work) as thread:
        eventually(lambda: record_of_engine(thread) == 7, 10, "it waits")
        ended.set()


def test_who_waits_for_a_computation_of_autograds_does_not() -> None:
    ended = threading.Event()
    with running(partial(in_backward, ended.wait, deep=70)) as thread:
        eventually(lambda: frames_in(thread, "_engine_run_backward"), 10, "it waits")
        with running(partial(OBSERVED["observed"], ended.wait)) as other:
            eventually(lambda: frames_in(other, "observed"), 10, "a thread of the user's waits")
            assert record_of_engine(thread) is None
            ended.set()


@pytest.mark.parametrize("copies", [True, False])
def test_who_waits_for_a_batch_is_held_up_by_the_thread_that_copies_it_into_pinned_memory(
    copies: bool,
) -> None:
    # A lock in C stands for the wait for the GPU, or for a batch that workers have yet to load.
    lock, batches = threading.Lock(), queue.Queue[str]()
    batch = SimpleNamespace(pin_memory=lock.acquire)
    work = partial(pin_memory.pin_memory, batch) if copies else lock.acquire
    iterator = SimpleNamespace(_data_queue=batches, _workers=[])
    get = dataloader._MultiProcessingDataLoaderIter._try_get_data
    lock.acquire()
    with running(work) as pins, running(partial(get, iterator, 60)) as outer:
        iterator._pin_memory_thread = pins
        held_up_by = pins if copies else None
        eventually(lambda: frames_in(outer, "_try_get_data"), 10, "it waits for the batch")
        eventually(lambda: waits_for(outer) is held_up_by, 10, "the other one is where it waits")
        lock.release()
        batches.put("batch")


# -- where a rank stands ---------------------------------------------------------------------


def test_a_wait_without_a_limit_is_told_from_one_that_ends_by_itself() -> None:
    def without_limit(thread: threading.Thread) -> bool:
        return waiting._waits_without_limit(
            frames.frames_of(sys._current_frames().get(thread.ident or 0))
        )

    box: queue.Queue[int] = queue.Queue()
    with running(box.get) as for_ever, running(lambda: box.get(timeout=60)) as a_while:
        eventually(lambda: without_limit(for_ever), 10, "it waits")
        eventually(lambda: frames_in(a_while, "wait"), 10, "the other waits, too")
        assert not without_limit(a_while)
        box.put(1)
        box.put(2)


def test_who_is_blocked_stands_still_until_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, main_s, all_s = 10.0, 3.0, 5.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(waiting.time, "process_time", lambda: all_s)
    monkeypatch.setattr(waiting, "main_cpu_s", lambda: main_s)
    stillness = waiting.Stillness()
    here = waiting.Awaited(threading.main_thread(), sys._getframe(), 7)
    assert stillness.look(here) == 0.0
    now_s = 14.0
    assert stillness.look(here) == 4.0
    assert stillness.look(replace(here, instruction=9)) == 0.0
    now_s, all_s = 18.0, 5.2
    assert stillness.look(replace(here, instruction=9)) == 4.0, "others answered questions"
    main_s = 3.000001
    assert stillness.look(replace(here, instruction=9)) == 0.0
    now_s, all_s = 19.0, 5.5
    assert stillness.look(replace(here, instruction=9)) == 0.0, "another thread works"


def test_the_cpu_time_of_the_main_thread_grows_only_as_it_runs() -> None:
    before, seen = process.main_cpu_s(), []
    with running(lambda: seen.extend((process.main_cpu_s(), process.main_cpu_s()))):
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
    assert len(seen) == 2 and process.main_cpu_s() >= before + 0.01
