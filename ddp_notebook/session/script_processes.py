"""The processes of a script: starts them, receives their events, calls and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook.launch import out_of_memory
from ddp_notebook.launch.session_folder import remove
from ddp_notebook.model import CellFinished, Event, Output, OutputKind, RankExited, Ranks, codec
from ddp_notebook.rank.calls import Script
from ddp_notebook.rank.rank_process import questions_of, started_in, streams_of
from ddp_notebook.session.started_ranks import StartedRanks
from ddp_notebook.views.output_log import STREAMS

if TYPE_CHECKING:
    from ddp_notebook.cluster.channels import EventReceiver
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.launch.client import ForkServerClient
    from ddp_notebook.session.collective_logs import CollectiveLogs
    from ddp_notebook.session.record import Record


@dataclass(frozen=True)
class Places:
    """Keeps per-rank processes; is notified when a script's processes replace the ranks'."""

    record: Record
    cluster: RankCluster
    logs: CollectiveLogs
    receiver: EventReceiver

    def lend(self, ranks: Ranks, folder: Path) -> None:
        """Use a script's processes as the ranks; their files are in `folder`."""
        self.record.lend(ranks)
        self.logs.lend(ranks, folder)

    def is_process(self, rank: int, pid: int, folder: Path) -> None:
        """The process that currently is `rank`."""
        self.cluster.lend(rank, pid, questions_of(folder, rank))
        self.record.lent_to(rank, pid)

    def take_back(self, ranks: Ranks) -> None:
        """Use the session's own processes as the ranks again."""
        self.cluster.take_back()
        self.logs.take_back(ranks)
        self.record.take_back()


class ScriptProcesses:
    """One process per rank of a script. They stay after the script is over, until `end`.

    `folder` belongs to the run and is created here; output too long to send goes to
    `output_folder`.
    """

    def __init__(
        self,
        fork_server: ForkServerClient,
        places: Places,
        folder: Path,
        output_folder: Path,
        ranks: Ranks,
    ) -> None:
        self.ranks = ranks
        self._fork_server = fork_server
        self._places = places
        self._folder = folder
        self._output_folder = output_folder
        self._cell = 0
        self._pids: dict[int, int] = {}
        self._exits: dict[int, int] = {}
        self._lock = threading.Lock()
        self._gone = threading.Condition(self._lock)
        self._told: set[int] = set()
        """Ranks whose processes have ended and were reported, which reads their files."""
        self._read: set[int] = set()
        """Ranks whose processes have ended and whose output was read from their files."""
        self._finished: set[int] = set()
        """Ranks whose script is over; the end of their processes is not reported again."""
        self._telling = threading.RLock()
        self._given_back = False
        """The session's own processes are the ranks again."""
        self._oom_kills = out_of_memory.kills()
        folder.mkdir(mode=0o700)
        self._made = folder.stat()
        self.started_ranks = StartedRanks(started_in(folder), len(ranks), lambda: self._is_over)
        """The ranks that these processes have started themselves."""
        self._sent: dict[tuple[int, OutputKind], int] = {}
        """Bytes received of each stream."""
        self._source = places.receiver.add_source(self._hear)
        places.lend(ranks, folder)

    def start(
        self,
        scripts: Mapping[int, Script],
        environments: Mapping[int, Mapping[str, str]],
        hosts: Mapping[int, Mapping[str, str]],
    ) -> None:
        """Start the script on every rank. Raises SessionLost, OSError."""
        receiver = self._places.receiver
        for rank, script in scripts.items():
            self._cell = script.cell
            out, errors = streams_of(self._folder, rank)
            arguments = {
                "rank": rank,
                "events": receiver.url,
                "source": self._source,
                "folder": str(self._folder),
                "output_folder": str(self._output_folder),
                "script": codec.encode(script),
            }
            spec = {
                "calls": [["ddp_notebook.rank.cells.scripts:main", arguments]],
                "env": dict(environments[rank]),
                "cwd": os.getcwd(),  # noqa: PTH109
                "log": str(out),
                "errors": str(errors),
                "host": dict(hosts.get(rank, {})),
            }
            pid = self._fork_server.spawn(spec, partial(self._exited, rank))
            self._places.is_process(rank, pid, self._folder)
            with self._lock:
                self._pids[rank] = pid
                code = self._exits.get(rank)
            if code is not None:  # it ended before its pid was registered
                self._tell(rank, code)

    @property
    def _is_over(self) -> bool:
        """True once the script has ended on a rank."""
        return bool(self._finished or self._exits)

    def kill(self, ranks: Ranks) -> None:
        """End the processes of `ranks`."""
        with self._lock:
            alive = [r for r in ranks if r in self._pids and r not in self._exits]
        for rank in alive:
            self._fork_server.signal(self._pids[rank], signal.SIGKILL)

    def end(self) -> None:
        """End the remaining processes; the session's own processes are the ranks again."""
        self.kill(self.ranks)
        with self._gone:
            self._gone.wait_for(lambda: self._told >= self._pids.keys(), 5.0)
        self._places.receiver.remove_source(self._source)
        with self._telling:
            self._given_back = True
        self._places.take_back(self.ranks)
        remove(self._folder, self._made)

    def _hear(self, events: Sequence[Event]) -> None:
        """Events of the processes; those of a dead one were already read from its files."""
        with self._lock:
            kept = [e for e in events if not isinstance(e, Output) or e.rank not in self._read]
            for event in kept:
                if isinstance(event, CellFinished):
                    self._finished.add(event.rank)
                elif isinstance(event, Output) and event.what in STREAMS:
                    key = (event.rank, event.what)
                    self._sent[key] = self._sent.get(key, 0) + len(event.text.encode())
        if kept:
            self._add(kept)

    def _add(self, events: Sequence[Event]) -> None:
        """Add events to the record; late ones are none of the ranks', but of the script's run."""
        with self._telling:
            record = self._places.record
            (record.pass_on if self._given_back else record.add)(events)

    def _unsent(self, rank: int) -> list[Output]:
        """Output that a process wrote but could not send any more."""
        with self._lock:
            self._read.add(rank)
            sent = {what: self._sent.get((rank, what), 0) for what in STREAMS}
        found = []
        for what, path in zip(STREAMS, streams_of(self._folder, rank), strict=True):
            with contextlib.suppress(OSError), path.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(sent[what], size - 16_000))
                if text := stream.read().decode("utf-8", "replace"):
                    found.append(Output(rank=rank, cell=self._cell, what=what, text=text))
        return found

    def _exited(self, rank: int, code: int) -> None:
        """A process ended (on the fork server client's thread, or where it is started)."""
        with self._lock:
            known = rank in self._pids
            self._exits[rank] = code
        if known:
            self._tell(rank, code)

    def _tell(self, rank: int, code: int) -> None:
        """Report the end of a process, unless its script was over before."""
        try:
            if rank not in self._finished:
                self._report(rank, code)
        finally:
            with self._gone:
                self._told.add(rank)
                self._gone.notify_all()

    def _report(self, rank: int, code: int) -> None:
        now_ns, events = time.monotonic_ns(), list[Event](self._unsent(rank))
        if code == 0:  # it exited without Python's normal shutdown
            events.append(CellFinished(rank=rank, cell=self._cell, outcome="ok", heard_ns=now_ns))
        pid = self._pids[rank]
        events.append(
            RankExited(
                rank=rank,
                pid=pid,
                exit_code=code,
                last_words=self._last_words(rank),
                peak_bytes=self._fork_server.peak_bytes.get(pid, 0),
                oom_kills=out_of_memory.kills_since(self._oom_kills),
                cell=self._cell,
                heard_ns=now_ns,
            )
        )
        self._add(events)

    def log(self, rank: int) -> str:
        """Return all output of a process: stdout, then stderr."""
        return "".join(map(_text, streams_of(self._folder, rank)))

    def _last_words(self, rank: int) -> str:
        """Return the last output of a process: of stderr, else of stdout."""
        texts = (_text(path, 4000) for path in streams_of(self._folder, rank)[::-1])
        return next((text for text in texts if text.strip()), "")


def _text(path: Path, last_bytes: int = 0) -> str:
    """Return a file, or its last part; empty if it does not exist."""
    try:
        return path.read_bytes()[-last_bytes:].decode("utf-8", "replace")
    except OSError:
        return ""
