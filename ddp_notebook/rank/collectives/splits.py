"""Compares what ranks send to each other in an all_to_all before it is sent: both must agree.

gloo aborts the process that gets more than it makes room for. So each rank writes what it sends
to each peer, and expects of it, into a file that the others map, from the first all_to_all of a
group on. Of two that come at once at least one sees the other, as with the guard's words.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ddp_notebook import model
from ddp_notebook.model import collective_log
from ddp_notebook.rank.collectives import guard, mapped_file
from ddp_notebook.rank.collectives.guard import Mismatch

_ENTRIES = 64
_MASK = _ENTRIES - 1


class _File:
    """One rank's splits in one group: the last few, each with its number."""

    def __init__(self, mapped: Any, size: int) -> None:
        self._words = memoryview(mapped).cast("Q")
        self._size = size

    def write(self, seq_id: int, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Write this rank's splits of `seq_id`; the number last, as it makes them readable."""
        at, words = (seq_id & _MASK) * (1 + 2 * self._size), self._words
        # Nothing first: a reader in between must not take half of the old counts and half of the
        # new.
        words[at] = 0
        for index, count in enumerate((*sends, *receives), at + 1):
            words[index] = count
        words[at] = seq_id + 1

    def read(self, seq_id: int, peer: int) -> tuple[int, int] | None:
        """Return what that rank sends to `peer` in `seq_id` and expects of it; None without it."""
        at, words = (seq_id & _MASK) * (1 + 2 * self._size), self._words
        if words[at] != seq_id + 1:
            return None
        # The number is looked at before and after: they may be overwritten meanwhile.
        both = words[at + 1 + peer], words[at + 1 + self._size + peer]
        return both if words[at] == seq_id + 1 else None


class Exchanges:
    """The all_to_alls of one group on this rank, and what it brought to the latest."""

    def __init__(self, members: Sequence[int], group: str) -> None:
        self._members, self._group = tuple(members), group
        self._announced: tuple[int, ...] = ()
        self.latest: model.Splits | None = None

    def check(self, seq_id: int, args: Sequence[Any], *, lists: bool) -> None:
        """An all_to_all is about to begin; `lists`: of tensors, and not of the parts of one."""
        size, announced = len(self._members), self._announced
        if len(args) < (2 if lists else 4):
            return
        if lists:  # the elements of each tensor
            sends, receives = tuple(map(torch.numel, args[1])), tuple(map(torch.numel, args[0]))
            widths = (1, 1)
        else:  # the rows of each part, and the elements of a row; without splits parts are equal
            output, source, to_receive, to_send = args[:4]
            received, sent = (len(tensor) if tensor.dim() else 0 for tensor in (output, source))
            sends = tuple(map(int, to_send)) or (sent // size,) * size
            receives = tuple(map(int, to_receive)) or (received // size,) * size
            widths = (
                max(1, source.numel() // max(1, sent)),
                max(1, output.numel() // max(1, received)),
            )
            self._announced = _counts(source, to_send, size) or announced
        self.latest = model.Splits(self._group, seq_id, sends, receives, announced, widths)
        # In a larger group splits are not compared.
        if size <= 64:
            self._tell(self.latest)

    def _tell(self, splits: model.Splits) -> None:
        """Tell others of it, before it is sent."""


class NotedExchanges(Exchanges):
    """The all_to_alls of a rank that refuses none: its splits outlive its process.

    The last ones of all groups are in one file, `path`. gloo aborts who gets too much: such a
    process cannot say what it had brought, and the others have gone on.
    """

    # One count for all groups of the process, as they share the file: it says where in it to write.
    _number = itertools.count()

    def __init__(self, path: Path, members: Sequence[int], group: str) -> None:
        super().__init__(members, group)
        self._path = path
        self._map: Any = None

    def check(self, seq_id: int, args: Sequence[Any], *, lists: bool) -> None:
        """As above. It raises nothing: what is not written is not known later."""
        with contextlib.suppress(Exception):
            super().check(seq_id, args, lists=lists)

    def _tell(self, splits: model.Splits) -> None:
        if self._map is None:
            self._map = False  # no room for it: it is not tried again
            self._map = mapped_file.make(self._path, collective_log.SPLITS_FILE_BYTES)
        if self._map:
            collective_log.write_splits(self._map, next(NotedExchanges._number), splits)


class ComparedExchanges(Exchanges):
    """The all_to_alls of a rank, `rank` of the group, that compares before it sends.

    `own` is the name of its guard's file. `check` raises Mismatch where a peer has other splits.
    """

    def __init__(
        self,
        folder: Path,
        own: str,
        store: Any,
        prefix: str,
        rank: int,
        members: Sequence[int],
        group: str,
    ) -> None:
        super().__init__(members, group)
        self._folder, self._name, self._store, self._prefix = folder, own, store, prefix
        self._rank = rank
        self._own: _File | None = None
        self._names: dict[int, str] = {}
        """The files of peers that can be compared with."""
        self._peers: dict[int, _File] = {}

    def _tell(self, splits: model.Splits) -> None:
        size = len(self._members)
        file_bytes = _ENTRIES * (1 + 2 * size) * 8
        if self._own is None:
            path = self._folder / _file_name(self._name)
            with contextlib.suppress(OSError):
                self._own = _File(mapped_file.make(path, file_bytes), size)
                weakref.finalize(self, path.unlink, missing_ok=True)
                for peer in {*range(size)} - {self._rank}:
                    # It has no room for a guard; or another user wrote into the store, which is
                    # not protected.
                    with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError):
                        name = guard.name_of(self._store, self._prefix, peer)
                        self._names[peer] = _file_name(name)
        for peer in self._names.keys() - self._peers.keys():
            with contextlib.suppress(OSError, ValueError):
                mapped = mapped_file.open_other(self._folder, self._names[peer], file_bytes)
                self._peers[peer] = _File(mapped, size)
        if self._own is None:  # there is no room for it
            return
        sends, receives = (
            tuple(rows * width for rows in of)
            for of, width in zip((splits.sends, splits.receives), splits.widths, strict=True)
        )
        self._own.write(splits.slot, sends, receives)
        for peer, file in self._peers.items():
            theirs, own = file.read(splits.slot, self._rank), (sends[peer], receives[peer])
            if theirs is not None and theirs != own[::-1]:
                raise Mismatch(self._explain(splits, peer, own, theirs))

    def _explain(
        self, splits: model.Splits, peer: int, own: tuple[int, int], theirs: tuple[int, int]
    ) -> str:
        me, other, widths = self._members[self._rank], self._members[peer], splits.widths
        in_rows = widths[0] == widths[1] and not any(n % widths[0] for n in (*own, *theirs))
        row = widths[0] if in_rows else 1
        what = f"rank {me} sends {own[0] // row} to rank {other}, which expects {theirs[1] // row}"
        if own[0] == theirs[1]:
            what = (
                f"rank {other} sends {theirs[0] // row} to rank {me}, which expects {own[1] // row}"
            )
        return (
            f"Collective {splits.slot} (all_to_all) does not match: {what}. It was blocked before "
            "sending; plain PyTorch would abort the process. See which rank is at fault: %ddp_why"
        )


def _file_name(of_guard: str) -> str:
    return f"splits-{of_guard.removeprefix('guard-')}"


def _counts(source: Any, sends: Any, size: int) -> tuple[int, ...]:
    """The numbers that a rank sends each peer, where it sends a few integers and nothing else."""
    many = source.numel()
    if sends or many % size or not 0 < many <= 4096:
        return ()
    if source.dtype not in (torch.int64, torch.int32) or source.device.type != "cpu":
        return ()
    return tuple(source.detach().reshape(size, -1).sum(1).tolist())
