"""torch's flight recorder of ranks that run and were not prepared, where they give it away.

By the socket of torch's worker server, whose path `torch.distributed.elastic.control_plane` takes
from the environment: gloo's and NCCL's records. By NCCL's pipe, which has the rank write its dump;
or by a dump that it wrote before. The last two are from torch's documentation and source, and were
never run with NCCL.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddp_notebook import files
from ddp_notebook.diagnosis.collectives.describe import numbered
from ddp_notebook.evidence import flight_recorder
from ddp_notebook.evidence.flight_recorder import Dump
from ddp_notebook.evidence.frames import Sources
from ddp_notebook.evidence.plain_pickle import NotPlain
from ddp_notebook.jobs.unprepared import Seen
from ddp_notebook.model import name_ranks
from ddp_notebook.rank.prepared import processes

SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ASKS_FOR = "/handler/fr_trace_json"
_MOST_BYTES = 64 << 20
_ANSWERS_WITHIN_S = 2.0
_WRITES_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.1
_UCRED = struct.Struct("3i")


def read(ranks: Mapping[int, Seen], sources: Sources) -> dict[int, Dump]:
    """The records of those ranks that give them away."""
    found = {}
    for rank, seen in ranks.items():
        try:
            given = processes.environment(seen.pid)
        except OSError:
            continue
        for of in (_served, _by_pipe, _written):
            if (dump := _dump(of(rank, seen, given), rank, sources)) is not None:
                found[rank] = dump
                break
    return found


def facts(dumps: Mapping[int, Dump]) -> list[str]:
    """What each rank's recorder says of its last collective that is not done, or of its last."""
    same: dict[str, list[int]] = {}
    for rank, dump in dumps.items():
        last = next((r for r in dump.records if not r.over), None)
        state = "not done"
        if last is None and dump.records:
            last, state = dump.records[-1], "done"
        if last is None:
            same.setdefault("no collective", []).append(rank)
            continue
        same.setdefault(f"{numbered(last)}, {state}", []).append(rank)
    return [f"flight recorder of {name_ranks(who)}: {text}" for text, who in same.items()]


def _dump(data: bytes, rank: int, sources: Sources) -> Dump | None:
    if not data:
        return None
    try:
        return flight_recorder.read(flight_recorder.parse(data), rank, sources)
    except NotPlain:
        return None


# -- torch's worker server -------------------------------------------------------------------------


def _served(_rank: int, seen: Seen, given: Mapping[str, str]) -> bytes:
    """What the rank's own server answers; nothing of a socket at which another process listens."""
    path = given.get(SOCKET_VARIABLE, "")
    if not path.startswith("/"):
        return b""
    connection = _OverSocket(path, seen.pid)
    try:
        connection.request("POST", _ASKS_FOR)
        answer = connection.getresponse()
        data = answer.read(_MOST_BYTES) if answer.status == http.client.OK else b""
    except (OSError, http.client.HTTPException):
        data = b""
    finally:
        connection.close()
    return data


class _OverSocket(http.client.HTTPConnection):
    """HTTP over a unix socket at which the process `pid` listens. Raises OSError for another."""

    def __init__(self, path: str, pid: int) -> None:
        super().__init__("localhost", timeout=_ANSWERS_WITHIN_S)
        self._path, self._pid = path, pid

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_ANSWERS_WITHIN_S)
        self.sock.connect(self._path)
        told = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        if _UCRED.unpack(told)[0] != self._pid:
            raise ConnectionError("another process listens there")


# -- NCCL's pipe, and dumps ------------------------------------------------------------------------


def _by_pipe(rank: int, seen: Seen, given: Mapping[str, str]) -> bytes:
    """The dump that the rank writes when a byte comes through the pipe that it was told to make."""
    stem = given.get(PIPE_VARIABLE, "")
    targets = list(_files(rank, given))
    if not stem or not targets:
        return b""
    asked_s = time.time()
    try:
        descriptor = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(descriptor, "wb", buffering=0) as pipe:
        about = os.fstat(descriptor)
        if not stat.S_ISFIFO(about.st_mode) or about.st_uid != os.getuid():
            return b""
        with contextlib.suppress(OSError):
            pipe.write(b"1")
    until_s = time.monotonic() + _WRITES_WITHIN_S
    while time.monotonic() < until_s:
        if (data := _since(targets, asked_s)) and _is_whole(data):
            return data
        time.sleep(_LOOK_EVERY_S)
    return b""


def _written(rank: int, seen: Seen, given: Mapping[str, str]) -> bytes:
    """A dump that it has written since it began, as NCCL's watchdog does."""
    return _since(list(_files(rank, given)), seen.began_s)


def _files(rank: int, given: Mapping[str, str]) -> Iterator[Path]:
    """Where it was told to write dumps."""
    for name in FILE_VARIABLES:
        if stem := given.get(name, ""):
            yield Path(f"{stem}{rank}")


def _since(targets: list[Path], began_s: float) -> bytes:
    for path in targets:
        with contextlib.suppress(OSError), files.opened(path) as stream:
            if os.fstat(stream.fileno()).st_mtime >= began_s:
                return stream.read(_MOST_BYTES)
    return b""


def _is_whole(data: bytes) -> bool:
    """False of a dump that is being written."""
    try:
        flight_recorder.parse(data)
    except NotPlain:
        return False
    return True
