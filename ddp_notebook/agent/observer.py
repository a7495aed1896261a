"""A process group around torch's own that writes down, guards and can hold each collective.

torch, DDP's reducer included, calls it as any group; what it returns is torch's own work. It
adds no communication and no synchronisation. When something of ours fails here, the observer
takes itself out and the collective goes on without it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_notebook.agent import guard, holding, operations, sites, torch_private
from ddp_notebook.agent.operations import Facts, Operation
from ddp_notebook.agent.replicas import tracker
from ddp_notebook.agent.ring import RingWriter
from ddp_notebook.model import DEFAULT_GROUP, Part, Phase
from ddp_notebook.model.ring import DIMENSIONS, NOBODY, PARTS, PHASES, REST

_PARTS = {part: number for number, part in enumerate(PARTS)}
_PHASES = {phase: number for number, phase in enumerate(PHASES)}
_MOST_PENDING = 2048
_MOST_PREPARED = 2000


class Observer:
    """What this rank issued. One per process."""

    def __init__(self) -> None:
        self.ring: RingWriter | None = None
        self.broken = ""
        """Why it took itself out; empty while it works."""
        self.pending: deque[tuple[int, Any]] = deque(maxlen=_MOST_PENDING)
        """Number and work of what was not seen to be done yet."""
        self._settling = threading.Lock()
        self.run = 0
        """The session's number of the cell or script that runs, or ran last."""
        self.on_bucket: Callable[[Any], None] | None = None
        """Told the gradients of each bucket before they are reduced. Raises nothing."""

    def open(self, path: Path) -> None:
        """Write to the ring at `path` from now on."""
        self.ring = RingWriter(path)

    def begin(self, run: int) -> None:
        """A cell, a script or a set-up begins."""
        self.run = run
        self.pending.clear()
        if self.ring is not None:
            self.ring.begin(run)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, collectives go straight to torch: what they take is measured."""
        ring, self.ring = self.ring, None
        try:
            yield
        finally:
            self.ring = ring

    def settle(self) -> None:
        """Mark what is done by now. From any thread; nobody waits for another one that does it."""
        if not self.pending or not self._settling.acquire(blocking=False):
            return
        try:
            while self.pending and self.pending[0][1].is_completed():
                number, _ = self.pending.popleft()
                if self.ring is not None:
                    self.ring.mark(number, Phase.DONE, time.monotonic_ns())
        except IndexError:  # a cell has begun, and what was pending is forgotten
            pass
        finally:
            self._settling.release()

    def waits_for(self) -> int | None:
        """The oldest collective that is not done yet; None for none."""
        self.settle()
        try:
            return self.pending[0][0]
        except IndexError:
            return None

    def take_out(self, error: BaseException) -> None:
        """Observe no more in this process."""
        self.broken = f"{type(error).__name__}: {error}"


observer = Observer()


class ObservedGroup(dist.ProcessGroup):
    """Torch's group `inner`, observed. Names of ours begin with ddp_notebook."""

    def __init__(self, inner: dist.ProcessGroup, name: str, members: Sequence[int]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub
        self.ddp_notebook_inner = inner
        self.ddp_notebook_members = tuple(members)
        self.ddp_notebook_title = name
        self.ddp_notebook_guard: guard.Guard | None = None
        self.ddp_notebook_ready: dict[Any, _Prepared] = {}
        self.ddp_notebook_run = -1
        """The run whose texts `ddp_notebook_ready` names."""
        self.ddp_notebook_slots = [0, 0]
        """Collectives, and sends and receives, issued so far."""
        self.ddp_notebook_waits = torch_private.group_backend(inner) == "gloo"
        """A collective that is waited for is waited for in here, so that its end is seen."""

    def ddp_notebook_name(self) -> int:
        """The number by which records name the group."""
        assert observer.ring is not None
        value = {"group": self.ddp_notebook_title, "members": list(self.ddp_notebook_members)}
        return observer.ring.text(("group", self.ddp_notebook_title), value)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """The backend of the group inside."""
        return torch_private.group_backend(self.ddp_notebook_inner)


def unobserved(group: Any) -> Any:
    """Torch's own group in an observed one; `group` itself when it is not observed."""
    return getattr(group, "ddp_notebook_inner", group)


def attach() -> bool:
    """Have every group that is made from now on observed; False when torch has changed."""
    if observer.ring is None:
        observer.open(guard.ring_path())
    return torch_private.watch_groups(_Making)


class _Making:
    """A group that is being made: `before` and `after` torch makes it."""

    def __init__(self, store: Any, name: str, rank: int, size: int, members: Sequence[int]) -> None:
        self.store, self.name, self.rank, self.size = store, name, rank, size
        self.members = tuple(members)
        self.guard: guard.Guard | None = None

    def before(self) -> None:
        """Tell the others where this rank's words are."""
        if observer.ring is not None and not observer.broken:
            self.guard = guard.Guard()
            self.guard.tell(self.store, self.name, self.rank)

    def after(self, inner: Any) -> Any:
        """The observed group in place of `inner`, or `inner` where it cannot be."""
        if observer.ring is None or observer.broken:
            return inner
        members = self.members or tuple(range(self.size))
        title = self.name if self.members else DEFAULT_GROUP
        group = ObservedGroup(inner, title, members)
        torch_private.take_place(group, inner)
        if self.guard is not None:
            self.guard.meet(self.store, self.name, self.rank, self.size)
            group.ddp_notebook_guard = self.guard
        return group


class _Prepared:
    """What records of calls that are alike have in common, packed."""

    __slots__ = ("alike", "facts", "rest", "waited")

    def __init__(self, rest: bytes, facts: Facts, alike: int, waited: bool) -> None:
        self.rest, self.facts, self.alike, self.waited = rest, facts, alike, waited


def _method(operation: Operation) -> Callable[..., Any]:
    """The observed form of one of torch's methods."""
    name = operation.method

    def observed(self: ObservedGroup, *args: Any, **named: Any) -> Any:
        call = getattr(self.ddp_notebook_inner, name)
        ring = observer.ring
        if ring is None or observer.broken:
            return call(*args, **named)
        try:
            number, waited = _write(self, operation, args, named, ring)
        except guard.Mismatch:
            raise
        except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
            observer.take_out(error)
            return call(*args, **named)
        if holding.on:
            holding.hold(number)
            ring.mark(number, Phase.ISSUED, 0)
        try:
            work = call(*args, **named)
            if waited and work is not None:
                work.wait()
        except BaseException:
            ring.mark(number, Phase.FAILED, time.monotonic_ns())
            raise
        if waited or work is None:
            ring.mark(number, Phase.DONE, time.monotonic_ns())
        else:
            observer.settle()
            observer.pending.append((number, work))
        return work

    observed.__name__ = name
    observed.__doc__ = f"torch's `{name}`, observed."
    torch_private.keep_from_compiler(observed)
    return observed


def _write(
    group: ObservedGroup,
    operation: Operation,
    args: Sequence[Any],
    named: dict[str, Any],
    ring: RingWriter,
) -> tuple[int, bool]:
    """Write the record of a call that begins, and compare it with the other ranks'.

    Its number, and whether its end is waited for.
    """
    frame = sys._getframe(2)
    site = sites.site(frame)
    label = sites.label(frame, site) if operation.labelled and site.labels else ""
    try:
        key = operation.key(args) if not named else None
    except (AttributeError, IndexError, ValueError, TypeError):  # called in another way
        key = None
    whole = (key, site.number, label, operation.method)
    ready = group.ddp_notebook_ready.get(whole) if group.ddp_notebook_run == observer.run else None
    if ready is None:
        ready = _prepare(group, operation, operation.facts(args, named), site, label)
        if key is not None:
            group.ddp_notebook_ready[whole] = ready
    if site.part is Part.BACKWARD and observer.on_bucket is not None and args:
        observer.on_bucket(args[0])
    kind = 1 if operation.to_peer else 0
    slot = group.ddp_notebook_slots[kind]
    group.ddp_notebook_slots[kind] = slot + 1
    number = ring.write(slot, time.monotonic_ns(), ready.rest, tracker.backwards)
    if holding.on:
        ring.mark(number, Phase.HELD, 0)
    if group.ddp_notebook_guard is not None and not kind:
        try:
            group.ddp_notebook_guard.check(slot, number, ready.alike, operation, ready.facts)
        except guard.Mismatch:
            ring.mark(number, Phase.REFUSED, time.monotonic_ns())
            raise
    return number, ready.waited


def _prepare(
    group: ObservedGroup, operation: Operation, facts: Facts, site: sites.Site, label: str
) -> _Prepared:
    ring = observer.ring
    assert ring is not None
    if group.ddp_notebook_run != observer.run or len(group.ddp_notebook_ready) > _MOST_PREPARED:
        # The ring was begun anew: its texts have other numbers.
        group.ddp_notebook_ready.clear()
        group.ddp_notebook_run = observer.run
    shape = facts.shape[:DIMENSIONS]
    members = group.ddp_notebook_members
    rest = REST.pack(
        facts.numel,
        facts.bytes,
        ring.text(site.path, site.path),
        ring.text(site.api or operation.name, site.api or operation.name),
        ring.text(("label", label), label) if label else 0,
        group.ddp_notebook_name(),
        ring.text(operation.name, operation.name),
        ring.text(facts.dtype, facts.dtype),
        ring.text(facts.reduce_op, facts.reduce_op) if facts.reduce_op else 0,
        _PARTS[site.part],
        _PHASES[Phase.ISSUED],
        len(shape),
        0,
        facts.tensors,
        members[facts.root] if facts.root is not None else NOBODY,
        members[facts.peer] if facts.peer is not None else NOBODY,
        facts.tag,
        *(*shape, *(0,) * DIMENSIONS)[:DIMENSIONS],
    )
    alike = guard.hash_of((operation.name, facts.alike))
    return _Prepared(rest, facts, alike, facts.waited and group.ddp_notebook_waits)


for _operation in operations.OPERATIONS:
    if hasattr(dist.ProcessGroup, _operation.method):
        setattr(ObservedGroup, _operation.method, _method(_operation))
