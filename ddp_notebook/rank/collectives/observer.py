"""A process group around torch's own that records, checks and can pause each collective.

torch, DDP's reducer included, calls it as any group; what it returns is torch's own work. It
adds no communication and no synchronisation. When something of ours fails here, the observer
disables itself and the collective goes on without it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from ddp_notebook import model
from ddp_notebook.model import DEFAULT_GROUP, Part, Phase, Ranks
from ddp_notebook.model.collective_log import DIMENSIONS, NOBODY, PARTS, PHASES, REST, SPLITS
from ddp_notebook.rank import gpu, torch_private
from ddp_notebook.rank.collectives import guard, operations
from ddp_notebook.rank.collectives.call_sites import Caller, CallSite, CallSites
from ddp_notebook.rank.collectives.guard import Guard
from ddp_notebook.rank.collectives.log_writer import LogWriter
from ddp_notebook.rank.collectives.operations import Facts, Operation
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.collectives.splits import ComparedExchanges, Exchanges, NotedExchanges
from ddp_notebook.rank.collectives.time_limits import Group, PatientWork, TimeLimits
from ddp_notebook.rank.collectives.works import AsyncWorks, completed, error_of, wait_for
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.inspect.frames import raised_by_handler
from ddp_notebook.rank.rank_process import RankProcess
from ddp_notebook.rank.setup.sockets import TorchSockets
from ddp_notebook.rank.setup.subgroups import Subgroups, group_name

_PARTS = {part: number for number, part in enumerate(PARTS)}
_PHASES = {phase: number for number, phase in enumerate(PHASES)}
_BACKWARD = Part.BACKWARD
# Names of this module are looked up faster than attributes of another.
_now_ns = time.monotonic_ns
_getframe = sys._getframe

NewKind = Callable[[FrameType | None, str, Sequence[Any], Ranks, Part | None], None]
"""Gets the frames of the call, torch's method and its arguments, the members of the group, and the
part of DDP that issues it, if one does."""
_Prepared = tuple[bytes, int, bool, Facts, CallSite | None]
"""The common part of records of equal calls, packed; its hash for the guard, whether the call
waits for its end, the facts for an explanation, and the call site where the caller got a
handle and must wait itself."""


@dataclass(eq=False)
class Observer(Component):
    """The collectives that this rank issued, and where they are recorded."""

    process: RankProcess
    call_sites: CallSites
    gate: PauseGate
    sockets: TorchSockets
    subgroups: Subgroups

    def __post_init__(self) -> None:
        self.works = AsyncWorks()
        self.log: LogWriter | None = None
        """Where collectives are recorded now; None while none are, as after a defect of ours."""
        self.broken = ""
        """Why it disabled itself; empty while it works."""
        self.unrecorded = ""
        """Why there is no file for records; empty where there is one."""
        # Bounded, as a work keeps its tensors alive and a program may never wait for one. What
        # falls out stays `issued` in the log: its end was not seen.
        self.pending: deque[tuple[int, Any]] = deque(maxlen=2048)
        """Number and work of each collective that was not seen to be done yet."""
        self._left_open: Any = None
        """The oldest work that an earlier run left open, as one that was interrupted; or None."""
        self.run = 0
        """The session's number of the cell or script that runs, or ran last."""
        self.on_bucket: Callable[[Sequence[Any]], None] = lambda args: None
        """Called with what DDP's reducer hands over before each bucket. Raises nothing."""
        self.on_new_kind: list[NewKind] = []
        """Told of each call of a new kind: its frames show which model or schedule it is of."""
        self.backwards = 0
        """How many backwards have begun in this run, as who counts them says: records have it."""
        self.exchanges: Exchanges | None = None
        """The all_to_alls of the group in which this rank called one last."""
        self.capturing = False
        """The last collective was captured into a CUDA graph: it has no end of its own."""
        self.outlived: list[Any] = []
        """Destroyed groups of DDP objects that are freed: see `hold_until_the_next`."""
        self.limits = TimeLimits()
        """How long what is issued in a group may take."""
        self._file: LogWriter | None = None
        self._settling = threading.Lock()
        self.guard_numbers = itertools.count()
        self.group_type: type[ObservedGroup] = ObservedGroup
        """The type of this rank's groups: each method that issues something is observed."""

    def attach(self) -> None:
        """Have every group that is made from now on observed, if torch has not changed."""
        self.open_log()
        methods = {
            operation.method: _method(self, operation)
            for operation in operations.OPERATIONS
            if hasattr(dist.ProcessGroup, operation.method)  # torch may lack some
        }
        self.group_type = type(
            "ObservedGroup", (ObservedGroup,), {**methods, "ddp_notebook_observer": self}
        )
        self.works.attach()
        gpu.sleep_in_waits()
        torch_private.send_together(lambda group: isinstance(group, ObservedGroup))
        torch_private.watch_groups(lambda new: _Making(self, new))
        os.register_at_fork(after_in_child=self.leave_log)

    def open_log(self) -> None:
        """Record collectives in the file of this process's rank from now on."""
        try:
            self.log = self._file = LogWriter(self.process.collective_log)
        except OSError as error:
            self.unrecorded = self.say_limited("Collectives are not recorded, nor compared", error)

    def leave_log(self) -> None:
        """In a forked child: the file is that of its parent."""
        # The child shares the mapped memory and does not get a copy of it: what it recorded would
        # take the place of records of its parent.
        self.log = self._file = None
        self._settling = threading.Lock()  # a thread of the parent's may have held it

    def issued(self) -> int:
        """One more than the number of collectives in this run; 0 where none are recorded."""
        return self.log.written + 1 if self.log is not None else 0

    def run_begins(self, run: Run) -> None:
        """Forget the records of the last run."""
        self.run, self.exchanges = run.number, None
        self.call_sites.run_begins()
        if self.pending and not self.is_blocked_since_before:
            self._left_open = self.pending[0][1]
        self.pending.clear()
        self.works.begin()
        if self._file is not None:
            self._file.begin(run.number)

    def run_ends(self) -> None:
        """Marks completed collectives; in an aborted run no others will complete."""
        self.settle()
        self.works.run_ends()
        while self.gate.aborted and self.log is not None and self.pending:
            self.log.freed(self.pending.popleft()[0], _now_ns())

    def failed(self, log: LogWriter, number: int, error: BaseException) -> None:
        """A collective ended with `error`: torch's, or that its rank was freed or interrupted."""
        # What ends the wait of this rank alone is no failure of the collective: it may go on
        # elsewhere.
        if self.gate.aborted or isinstance(error, KeyboardInterrupt):
            log.freed(number, _now_ns())
        else:
            log.mark(number, Phase.FAILED, _now_ns())

    def hold_until_the_next(self, group: Any) -> None:
        """Keep a destroyed group until another one is made.

        A reducer that is the last to hold one ends its threads while it holds Python's lock, and
        a thread of gloo's that needs that lock to let go of a tensor waits for it: forever. So
        torch hangs when a function destroys the group and returns, and its DDP object ends.
        """
        self.outlived.append(group)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which collectives go straight to torch, which a benchmark measures."""
        # The closures below read `observer.log` at each call: to set it is all it takes, from any
        # thread.
        log, self.log = self.log, None
        try:
            yield
        finally:
            self.log = None if self.broken else log

    def settle(self, *, in_call: bool = False) -> None:
        """Mark completed collectives. Thread-safe; a concurrent call returns at once.

        `in_call`: before a collective returns, where every part of a microsecond counts. After one
        has failed, few ranks call another.
        """
        # Only the oldest is asked, of whatever group: works of one group end about in order, and to
        # ask each one would cost every collective. So an end is marked late while another group's
        # work is still pending: `done_ns` is when it was seen, and never before it happened.
        pending, log = self.pending, self.log
        if self.capturing:  # to ask CUDA anything would void the capture
            return
        try:
            # One thread at a time, and nobody waits for it: the ends that the second would mark are
            # marked by the first, or before the next collective.
            if not _is_done(pending[0][1]) or not self._settling.acquire(False):
                return
        except IndexError:
            return
        try:
            while pending and _is_done(pending[0][1]):
                number, work = pending.popleft()
                error = None if in_call else error_of(work)
                if log is not None and error is not None:
                    self.failed(log, number, error)
                elif log is not None:
                    log.done(number, _now_ns())
        except IndexError:  # a cell has begun, and what was pending is forgotten
            pass
        finally:
            self._settling.release()

    @property
    def is_blocked_since_before(self) -> bool:
        """True while a collective that an earlier run left open is not done."""
        if self._left_open is not None and _is_done(self._left_open):
            self._left_open = None
        return self._left_open is not None

    def waits_for(self) -> int | None:
        """The oldest collective that is not done yet; None for none."""
        self.settle()
        try:
            return self.pending[0][0]
        except IndexError:
            return None

    def disable(self, error: BaseException) -> None:
        """Stop observing in this process. Raises `error` if a handler of a signal raised it."""
        if raised_by_handler(error):
            raise error
        self.broken = f"{type(error).__name__}: {error}"
        self.log = None

    def say_limited(self, what: str, error: OSError) -> str:
        """Tell the session what cannot be done for want of room or rights; return why."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        cannot = "no room" if full else "no file can be made"
        why = f"{cannot} in {self.process.folder} ({error.strerror})"
        self.process.events.emit(model.Limited, text=f"{what}: {why}.")
        return why


class _FromAnybody:
    """The work of a recv from any rank. Once it is done, it is known from whom."""

    def __init__(self, work: Any, group: Group, log: LogWriter, number: int) -> None:
        self._work, self._members = work, group.members
        self._log, self._number = log, number

    def is_completed(self) -> bool:
        """As torch's. The log gets the sender before the end."""
        # The sender comes first: who reads the log would else see a receive that is over, and from
        # nobody.
        done: bool = completed(self._work)
        source = torch_private.source_of(self._work) if done else None
        if source is not None and source < len(self._members):
            self._log.came_from(self._number, self._members[source])
        return done


def _is_done(work: Any) -> bool:
    done: bool = work.is_completed() if type(work) is _FromAnybody else completed(work)
    return done


class ObservedGroup(dist.ProcessGroup):
    """torch's group `inner`, observed. Names of ours begin with ddp_notebook.

    A subclass (see `Observer.group_type`) has the methods that issue collectives, and the observer.
    """

    ddp_notebook_observer: Observer

    def __init__(self, group: Group) -> None:
        rank: int = group.inner.rank()
        size: int = group.inner.size()
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub
        self.ddp_notebook_group = group
        self.ddp_notebook_rank, self.ddp_notebook_size = rank, size

    def rank(self) -> int:
        """As torch's, which takes ten times as long: it looks whether we have one."""
        return self.ddp_notebook_rank

    def size(self) -> int:
        """As torch's; see `rank`."""
        return self.ddp_notebook_size

    @property
    def ddp_notebook_inner(self) -> Any:
        """torch's own group."""
        return self.ddp_notebook_group.inner

    def ddp_notebook_become(self, new: ObservedGroup) -> None:
        """Go on as `new`, which has the same members, wherever this group is referred to."""
        self.ddp_notebook_group = new.ddp_notebook_group
        torch_private.take_place(self, new)

    def get_group_store(self) -> Any:
        """Return the store of the group inside: torch keeps no store for a group of Python's."""
        return self.ddp_notebook_inner.get_group_store()

    def _get_backend(self, device: Any) -> Any:
        """The backend of the group inside."""
        return self.ddp_notebook_inner._get_backend(device)

    def _start_coalescing(self, device: Any) -> None:
        """Calls until `_end_coalescing` are sent as one."""
        self.ddp_notebook_inner._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:
        """The work of all that was issued."""
        return self.ddp_notebook_inner._end_coalescing(device)

    def split_group(  # type: ignore[override]  # as torch's, whatever arguments a release has
        self, ranks: Sequence[int], *args: Any, **named: Any
    ) -> Any:
        """Split ranks off as torch does: the new group is observed, too."""
        # torch's own would look for a store in this group, and end the process: there is none.
        observer = self.ddp_notebook_observer
        observer.sockets.group_begins()
        try:
            group = self.ddp_notebook_inner.split_group(ranks, *args, **named)
        finally:
            observer.sockets.group_ended()
        if group is not None:
            with contextlib.suppress(Exception):  # the user's group matters more
                members = [self.ddp_notebook_group.members[rank] for rank in sorted(ranks)]
                new = torch_private.split_off(self, group, members, named.get("timeout"))
                making = _Making(observer, new, self)
                making.before()
                try:
                    group = making.after(group)
                finally:
                    making.ended()
        return group

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """The backend of the group inside."""
        return torch_private.group_backend(self.ddp_notebook_inner)


def refuse_gpu_to_peer(args: Sequence[Any]) -> None:
    """Raise RuntimeError for tensors on a GPU, before gloo is given them to send or receive.

    gloo writes them to a socket as if they were the host's: it aborts the process ("writev: Bad
    address"), as seen with torch 2.11 on an H200.
    """
    tensors = args[0] if args and isinstance(args[0], list) else ()
    if any(getattr(tensor, "is_cuda", False) for tensor in tensors):
        raise RuntimeError(
            "gloo cannot send or receive tensors on a GPU, and would abort this process: use "
            "tensor.cpu(), or NCCL. Collectives (all_reduce, broadcast, ...) can."
        )


def unobserved(group: Any) -> Any:
    """torch's own group in an observed one; `group` itself when it is not observed."""
    return getattr(group, "ddp_notebook_inner", group)


def is_call(frame: FrameType) -> bool:
    """True of the frame in which an observed collective is called, and waited for."""
    return frame.f_code.co_name == "observed" and frame.f_code.co_filename == __file__


def record_of(frames: Iterable[FrameType]) -> int | None:
    """The number of the record whose call is in progress in the first of these frames that has one.

    None where torch waits for it, or the user does, after the call.
    """
    for frame in frames:
        if is_call(frame):
            number = frame.f_locals.get("number")
            return number if isinstance(number, int) else None
    return None


class _Making:
    """A group that is being made; `before` and `after` run around torch's making of it."""

    def __init__(self, observer: Observer, new: torch_private.NewGroup, parent: Any = None) -> None:
        self.observer = observer
        self.new = new
        self.parent = parent
        self.guard: Guard | None = None

    def before(self) -> None:
        """Publish where the others find this rank's words, if it is a member."""
        observer = self.observer
        path = observer.call_sites.users_path(sys._getframe(1))
        observer.subgroups.begins(self.new, path)
        if not self.new.has_me:
            return
        observer.outlived.clear()
        observer.sockets.group_begins()
        if observer.log is None or not observer.process.guards:  # nothing is to be refused
            return
        try:
            self.guard = Guard(observer.process, next(observer.guard_numbers))
        except OSError as error:
            what = "Collectives of a group are not compared before they are sent"
            observer.say_limited(what, error)
        else:
            self.guard.publish(self.new.store, self.new.name, self.new.rank or 0)

    def after(self, inner: Any) -> Any:
        """The observed group in place of `inner`, or `inner` where it cannot be."""
        observer, new = self.observer, self.new
        if observer.log is None:
            return inner
        if self.guard is not None:
            # What fails here must do so before the place of `inner` is taken: it is used then.
            self.guard.find_peers(new.store, new.name, new.rank or 0, new.size)
        members = new.members or tuple(range(new.size))
        name = str(new.name) if new.members else DEFAULT_GROUP
        made = Group(inner, name, group_name(new.called), members, observer.limits)
        group = observer.group_type(made)
        observer.limits.made(made, new.timeout)
        torch_private.take_place(group, inner, self.parent)
        if new.members:
            observer.subgroups.keep(group, new)
        folder = observer.process.folder
        if self.guard is None:
            made.exchanges = NotedExchanges(folder / SPLITS, made.members, made.title)
        else:
            made.checks[0] = self.guard.check
            where = (self.guard.name, new.store, new.name, new.rank or 0)
            made.exchanges = ComparedExchanges(folder, *where, made.members, made.title)
        return group

    def ended(self) -> None:
        """torch has made the group, or could not."""
        if self.new.has_me:
            self.observer.sockets.group_ended()


# -- before and after each collective ------------------------------------------------------
#
# What follows runs on every collective of the user's: microseconds count. The functions are
# closures, made once per operation: what they use is found in their cells, which is quicker than
# an attribute of `self` or of a module. They are two and not ten, because calling a function of
# Python's costs about as much as a whole section of them does.


def _method(observer: Observer, operation: Operation) -> Callable[..., Any]:
    """One of torch's methods: recorded before, issued, marked after."""
    name = operation.method
    record = _recorder(observer, operation)
    # Held from now on: who forgets what is pending clears this deque, and puts none in its place.
    gate, pending = observer.gate, observer.pending
    from_anybody, is_barrier = name == operations.FROM_ANYBODY, operation.is_barrier
    works = observer.works
    to_peer, is_capturing = operation.to_peer, torch_private.is_capturing

    # Other threads read its frame while it is blocked: `is_call` knows it by its name and this
    # file, and `record_of` takes its variable `number`. Neither can be renamed here alone.
    def observed(self: ObservedGroup, *args: Any, **named: Any) -> Any:
        group = self.ddp_notebook_group
        call = getattr(group.inner, name)
        log = observer.log
        if log is None:
            return call(*args, **named)
        try:
            number, waited, started_at = record(group, log, args, named)
        except guard.Mismatch:
            raise
        except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
            observer.disable(error)
            return call(*args, **named)
        if to_peer and group.waits:
            refuse_gpu_to_peer(args)
        if gate.paused:
            # Marked before it waits: a rank that is killed here has issued nothing.
            log.mark(number, Phase.HELD, 0)
            try:
                gate.wait(number)
            except BaseException as error:
                log.issued(number, _now_ns())
                observer.failed(log, number, error)
                raise
            log.issued(number, _now_ns())
        try:
            work = call(*args, **named)
            # What the caller waits for anyway is waited for here: so its end is seen when it comes.
            if waited and work is not None:
                wait_for(work)
        except BaseException as error:
            observer.failed(log, number, error)
            raise
        if waited or work is None:
            log.done(number, _now_ns())
            if is_barrier:
                works.barrier()
        elif not group.waits and is_capturing():
            observer.capturing = True
            log.done(number, _now_ns())
        else:
            observer.capturing = False
            observer.settle(in_call=True)
            if started_at is not None:
                works.issued(work, name, args, started_at)
            pending.append(
                (number, _FromAnybody(work, group, log, number) if from_anybody else work)
            )
            if to_peer and group.patient and group.waits:
                return PatientWork(work)
        return work

    observed.__name__ = name
    observed.__doc__ = f"torch's `{name}`, observed."
    torch_private.keep_from_compiler(observed)
    return observed


def _recorder(
    observer: Observer, operation: Operation
) -> Callable[..., tuple[int, bool, CallSite | None]]:
    """Record a call of `operation`, and compares it with the other ranks'.

    It gives the number of the record, whether the call is waited for, and its call site where the
    caller gets a handle. Raises Mismatch.
    """
    name, key_of, has_metric = operation.method, operation.key, operation.has_metric
    kind, exchanges = 1 if operation.to_peer else 0, operation.exchanges
    # The list itself is held: who is added to it later is told too, and another list in its place
    # would not be seen.
    call_sites, subscribers = observer.call_sites, observer.on_new_kind

    def record(
        group: Group, log: LogWriter, args: Sequence[Any], named: dict[str, Any]
    ) -> tuple[int, bool, CallSite | None]:
        try:
            frame = _getframe(2)  # torch's function: `call_sites` counts on this depth
        except ValueError:  # a thread of torch's own calls
            frame = None
        site = call_sites.site(frame)
        metric = call_sites.metric_name(frame, site) if site.variables and has_metric else ""
        try:
            about = None if named else key_of(args)
        except (AttributeError, IndexError, ValueError, TypeError):  # called in another way
            about = None
        key = (about, site, metric, name, group.number)
        try:
            ready = log.prepared[key]  # a subscript is quicker than a call of `get`
        except KeyError:
            ready = _prepare(group, log, operation, operation.facts((*args, *named.values())), key)
            for subscriber in subscribers:
                subscriber(frame, name, args, group.members, site.part)
        rest, fingerprint, waited, facts, started_at = ready
        if site.part is _BACKWARD:
            observer.on_bucket(args)
        # Not one step: two threads that issue in one group at once may take the same number. Such a
        # program has no order of collectives that all ranks share, with or without us.
        seq_ids = group.seq_ids
        seq_id = seq_ids[kind]
        seq_ids[kind] = seq_id + 1
        number = log.write(seq_id, _now_ns(), rest, observer.backwards)
        check = group.checks[kind]
        if check is not None:
            try:
                check(seq_id, number, fingerprint, operation, facts)
                if exchanges and group.exchanges is not None:
                    observer.exchanges = group.exchanges
                    group.exchanges.check(seq_id, args, lists=exchanges == "lists")
            except guard.Mismatch:
                # It is not issued: what this rank issues next meets the others there instead.
                seq_ids[kind] = seq_id
                log.mark(number, Phase.REFUSED, _now_ns())
                raise
        elif exchanges and group.exchanges is not None:
            group.exchanges.check(seq_id, args, lists=exchanges == "lists")
        return number, waited, started_at

    torch_private.keep_from_compiler(record)
    return record


def _rank_of(number: int | None, members: Ranks) -> int:
    """The rank of the whole job that has this number in a group; one that it has not, as it is."""
    if number is None:
        return NOBODY
    return members[number] if 0 <= number < len(members) else number


def _prepare(
    group: Group,
    log: LogWriter,
    operation: Operation,
    facts: Facts,
    key: tuple[Hashable, CallSite, str, str, int],
) -> _Prepared:
    """Return the common part of such calls; kept under `key` where its first part is known."""
    about, site, metric, _, _ = key
    shape = facts.shape[:DIMENSIONS]
    members, api = group.members, site.api or operation.name
    waited = facts.waited and group.waits
    rest = REST.pack(
        facts.numel,
        facts.bytes,
        log.text(site.path, [[e.file, e.line, e.function, e.text] for e in site.path]),
        log.text(api, api),
        log.text(("label", metric), metric) if metric else 0,
        group.text(log),
        log.text(operation.name, operation.name),
        log.text(facts.dtype, facts.dtype),
        log.text(facts.reduce_op, facts.reduce_op) if facts.reduce_op else 0,
        _PARTS[site.part],
        _PHASES[Phase.ISSUED],
        len(shape),
        waited | site.thread << 1,
        facts.tensors,
        _rank_of(facts.root, members),
        _rank_of(facts.peer, members),
        facts.tag,
        *(*shape, *(0,) * DIMENSIONS)[:DIMENSIONS],
        0,
        0,
    )
    fingerprint = guard.hash_of((operation.name, facts.must_match))
    not_told = facts.waited or site.part is not None or site.caller is Caller.LIBRARY
    started_at = None if not_told else site
    prepared = rest, fingerprint, waited, facts, started_at
    if about is not None:
        log.keep_prepared(key, prepared)
    return prepared
