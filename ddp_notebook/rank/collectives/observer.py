"""A process group around torch's own that writes down, guards and can hold each collective.

torch, DDP's reducer included, calls it as any group; what it returns is torch's own work. It
adds no communication and no synchronisation. When something of ours fails here, the observer
takes itself out and the collective goes on without it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_notebook.model import DEFAULT_GROUP, Part, Phase
from ddp_notebook.model.collective_log import DIMENSIONS, NOBODY, PARTS, PHASES, REST
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives import call_sites, guard, operations, pause
from ddp_notebook.rank.collectives.log_writer import RingWriter
from ddp_notebook.rank.collectives.operations import Facts, Operation
from ddp_notebook.rank.setup import sockets, subgroups
from ddp_notebook.rank.training.replicas import tracker

_PARTS = {part: number for number, part in enumerate(PARTS)}
_PHASES = {phase: number for number, phase in enumerate(PHASES)}
_MOST_PENDING = 2048
_BACKWARD = Part.BACKWARD
_numbers = itertools.count()
_now_ns = time.monotonic_ns


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

        self.outlived: list[Any] = []
        """Destroyed groups of DDP objects that are freed: see `hold_until_the_next`."""

    def hold_until_the_next(self, group: Any) -> None:
        """Keep a destroyed group until another one is made.

        A reducer that is the last to hold one ends its threads while it holds Python's lock, and
        a thread of gloo's that needs that lock to let go of a tensor waits for it: for ever. So
        torch hangs when a function destroys the group and returns, and its DDP object ends.
        """
        self.outlived.append(group)

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
        pending, ring = self.pending, self.ring
        if not pending or not self._settling.acquire(False):
            return
        try:
            while pending and pending[0][1].is_completed():
                number, _ = pending.popleft()
                if ring is not None:
                    ring.done(number, _now_ns())
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
        self.ddp_notebook_number = next(_numbers)
        self.ddp_notebook_slots = [0, 0]
        """Collectives, and sends and receives, issued so far."""
        self.ddp_notebook_waits = torch_private.group_backend(inner) == "gloo"
        """A collective that is waited for is waited for in here, so that its end is seen."""

    def ddp_notebook_name(self) -> int:
        """The number by which records name the group."""
        assert observer.ring is not None
        value = {"group": self.ddp_notebook_title, "members": list(self.ddp_notebook_members)}
        return observer.ring.text(("group", self.ddp_notebook_title), value)

    def ddp_notebook_become(self, new: ObservedGroup) -> None:
        """Go on as `new`, which has the same members, wherever this group is referred to."""
        self.ddp_notebook_inner = new.ddp_notebook_inner
        self.ddp_notebook_title, self.ddp_notebook_guard = (
            new.ddp_notebook_title,
            new.ddp_notebook_guard,
        )
        self.ddp_notebook_slots = [0, 0]
        self.ddp_notebook_number = new.ddp_notebook_number
        torch_private.take_place(self, new)

    def _get_backend(self, device: Any) -> Any:
        """The backend of the group inside."""
        return self.ddp_notebook_inner._get_backend(device)

    def _start_coalescing(self, device: Any) -> None:
        """What comes until `_end_coalescing` goes as one."""
        self.ddp_notebook_inner._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:
        """The work of all that came."""
        return self.ddp_notebook_inner._end_coalescing(device)

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
    torch_private.send_together(lambda group: isinstance(group, ObservedGroup))
    return torch_private.watch_groups(_Making)


class _Making:
    """A group that is being made: `before` and `after` torch makes it."""

    def __init__(self, new: torch_private.NewGroup) -> None:
        self.new = new
        self.guard: guard.Guard | None = None

    def before(self) -> None:
        """Tell the others where this rank's words are."""
        observer.outlived.clear()
        sockets.group_begins()
        if observer.ring is not None and not observer.broken:
            self.guard = guard.Guard()
            self.guard.tell(self.new.store, self.new.name, self.new.rank)

    def after(self, inner: Any) -> Any:
        """The observed group in place of `inner`, or `inner` where it cannot be."""
        if observer.ring is None or observer.broken:
            return inner
        new = self.new
        members = new.members or tuple(range(new.size))
        group = ObservedGroup(inner, str(new.name) if new.members else DEFAULT_GROUP, members)
        torch_private.take_place(group, inner)
        if self.guard is not None:
            self.guard.meet(new.store, new.name, new.rank, new.size)
            group.ddp_notebook_guard = self.guard
        if new.members:
            subgroups.keep(group, new)
        return group

    def ended(self) -> None:
        """Torch has made the group, or could not."""
        sockets.group_ended()


_Prepared = tuple[bytes, int, bool, Facts]
"""What records of calls that are alike have in common, packed; its hash for the guard, and whether
the end is waited for."""


def _method(operation: Operation) -> Callable[..., Any]:
    """The observed form of one of torch's methods."""
    name, key_of = operation.method, operation.key
    kind = 1 if operation.to_peer else 0

    def observed(self: ObservedGroup, *args: Any, **named: Any) -> Any:
        # In one piece: to call a function of Python's costs about as much as what one does here.
        call = getattr(self.ddp_notebook_inner, name)
        ring = observer.ring
        if ring is None or observer.broken:
            return call(*args, **named)
        try:
            try:
                frame = sys._getframe(1)
            except ValueError:  # a thread of torch's own calls
                frame = None
            site = call_sites.site(frame)
            label = call_sites.label(frame, site) if site.labels and operation.labelled else ""
            try:
                about = None if named else key_of(args)
            except (AttributeError, IndexError, ValueError, TypeError):  # called in another way
                about = None
            key = (about, site.number, label, name, self.ddp_notebook_number)
            ready = ring.prepared.get(key)
            if ready is None:
                ready = _prepare(self, operation, operation.facts(args, named), site, label)
                if about is not None:
                    ring.keep_prepared(key, ready)
            rest, alike, waited, facts = ready
            if site.part is _BACKWARD and args and observer.on_bucket is not None:
                observer.on_bucket(args[0])
            slots = self.ddp_notebook_slots
            slot = slots[kind]
            slots[kind] = slot + 1
            number = ring.write(slot, _now_ns(), rest, tracker.backwards)
            its_guard = self.ddp_notebook_guard
            if its_guard is not None and not kind:
                its_guard.check(slot, number, alike, operation, facts)
        except guard.Mismatch:
            # It is not issued: what this rank issues next is what meets the others in the slot.
            slots[kind] = slot
            ring.mark(number, Phase.REFUSED, _now_ns())
            raise
        except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
            observer.take_out(error)
            return call(*args, **named)
        if pause.on:
            ring.mark(number, Phase.HELD, 0)
            pause.hold(number)
            ring.mark(number, Phase.ISSUED, 0)
        try:
            work = call(*args, **named)
            if waited and work is not None:
                work.wait()
        except BaseException:
            ring.mark(number, Phase.FAILED, _now_ns())
            raise
        if waited or work is None:
            ring.done(number, _now_ns())
        else:
            observer.settle()
            observer.pending.append((number, work))
        return work

    observed.__name__ = name
    observed.__doc__ = f"torch's `{name}`, observed."
    torch_private.keep_from_compiler(observed)
    return observed


def _prepare(
    group: ObservedGroup, operation: Operation, facts: Facts, site: call_sites.Site, label: str
) -> _Prepared:
    ring = observer.ring
    assert ring is not None
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
    return rest, alike, facts.waited and group.ddp_notebook_waits, facts


for _operation in operations.OPERATIONS:
    if hasattr(dist.ProcessGroup, _operation.method):
        setattr(ObservedGroup, _operation.method, _method(_operation))
