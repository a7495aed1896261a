"""Marks that launchers and schedulers put before the lines of a log, and which rank they name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_SCHEDULERS = tuple(
    re.compile(text)
    for text in (
        rf"(?:{_TIME}|\[{_TIME}\]) ",
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,80} [\w./-]{1,80}(?:\[\d{1,9}\])?: ",
        r"[\w./-]{1,80} +\| ?",
        r"\[(?:pod|container)/[\w./-]{1,160}\] ",
        r"\(\w[\w.() ]{0,80} pid=\d{1,9}(?:, [^()]{0,80})?\) ",
    )
)
"""A time, that of the system's journal, of docker compose, of kubectl and stern, of Ray."""
_MOST_SCHEDULERS = 4
_LABELS = tuple(
    (re.compile(text, re.DOTALL), share)
    for text, share in (
        (r"\s*(\d{1,6}): ?(.*)", 1.0),
        (r"\[[^\[\],]{1,80},(\d{1,6})\](?:<std\w+>)?:(.*)", 0.5),
        (r"\[1,mpirank:(\d{1,6}),[\w.-]{1,80}\](?:<std\w+>)?:(.*)", 0.5),
    )
)
"""Of ``srun --label``, mpirun and SageMaker, with the number of the task; and which share of the
lines has one at least. What these launchers say themselves has none."""
_OF_LAUNCHER = re.compile(r"(?:srun|slurmstepd|mpirun|prterun): ")
_OF_AGENT = re.compile(r"torch[./]distributed[./](?:elastic|run\b)|ChildFailedError|/torchrun\b")
_RANK = re.compile(
    r"\s*(?:(?:[^\s\[\]()]{1,80}|\([^()]{1,80}\)|\[(?:\d{1,9}|std\w+)\]) |"
    r"\[[\w.:/-]{1,80}\]: ?){0,4}"
    r"\[rank(\d{1,6})\]:\s?(.*)",
    re.DOTALL,
)
"""torch's own, on uncaught errors and what its C++ code writes. Others may stand before it: a
number, a name, ``[stderr]``, ``[trainer0]:``."""
_LOCAL = re.compile(r"\s*\[default(\d{1,6})\]:(.*)", re.DOTALL)
"""That of torchrun's ``--tee``, on what its processes write: a local rank."""
_LISTED = re.compile(r"\s*rank\s+: (\d{1,7}) \(local_rank: (\d{1,7})\)")


def attributed(lines: Sequence[str]) -> list[tuple[int | None, str]]:
    """Each line without its marks, and the rank that wrote it, where a mark says that."""
    return _local(_labelled(_without_schedulers(lines)))


def _without_schedulers(lines: Sequence[str]) -> Sequence[str]:
    """Without what stands before most of the lines and names no rank."""
    for _ in range(_MOST_SCHEDULERS):
        half = sum(1 for line in lines if line.strip()) / 2
        mark = next((m for m in _SCHEDULERS if half and _count(m, lines) >= half), None)
        if mark is None:
            break
        lines = [mark.sub("", line, count=1) if mark.match(line) else line for line in lines]
    return lines


def _count(mark: re.Pattern[str], lines: Iterable[str]) -> int:
    return sum(1 for line in lines if mark.match(line))


def _labelled(lines: Sequence[str]) -> list[tuple[int | None, str]]:
    """With the number of the task where all lines have one, and tasks are ranks.

    A task may be torchrun, too, on each host: then its number says nothing of ranks.
    """
    written = [line for line in lines if line.strip() and not _OF_LAUNCHER.match(line)]
    for label, share in _LABELS:
        if len(written) < 2 or _count(label, lines) < share * len(written):
            continue
        pairs = zip(map(label.match, lines), lines, strict=True)
        return _of_ranks([(int(m[1]), m[2]) if m else (None, line) for m, line in pairs])
    return [(None, line) for line in lines]


def _of_ranks(labelled: Sequence[tuple[int | None, str]]) -> list[tuple[int | None, str]]:
    """Lines with the numbers of tasks: these are left out where tasks are no ranks."""
    texts = [text for task, text in labelled if task is not None]
    pad = int(all(text[:1] in (" ", "") for text in texts))
    marked = ((task, _RANK.match(text)) for task, text in labelled)
    ranks = all(match is None or int(match[1]) == task for task, match in marked)
    tells = ranks and not any(map(_OF_AGENT.search, texts))
    return [(t if tells else None, text if t is None else text[pad:]) for t, text in labelled]


def _local(lines: Sequence[tuple[int | None, str]]) -> list[tuple[int | None, str]]:
    """With the ranks that torch's own marks name, and torchrun's, where these are ranks."""
    is_rank = _ranks_of_local(text for _, text in lines)
    found = []
    for label, text in lines:
        rank = label
        if match := _LOCAL.match(text):
            rank, text = is_rank.get(int(match[1])), match[2]
        if match := _RANK.match(text):
            rank, text = int(match[1]), match[2]
        found.append((rank, text))
    return found


def _ranks_of_local(texts: Iterable[str]) -> dict[int, int]:
    """Which rank is which of torchrun's processes, as far as the log tells that of no other."""
    marked: dict[int, set[int]] = {}
    known: dict[int, set[int]] = {}
    for text in texts:
        if match := _LOCAL.match(text):
            inner = _RANK.match(match[2])
            marked.setdefault(int(match[1]), set()).update({int(inner[1])} if inner else ())
        elif match := _LISTED.match(text):
            known.setdefault(int(match[2]), set()).add(int(match[1]))
    for local, ranks in marked.items():
        known.setdefault(local, set()).update(ranks)
    if all(ranks <= {local} for local, ranks in known.items()):
        return {local: local for local in marked}  # of one host, as far as is known
    return {local: min(known[local]) for local in marked if len(known[local]) == 1}
