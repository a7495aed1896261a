"""Handles of asynchronous collectives: whether the user waits before the tensor is used.

Only collectives that the user's own line starts on tensors of a CPU: torch's own, and libraries',
know what they do. A handle is waited for when it is asked anything (`wait`, `is_completed`,
`get_future`), and when a barrier follows. That a tensor was changed shows in its version.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook import model
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.call_sites import Caller, CallSite
from ddp_notebook.rank.inspect.safe_repr import TENSORS

WATCHED = frozenset({"allreduce", "broadcast", "reduce", "recv", "send"})
"""Methods of a group during which torch itself does not change the version of the tensor."""
_ASKED = ("wait", "is_completed", "is_success", "get_future", "result", "synchronize", "exception")
_SENDS = ("isend", "send")
# Read when this is imported, before `AsyncWorks.attach` puts methods of ours in their place.
completed: Callable[[Any], bool] = dist.Work.is_completed
wait_for: Callable[[Any], bool] = dist.Work.wait
"""torch's own methods: asking a handle by them does not count as the user's asking."""
_future_of: Callable[[Any], Any] = dist.Work.get_future


_asking: set[CodeType] = set()


def is_asked(frame: FrameType) -> bool:
    """Return whether a handle is asked something in this frame, such as to wait."""
    return frame.f_code in _asking


def error_of(work: Any) -> Exception | None:
    """With what a completed one ended; None if it ended well, or cannot tell, as sends cannot."""
    try:
        future = _future_of(work)
    except Exception:  # noqa: BLE001  # torch's
        return None
    try:
        if future.done():
            future.value()
    except Exception as error:  # noqa: BLE001  # whatever it is
        return error
    return None


class _Open:
    """A handle that was not asked yet, and its tensor."""

    __slots__ = ("address", "kept", "line", "stepped", "tensor", "version", "work", "written")

    def __init__(self, work: Any, tensor: torch.Tensor, line: model.WorkFacts) -> None:
        self.work = weakref.ref(work)
        self.tensor = weakref.ref(tensor)
        # Tensors up to this size are kept until their handle was asked, or some time has passed:
        # what a function returns is gone before anything else is known of it.
        self.kept = tensor.detach() if tensor.untyped_storage().nbytes() <= 16 * 2**10 else None
        self.address = tensor.data_ptr()
        self.version = tensor._version
        self.line = line
        self.written = self.stepped = False

    def look(self) -> None:
        """Note whether the tensor was changed."""
        tensor = self.tensor() if self.kept is None else self.kept  # of one version counter
        if tensor is not None and not self.written and tensor._version != self.version:
            self.written = True
            self.line.written += 1

    def step(self, gradients: set[int], changed: set[int]) -> None:
        """Note whether a step uses it as a gradient, or changes it as a parameter."""
        # A parameter's `data` is a tensor of its own, with a version of its own.
        if self.address in changed and not self.written:
            self.written = True
            self.line.written += 1
        tensor = self.tensor()
        if tensor is not None and not self.stepped and self.line.operation not in _SENDS:
            self.stepped = tensor.data_ptr() in gradients
            self.line.stepped += self.stepped


class AsyncWorks:
    """The handles of this run."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        """By the id of the handle; an entry is stale once another handle has that id."""
        self._lines: dict[int, model.WorkFacts] = {}
        """By the number of the call site."""
        self.functional: model.FunctionalFacts | None = None
        """None as long as there is nothing to count: its module is loaded when it is needed."""
        self._left_before = 0

    def attach(self) -> None:
        """Wrap the methods of handles, to record when they are asked."""
        for name in _ASKED:
            original = getattr(dist.Work, name, None)
            if original is not None:
                setattr(dist.Work, name, self._asked(original))

    def begin(self) -> None:
        """Forget the last run."""
        self._open.clear()
        self._lines.clear()
        self.functional = None
        self._left_before = torch_private.unwaited_results()

    def run_ends(self) -> None:
        """The run is over. torch counts results for each thread: only this one knows them."""
        known = self.functional
        if known is not None and known.direct:
            known.left = max(0, torch_private.unwaited_results() - self._left_before)

    @property
    def suspicious(self) -> bool:
        """True when a tensor was changed, or used, before its handle was waited for, or may be."""
        seen = any(line.written or line.stepped for line in self._lines.values())
        return seen or bool(self._open or (self.functional is not None and self.functional.left))

    def _asked(self, original: Any) -> Any:
        # Every wrapper holds this dict: `begin` clears it, and never replaces it.
        opened = self._open

        @functools.wraps(original)
        def ask(self: Any, *args: Any, **named: Any) -> Any:
            # It is around every wait of every work of torch's: while nothing is open that costs
            # nothing.
            if opened:
                handle = opened.get(id(self))
                if handle is not None and handle.work() is self:
                    del opened[id(self)]
                    handle.look()
            return original(self, *args, **named)

        _asking.add(ask.__code__)  # type: ignore[attr-defined]  # of the function inside
        return ask

    # -- what happens ----------------------------------------------------------------------

    def issued(self, work: Any, method: str, args: Sequence[Any], site: CallSite) -> None:
        """A group's method was called at `site`, whose caller does not wait, and gave `work`."""
        if site.caller is not Caller.USER:
            self._functional(method, site)
            return
        if method not in WATCHED or len(args[0]) != 1:
            return
        tensor = args[0][0]
        if not _alone(tensor):
            return
        line = self._lines.get(site.number)
        if line is None:
            if len(self._lines) >= 64:
                return
            name = site.api or method
            line = self._lines[site.number] = model.WorkFacts(name, place=site.line)
        line.issued += 1
        if id(work) in self._open:  # of a handle that is gone, and was never asked
            self._forget(id(work))
        elif len(self._open) >= 256:
            self._forget(next(iter(self._open)))
        self._open[id(work)] = _Open(work, tensor, line)

    def _functional(self, method: str, site: CallSite) -> None:
        known = self.functional = self.functional or model.FunctionalFacts()
        if site.caller is not Caller.OPERATOR_OF_USER:
            known.others += 1
            return
        if not known.direct:
            known.operation, known.place = method, site.line
        known.direct += 1

    def _forget(self, number: int) -> None:
        handle = self._open.pop(number)
        handle.look()
        handle.line.unwaited += 1

    def barrier(self) -> None:
        """A barrier is over: gloo's waits for all that was issued before."""
        for handle in list(self._open.values()):
            handle.look()
        self._open.clear()

    def step(self, parameters: Iterable[Any]) -> None:
        """An optimizer is about to read the gradients of `parameters`, and to change these."""
        if not self._open:
            return
        updated = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = {parameter.grad.data_ptr() for parameter in updated}
        changed = {parameter.data_ptr() for parameter in updated}
        for handle in list(self._open.values()):
            handle.look()
            handle.step(gradients, changed)

    # -- reports ------------------------------------------------------------------------------

    def facts(self) -> tuple[model.WorkFacts, ...]:
        """The lines whose tensors were changed, or used, before their handles were waited for."""
        left: dict[int, int] = {}
        for handle in list(self._open.values()):
            handle.look()
            left[id(handle.line)] = left.get(id(handle.line), 0) + 1
        return tuple(
            replace(line, unwaited=line.unwaited + left.get(id(line), 0))
            for line in list(self._lines.values())
            if line.written or line.stepped
        )


def _alone(tensor: Any) -> bool:
    """True of a tensor that shares its memory, and so its version, with no other part of it."""
    return bool(
        type(tensor) in TENSORS
        and tensor.is_cpu
        and not tensor.is_inference()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
