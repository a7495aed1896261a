"""Which thread holds a rank up, in which library it waits, and for which key of a store."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType

import filelock
import pytest
import torch
import torch.distributed as dist
from support import eventually

from ddp_notebook.rank.collectives import observer
from ddp_notebook.rank.inspect import blocked, frames, store_keys, waiting


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


def test_a_thread_that_waits_for_a_lock_of_the_users_does_not_wait_in_torch() -> None:
    lock = threading.Lock()
    lock.acquire()
    with running(lock.acquire) as thread:
        eventually(lambda: blocked.in_torch(thread.native_id or 0) is False, 10, "it waits")
        lock.release()


def test_of_a_thread_that_runs_or_is_gone_it_is_not_known_where_it_waits() -> None:
    assert blocked.in_torch(os.getpid()) is None
    assert blocked.in_torch(2**22 + 1) is None


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
        eventually(lambda: blocked.in_torch(thread.native_id or 0), 10, "it waits")
        with running(partial(OBSERVED["observed"], ended.wait)) as other:
            eventually(lambda: frames_in(other, "observed"), 10, "a thread of the user's waits")
            assert record_of_engine(thread) is None
            ended.set()


# -- what a rank waits for in its own code --------------------------------------------------


def test_the_file_for_whose_lock_a_thread_waits_and_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    with path.open("w") as held, path.open("w") as wanted:
        fcntl.flock(held, fcntl.LOCK_EX)
        with running(lambda: fcntl.flock(wanted, fcntl.LOCK_EX)) as thread:
            native_id = thread.native_id or 0
            told = eventually(lambda: blocked.file_lock(native_id), 10, "it waits")
            assert told and Path(told).readlink() == path
            path.unlink()
            assert blocked.holder(told) == os.getpid(), "also of a file that was deleted"
            fcntl.flock(held, fcntl.LOCK_UN)
    assert blocked.file_lock(os.getpid()) == ""
    path.touch()
    assert blocked.holder(str(path)) == blocked.holder(str(tmp_path / "none")) == 0


def test_a_lock_that_is_asked_for_again_and_again_is_waited_for_unless_for_a_time(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "hub.lock")

    def asks(thread: threading.Thread) -> str:
        current = sys._current_frames().get(thread.ident or 0)
        return waiting._polled_lock(frames.frames_of(current))

    def ask(timeout_s: float) -> None:
        with contextlib.suppress(filelock.Timeout):
            filelock.FileLock(path).acquire(timeout_s).lock.release()

    with filelock.FileLock(path) as held:
        assert blocked.holder(path) == os.getpid()
        with running(partial(ask, -1)) as ever, running(partial(ask, 60)) as a_while:
            eventually(lambda: asks(ever) == path, 10, "it waits")
            eventually(lambda: frames_in(a_while, "acquire"), 10, "the other asks too")
            assert asks(a_while) == ""
            held.release()


def test_who_opens_a_fifo_waits_for_another_process_at_it(tmp_path: Path) -> None:
    path = tmp_path / "orders"
    os.mkfifo(path)
    with running(lambda: path.open().close()) as thread:
        eventually(lambda: blocked.fifo(thread.native_id or 0) == str(path), 10, "it opens it")
        path.open("w").close()


@pytest.mark.parametrize("limit_s", [None, 60])
def test_threads_are_at_rest_where_each_waits_for_a_lock_without_a_limit(
    limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    everyone = sys._current_frames

    def of_python() -> dict[int, FrameType]:
        """Without threads that Python did not start: a worker of xdist has one."""
        known = {each.ident for each in threading.enumerate()}
        return {ident: frame for ident, frame in everyone().items() if ident in known}

    monkeypatch.setattr(sys, "_current_frames", of_python)
    with running(lambda: ended.wait(limit_s)) as thread:
        others = {each for each in threading.enumerate() if each is not thread}
        monkeypatch.setattr(waiting, "_beside", lambda each, current: each in others)
        if limit_s is None:
            assert eventually(waiting._at_rest, 10, "it waits") == [thread]
        else:
            eventually(lambda: frames_in(thread, "wait"), 10, "it waits")
            assert waiting._at_rest() is None, "it goes on in a minute"
        ended.set()


@pytest.mark.parametrize(
    ("waits_in", "users", "expected"),
    [
        ("__main__", True, True),
        ("__main__", False, False),
        ("ddp_notebook.rank.events", True, False),
    ],
)
def test_a_wait_counts_in_code_of_the_users_and_not_in_ours_that_it_calls(
    waits_in: str, users: bool, expected: bool
) -> None:
    ended, module = threading.Event(), {"__name__": waits_in}
    exec("def flush(ended): ended.wait()", module)
    with running(lambda: module["flush"](ended)) as thread:  # type: ignore[operator]
        eventually(lambda: frames_in(thread, "wait"), 10, "it waits")
        stack = frames.frames_of(sys._current_frames()[thread.ident or 0])
        of_users = lambda name: users and name == __file__  # noqa: E731
        assert waiting._is_users_wait(stack, of_users) is expected
        ended.set()


def test_a_process_that_waits_at_a_pipe_of_ours_is_told_from_one_that_works() -> None:
    ours = (blocked.READ, blocked.WRITE)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reads:
        eventually(lambda: blocked.at_pipe_of_ours(reads.pid, ours), 10, "it reads")
        assert not blocked.at_pipe_of_ours(reads.pid, (blocked.WRITE,))
        assert reads.stdin is not None
        reads.stdin.close()
    command = ["head", "-c", "1000000", "/dev/zero"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writes:
        eventually(lambda: blocked.at_pipe_of_ours(writes.pid, ours), 10, "it writes")
        assert writes.stdout is not None
        assert len(writes.stdout.read()) == 1_000_000
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as sleeps:
        assert not blocked.at_pipe_of_ours(sleeps.pid, ours), "it is in no pipe"
        sleeps.kill()


def test_where_a_signal_runs_code_of_the_users_a_rank_that_waits_may_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "valid_signals", lambda: {signal.SIGUSR2, signal.SIGTERM})
    assert not waiting._may_be_called()
    set_handler = torch.utils.data._utils.signal_handling._set_SIGCHLD_handler
    monkeypatch.setattr(signal, "valid_signals", lambda: {signal.SIGCHLD, signal.SIGUSR2})
    child = signal.getsignal(signal.SIGCHLD)
    set_handler()
    assert not waiting._may_be_called(), "a DataLoader has set it"
    signal.signal(signal.SIGCHLD, child)
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert waiting._may_be_called()
    finally:
        signal.signal(signal.SIGUSR2, before)
