"""A rank's answers about itself; whoever asks cannot change what it does.

Called on the thread that answers questions, also while the main thread is blocked: nothing here may
take long or wait for the main thread.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_notebook import files
from ddp_notebook.model import (
    Awaited,
    Category,
    ModelParts,
    Network,
    PathChange,
    Probe,
    ProcessFacts,
    RankError,
    RankReport,
    StoreFile,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.cells.raised import place_of
from ddp_notebook.rank.control import Handlers
from ddp_notebook.rank.inspect import facts, safe_repr
from ddp_notebook.rank.inspect import process as own
from ddp_notebook.rank.inspect.frames import raised_in
from ddp_notebook.rank.inspect.polling import polled_file
from ddp_notebook.rank.inspect.process import is_runnable, main_cpu_s, versions
from ddp_notebook.rank.inspect.stacks import NOT_SHOWN, Stacks
from ddp_notebook.rank.inspect.variables import Variables
from ddp_notebook.rank.inspect.waiting import (
    Stillness,
    Waiting,
    is_ddp_constructor,
    joins_processes,
)
from ddp_notebook.rank.main_thread import Failure
from ddp_notebook.rank.setup import listening
from ddp_notebook.rank.setup.reachability import Reachability
from ddp_notebook.rank.setup.rendezvous import Calls
from ddp_notebook.rank.training import ddp, fsdp_private
from ddp_notebook.rank.watched import Watched

_KEY = re.compile(rb"\w+/\d+//\w+//\d+/(\d+)")
_JOINED_AFTER_S = 4.0
_MOST_VARIABLES = 60
_STILL_S = 2.0
"""Seconds at one place after which the library function that it called there is named."""
_DEFAULT_GROUP = re.compile(rb"default_pg/\d+//[a-z]+//")
"""The keys of the default group; those of other groups have their number here."""


class Answers:
    """Answers from what is watched, on the thread that asks."""

    def __init__(self, watched: Watched) -> None:
        process, main_thread, user_code = watched.process, watched.main_thread, watched.user_code
        waiting = Waiting(main_thread, watched.gate, watched.observer, user_code)
        self.reachability = Reachability(watched.resolver, watched.sockets)
        self.variables = Variables(process, waiting, main_thread, user_code, watched.names)
        self._stacks = Stacks(process, main_thread, waiting, user_code)
        self._watched = watched
        self._observer = watched.observer
        self._main_thread = main_thread
        self._user_code = user_code
        self._waiting = waiting
        self._stillness = Stillness()

    def to(self, handlers: Handlers) -> Handlers:
        """`handlers`, through which all of it is answered."""
        on = handlers.on_question
        on(calls.REPORT, lambda _: self.report())
        on(calls.REACH, lambda to: calls.Reached(self.reachability.of_others(to.targets)))
        on(calls.STACK, self._stacks.stack)
        on(calls.VARIABLES, self.variables.variables)
        on(calls.RUN_FACTS, lambda _: self._watched.summary.facts())
        on(calls.SOFTWARE, lambda _: calls.SoftwareFacts(facts.gather()))
        return handlers

    def report(self) -> RankReport:
        """Return this rank, as it is now."""
        self._observer.settle()
        # Before anything here wakes the store's thread, which is one of torch's.
        runnable = is_runnable()
        awaited = self._waiting.awaited()
        frame, stack = awaited.frame, awaited.stack
        wait = self._waiting.wait(awaited, runnable)
        inside = wait.inside
        still_s = 0.0 if inside else self._stillness.look(awaited)
        watched, error = self._watched, self._main_thread.error
        init = watched.init_calls.calls
        arguments, exchanges = init.arguments, self._observer.exchanges
        store = arguments.master_addr, arguments.master_port
        asks_store = init.entered > 0 or inside == "store"
        constructors = (outer for outer in stack if is_ddp_constructor(outer))
        model = next((outer.f_locals.get("module") for outer in constructors), None)
        listens = watched.sockets.listening() if inside == "process-group" else ()
        return RankReport(
            rank=watched.process.rank,
            activity=self._waiting.activity(inside),
            inside=inside,
            doing=self._main_thread.doing
            or self._user_code.describe(frame, any_call=still_s >= _STILL_S),
            entered=init.entered,
            left=init.returned,
            called_ns=init.called_ns,
            initialized=dist.is_initialized(),
            arguments=arguments,
            error=self._described(error, arguments.master_port or 0) if error else RankError(),
            awaits=Awaited(
                file="" if inside else polled_file(frame, self._user_code),
                workers=() if inside else watched.data_workers.owing(stack),
                processes=not inside and joins_processes(stack),
                key=wait.key,
                gpu=wait.on_gpu,
            ),
            process=ProcessFacts(
                pid=os.getpid(),
                runnable=runnable and not (wait.polls or wait.on_gpu),
                main_cpu_s=main_cpu_s(),
                still_s=round(still_s, 1),
                versions=versions(),
                changed=tuple(PathChange(*each) for each in watched.paths_changed.last()),
            ),
            in_threads=watched.thread_errors.of_run,
            handles=error.during if error else watched.thread_errors.in_main(),
            network=Network(
                host=init.host or socket.gethostname(),
                loopback=init.network or own.network(),
                # Without the store, if this rank hosts it.
                listens=tuple(each for each in listens if not each.endswith(f":{store[1]}")),
                probe=self.reachability.store(*store) if asks_store else Probe(),
                addresses=watched.resolver.resolved(arguments.master_addr),
            ),
            file=_store_file(arguments.path, dist.is_initialized(), _has_joined(inside, init)),
            groups_made=tuple(self._observer.subgroups.made),
            parts=ModelParts(
                wrapped=ddp.contents(model) if isinstance(model, torch.nn.Module) else None,
                replicas=watched.summary.counts(),
                sharded=watched.sharded.units(),
                pipelines=watched.pipelines.parts(stack),
                purpose=fsdp_private.purpose(stack) if inside == "collective" else "",
            ),
            splits=exchanges.latest if exchanges is not None else None,
            path=watched.call_sites.users_path(frame),
            waits_for=wait.record,
            keys_set=watched.store_keys.set_by_me(),
            run=self._observer.run,
            unrecorded=self._observer.unrecorded or self._observer.broken,
        )

    def _described(self, error: Failure, port: int) -> RankError:
        """Return an error, with who holds `port` if that is its cause.

        And with the variables of the user's function that raised it, each in short.
        """
        ours = error.category == Category.PORT_IN_USE
        in_use = ours or re.search("EADDRINUSE|already in use", error.text)  # torch's own words
        frames = raised_in(error.trace, self._user_code.is_users)
        own = list(frames[0][0].f_locals.items())[-_MOST_VARIABLES:] if frames else []
        return RankError(
            error.type,
            error.text,
            tuple(map(place_of, error.frames)),
            error.category,
            error.remedy,
            listening.holder(port) if in_use and port else "",
            error.path,
            bool(error.path) and os.path.lexists(error.path),
            {
                name: safe_repr.of(value)
                for name, value in own
                if name[:1] != "_" and not issubclass(type(value), NOT_SHOWN)
            },
        )


def _has_joined(inside: str, calls: Calls) -> str:
    """Return this rank's number in the group under construction, if its address must be in there.

    gloo writes it as soon as it listens: a rank that has waited for so long has done so. Empty
    before, and for other backends.
    """
    waited_s = (time.monotonic_ns() - calls.called_ns) / 1e9
    if inside != "process-group" or waited_s < _JOINED_AFTER_S or dist.is_initialized():
        return ""
    if calls.arguments.backend and "gloo" not in calls.arguments.backend:
        return ""
    return str(calls.arguments.rank)


def _store_file(path: str, initialized: bool, joined: str) -> StoreFile:
    """Return what is in the file of a ``file://`` rendezvous: an address per rank, or more.

    `joined` is the rank whose address must be in it.
    """
    if not path:
        return StoreFile()
    try:
        with files.opened(Path(path)) as stream:
            data = stream.read(1 << 20)
    except OSError:
        folder = Path(path).parent
        return StoreFile(
            path,
            lost=initialized or bool(joined),
            missing_folder="" if folder.exists() else str(folder),
        )
    keys = Counter((match[0], match[1].decode()) for match in _KEY.finditer(data))
    claims: dict[str, int] = {}
    for (_, rank), count in keys.items():  # a group of its own has keys of its own
        claims[rank] = max(count, claims.get(rank, 0))
    lost = joined not in claims if joined else initialized and not _DEFAULT_GROUP.search(data)
    return StoreFile(path, True, claims, lost)
