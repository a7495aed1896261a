"""The stages of `%ddp_wrap` on a rank: the construction of a DDP object, one piece at a time."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from IPython.core.getipython import get_ipython
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.model.ddp import BucketPlan, RankFailure, Reduction, Synced, WrapStage
from ddp_notebook.rank import calls, gpu
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.training import ddp

_Answer = TypeVar("_Answer")


class DDPConstruction:
    """The stages on this rank. Failures are answers, too, since the session waits for one."""

    def __init__(self, events: EventSender, main_thread: MainThread) -> None:
        self._events = events
        self._main_thread = main_thread
        self._made: dict[str, DistributedDataParallel] = {}
        """Constructed and not yet assigned to the user's variable: on all ranks or on none."""

    def describe(self, request: calls.ModelName) -> calls.Described:
        """Describe a variable: a DDP object, a module, another value, or absent."""
        names = get_ipython().user_ns
        value = names.get(request.name)
        if isinstance(value, torch.nn.Module):
            kind = "ddp" if isinstance(value, DistributedDataParallel) else "module"
            return calls.Described(kind, type(value).__name__, ddp.problem_of(value))
        kind = "other" if request.name in names else "absent"
        return calls.Described(kind, type(value).__name__)

    def compare(self, request: calls.ModelToCompare) -> calls.Compared | RankFailure:
        """The parameters of a model, and their values' hashes."""

        def work() -> calls.Compared:
            module = _module(request.name)
            tensors = _tensors(module) if request.hashed else []
            hashes = self._hashes(tensors)
            return calls.Compared(ddp.contents(module), hashes)

        return self._in_stage(WrapStage.PARAMETERS_VERIFIED, work)

    def verify(self, request: calls.ModelName) -> calls.Nothing | RankFailure:
        """torch's own check of shapes."""

        def work() -> calls.Nothing:
            ddp.verify_shapes(_module(request.name))
            return calls.Nothing()

        return self._in_stage(WrapStage.PARAMETERS_VERIFIED, work)

    def broadcast(self, request: calls.ModelName) -> Synced | RankFailure:
        """Take rank 0's values; hashes of all tensors before and after."""

        def work() -> Synced:
            module = _module(request.name)
            tensors = _tensors(module)
            before = self._hashes(tensors)
            ddp.sync(module)
            after = self._hashes(tensors)
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return Synced(before, after, size)

        return self._in_stage(WrapStage.BROADCAST, work)

    def plan_buckets(self, request: calls.DDPOptions) -> BucketPlan | RankFailure:
        """The buckets DDP would make."""
        return self._in_stage(
            WrapStage.BUCKETS,
            lambda: ddp.bucket_plan(_module(request.name), request.cap_mb, request.find_unused),
        )

    def construct(self, request: calls.DDPOptions) -> calls.Constructed | RankFailure:
        """Make the DistributedDataParallel object; `assign` gives it to the user."""

        def work() -> calls.Constructed:
            module = _module(request.name)
            made = self._made[request.name] = ddp.make(module, request.cap_mb, request.find_unused)
            return calls.Constructed(*ddp.reducer_facts(made))

        return self._in_stage(WrapStage.REDUCER, work)

    def assign(self, request: calls.Assignment) -> bool:
        """Assign the DDP object to a variable, or discard it; False without one."""
        made = self._made.pop(request.name, None)
        if request.target and made is not None:
            get_ipython().user_ns[request.target] = made
        return made is not None

    def reduction(self, request: calls.ModelName) -> Reduction:
        """Read from a DDP object how it reduced its last steps."""
        return ddp.reduction(_module(request.name))

    def _hashes(self, tensors: list[torch.Tensor]) -> tuple[str, ...]:
        gpu.await_work(self._main_thread.awaits_gpu)
        return tuple(ddp.hash_of(tensor) for tensor in tensors)

    # -- around a stage ----------------------------------------------------------------

    def _in_stage(self, stage: WrapStage, work: Callable[[], _Answer]) -> _Answer | RankFailure:
        """Do the work; meanwhile the board shows the stage. An interrupt is raised only within."""
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.ExitStack() as after:
            after.callback(signal.signal, signal.SIGINT, previous)
            after.enter_context(self._events.at_work(f"%ddp_wrap: {stage.value}"))
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return work()
            except KeyboardInterrupt:
                return RankFailure("interrupted", "was interrupted")
            except (MemoryError, RuntimeError, ValueError, TypeError, AttributeError) as error:
                kind = "memory" if ddp.is_out_of_memory(error) else "error"
                lines = str(error).strip().splitlines()
                text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
                return RankFailure(kind, text[:300])
            finally:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _module(name: str) -> Any:
    return get_ipython().user_ns[name]


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and the buffers, without their history."""
    parameters, buffers = ddp.states_of(module)
    return [tensor.detach() for _, tensor in (*parameters, *buffers)]
