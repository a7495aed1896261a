"""What stands for NCCL and a GPU in a rank: collectives return at once, and end later.

There is no GPU here. The works are gloo's: a thread waits for them in the caller's place, and the
GPU works while one of them is not done. Who reads a tensor waits for that in C, as in NVIDIA's
driver. To our own code all tensors lie on the GPU, and `readings` has the places where it reads one
while the GPU works.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.session import Session

BEGIN = (
    f"__import__('sys').path.insert(0, {str(Path(__file__).parent)!r})\n"
    "__import__('lazy').begin()\n"
    "__import__('sys').path.pop(0)\n"
)
"""Has the rank that runs it be such a one; also at the head of a script, in a group."""
_READ_BY_A_METHOD = ("item", "tolist", "cpu", "numpy")
_COMPUTED = ("sum", "all", "any", "mean", "clone")
_COMPUTED_BY_PYTHON = ("__eq__", "__add__", "__mul__")
"""A GPU would begin these when it comes to them; here nothing but a wait can keep that order."""
_READ_BY_PYTHON = ("__bool__", "__float__", "__int__", "__index__", "__repr__", "__format__")

NOT_SO = {
    "two groups in opposite order": "communicators run side by side, on a GPU as of gloo",
    "FSDP2, evaluated on rank 0 alone": "a reduce_scatter of gloo's never says that it has ended",
    "send and send": "messages of gloo pass each other, and on a GPU they are done in order",
    "two that send to each other": "the same",
    "two threads that use one group": "the threads do not wait in it, so they leave no such trace",
    "no barrier before the group is destroyed": "NCCL waits in there, and gloo does not",
    "test_a_benchmark_measures_torch_and_not_us": "it asks CUDA",
    "test_held_ranks_stand_before_a_collective": "it is stepped over, as it returns at once",
}
"""Parts of names of tests that cannot be with these ranks (`DDP_NOTEBOOK_LAZY=1`), and why.

Not run so: those that read in which collective a rank waits, for it waits for its GPU; and those
that count runs.
"""

stream: dict[int, tuple[Any, threading.Event]] = {}
"""The works that the GPU was given, by their ids, and what is set once they have ended."""
readings: list[str] = []


@contextlib.contextmanager
def lazily(session: Session) -> Iterator[Session]:
    """Have the ranks of `session` be such ones, also those that an abort or a restart makes."""
    plain = {name: getattr(session, name) for name in ("abort", "restart")}

    def followed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            result = plain[name](*args, **named)
            if session.record.snapshot.ready:
                session.run_cell(BEGIN).raise_for_error()
            return result

        return call

    session.run_cell(BEGIN).raise_for_error()
    for name in plain:
        setattr(session, name, followed(name))
    try:
        yield session
    finally:
        for name, method in plain.items():
            setattr(session, name, method)
        session.restart()


def is_working() -> bool:
    """Return whether the GPU has work left."""
    return not all(over.is_set() for _, over in tuple(stream.values()))


def compute(seconds: float) -> None:
    """Give the GPU work of so many seconds."""
    _issue(object(), lambda: threading.Event().wait(seconds))


def _issue(work: Any, wait: Callable[[], object]) -> None:
    over = threading.Event()
    stream[id(work)] = work, over

    def until_done() -> None:
        with contextlib.suppress(RuntimeError):  # aborted
            wait()
        over.set()

    threading.Thread(target=until_done, daemon=True).start()


def begin() -> None:
    """Begin, once in a process."""
    import torch
    import torch.distributed as dist

    from ddp_notebook.rank import gpu
    from ddp_notebook.rank.collectives.time_limits import Group

    if stream or dist.Work.wait.__name__ == "queue_on_gpu":
        return
    wait, is_completed = dist.Work.wait, dist.Work.is_completed

    def queue_on_gpu(work: Any, timeout: Any = None) -> bool:
        if id(work) not in stream:
            _issue(work, lambda: wait(work))
        return True

    def is_over(work: Any) -> bool:
        return stream[id(work)][1].is_set() if id(work) in stream else bool(is_completed(work))

    dist.Work.wait = queue_on_gpu  # type: ignore[method-assign]
    dist.Work.is_completed = is_over  # type: ignore[method-assign]
    gpu.in_use = lambda: True
    gpu.is_working = is_working
    gpu.is_readable = lambda tensor: not is_working()
    Group.waits = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]
    kind: Any = torch.Tensor
    on_gpu = {"is_cuda": True, "is_cpu": False, "device": torch.device("cuda:0")}
    for name, value in on_gpu.items():
        setattr(kind, name, _to_us(getattr(kind, name), value))
    for name in (*_READ_BY_A_METHOD, *_COMPUTED):
        setattr(kind, name, _waiting_method(getattr(kind, name), reads=name not in _COMPUTED))
    for name in (*_READ_BY_PYTHON, *_COMPUTED_BY_PYTHON):
        reads = name in _READ_BY_PYTHON
        setattr(kind, name, _waiting(getattr(kind, name), reads=reads))
    torch.equal = _waiting(torch.equal)
    torch.sum = _waiting(torch.sum, reads=False)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("ddp_notebook.")


def _to_us(attribute: Any, value: Any) -> property:
    """What our code sees as `value`, and all other code as it is."""

    def get(tensor: Any) -> Any:
        return value if _is_ours(sys._getframe(1)) else attribute.__get__(tensor)

    return property(get)


def _waiting_method(method: Any, *, reads: bool) -> property:
    """A method that is looked up on the tensor: so no frame of Python's is there while it waits."""
    return property(
        lambda tensor: _once_done(method.__get__(tensor), sys._getframe(1), reads=reads)
    )


def _waiting(function: Any, *, reads: bool = True) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        item = _once_done(lambda: function(*args, **named), sys._getframe(1), reads=reads)
        return item()

    return call


def _once_done(
    compute: Callable[..., Any], caller: FrameType, *, reads: bool
) -> Callable[..., Any]:
    """What computes a value when it is called, in C if the GPU works."""
    if not is_working():
        return compute
    if _is_ours(caller) or threading.current_thread().name == "ddp-questions":
        module = caller.f_globals["__name__"]
        # The state of the CPU's generator, and the ranks of a mesh, lie on the host.
        of_host = caller.f_code.co_name == "random_state" or module.endswith(".device_mesh")
        if reads and not of_host:
            readings.append(f"{module}:{caller.f_lineno}")
        return compute
    values: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def when_done() -> None:
        while is_working():
            threading.Event().wait(0.01)
        values.put(compute())

    threading.Thread(target=when_done, daemon=True).start()
    return values.get
