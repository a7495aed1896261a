"""What ranks and torchrun's agent wrote, as errors, exits and timeouts of ranks.

A log says little: the last error of a rank, where it was raised, and how processes ended. Which
collectives were issued before is not in it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ddp_notebook.evidence import marks
from ddp_notebook.evidence.connects import Connects
from ddp_notebook.evidence.frames import Frame
from ddp_notebook.evidence.nccl import Watchdogs

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "([^"]+)", line (\d{1,9}), in (.+)')
_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$", re.DOTALL)
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COMPILED = re.compile(r'  File "([^"]+)", line (\d{1,9})$')
_UNREADABLE = re.compile(r"(SyntaxError|IndentationError|TabError): (.*)")
_REFUSED = re.compile(r"[\w./-]{1,200}: error: .+")
"""What argparse writes, after a line with the usage, before it ends a process."""
_MOST_MESSAGE_LINES = 8
_LONGEST_LINE = 2000
_ABORTED = re.compile(r"\s*what\(\):\s*(.*)")
_EXIT = re.compile(r"\s*rank\s+: (\d{1,7}) \(local_rank: (\d{1,7})\)")
_CODE = re.compile(r"\s*exitcode\s+: (-?\d{1,5})\b(?: \(pid: (\d+)\))?")
_CLOSED = re.compile(r"Sending process (\d+) closing signal")
_SIGABRT = signal.SIGABRT.value


@dataclass(frozen=True, slots=True)
class Raised:
    """An error that ended a rank. `frames` has the outermost first, `texts` each one's line.

    `certain` is true if it is known to be uncaught: torch or the end of the log says so.
    """

    type: str
    text: str
    frames: tuple[Frame, ...] = ()
    texts: tuple[str, ...] = ()
    certain: bool = True


@dataclass
class Logs:
    """What logs say about ranks. `exits` are codes; negative for signals.

    `exits` of a rank that was not listed by an agent that listed others is 0: it had ended well.
    """

    raised: dict[int, Raised] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    """Processes that torchrun's agent ended."""
    pids: dict[int, int] = field(default_factory=dict)
    """By rank, the pid whose end torchrun's agent reported."""
    two_jobs: str = ""
    """Why the logs must be of more than one job; empty if they need not be."""
    ended_by_agent: set[int] = field(default_factory=set)
    """Ranks that still ran when another one had failed."""
    unclaimed: tuple[str, ...] = ()
    """Errors that ended ranks: which ranks is not known."""
    last_words: dict[int, str] = field(default_factory=dict)
    watchdogs: Watchdogs = field(default_factory=Watchdogs)
    connects: Connects = field(default_factory=Connects)
    ranks: set[int] = field(default_factory=set)
    """The ranks that wrote, or about which something is written."""


def read(texts: Iterable[tuple[str, int | None]]) -> Logs:
    """Read logs, each with the rank that wrote it; None where its lines name their ranks."""
    logs = Logs()
    unmarked: list[str] = []
    before: dict[int, int] = {}
    for text, rank in texts:
        lines = marks.attributed([_clean(line) for line in text.splitlines()])
        if rank is not None:
            logs.ranks.add(rank)
        _read_agent([line for _, line in lines], logs)
        for other in (r for r in logs.pids if before.get(r, logs.pids[r]) != logs.pids[r]):
            logs.two_jobs = (
                f"rank {other} is process {before[other]} and process {logs.pids[other]}"
            )
        before = dict(logs.pids)
        _read_ranks(lines, rank, logs)
        unmarked += [line for who, line in lines if who is None] if rank is None else ()
    if logs.exits:
        for rank in logs.ranks - logs.exits.keys():
            logs.exits[rank] = 0
    _attribute(logs, unmarked)
    # An error that was caught and logged ended no rank.
    for rank, error in list(logs.raised.items()):
        if not error.certain and logs.exits.get(rank, 0) <= 0:
            del logs.raised[rank]
    return logs


def _attribute(logs: Logs, lines: list[str]) -> None:
    """Give errors that stand in a log without their rank to the ranks that failed.

    torch writes the rank only once there is a group. Where errors differ, and more than one rank
    may have written them, whose they are is not known.
    """
    _attribute_last_words(logs, lines)
    errors = list(_all_raised(lines))
    failed = [rank for rank, code in logs.exits.items() if code > 0 and rank not in logs.raised]
    # An address or a time may be each rank's own: only words without numbers are compared.
    alike = {(e.type, _NUMBER.sub("…", e.text.partition("\n")[0]), e.frames) for e in errors}
    if failed and len(alike) == 1:
        logs.raised.update(dict.fromkeys(failed, _common(errors)))
    elif errors:
        # That one of these ended it is known; how it ended says nothing without that.
        logs.ranks.update(failed)
        for rank in failed:
            del logs.exits[rank]
        logs.unclaimed = tuple(dict.fromkeys(f"{e.type}: {e.text[:200]}" for e in errors))


_NUMBER = re.compile(r"\d+")


def _common(errors: list[Raised]) -> Raised:
    """The common part of errors that differ at most by their numbers."""
    same = len({error.text for error in errors}) == 1
    text = errors[0].text if same else _NUMBER.sub("…", errors[0].text)
    return replace(errors[0], text=text)


def _attribute_last_words(logs: Logs, lines: list[str]) -> None:
    aborted = [rank for rank, code in logs.exits.items() if code == -_SIGABRT]
    words = [match[1] for match in filter(None, map(_ABORTED.match, lines))]
    if len(aborted) == len(words) == 1:
        logs.last_words.setdefault(aborted[0], words[0])


def _all_raised(lines: list[str]) -> Iterator[Raised]:
    """The errors in lines that no rank is named in, without those of the launcher."""
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    yield from _before_running(lines[: starts[0]] if starts else lines)
    for start, end in pairwise([*starts, len(lines)]):
        if any(line.startswith(_CHAINED) for line in lines[start:end]):
            continue  # the error after it is the uncaught one
        raised = _last_raised(lines[start:end], True)
        if raised is not None and not any(_OF_LAUNCHER.search(f.file) for f in raised.frames):
            yield raised


_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_OF_LAUNCHER = re.compile(r"/torchrun$|torch/distributed/(run|launch)\.py$|/elastic/|/srun$")


def _read_ranks(lines: list[tuple[int | None, str]], rank: int | None, logs: Logs) -> None:
    """What the ranks themselves wrote, and NCCL's watchdogs in them."""
    for who, own, certain in _by_rank(lines, rank):
        logs.ranks.add(who)
        if (raised := _last_raised(own, certain)) is not None:
            logs.raised[who] = raised
        if match := next(filter(None, map(_ABORTED.match, own)), None):
            logs.last_words[who] = match[1]
    logs.watchdogs.add(lines, rank)
    logs.connects.add(line for _, line in lines)
    logs.ranks.update(logs.watchdogs.ranks | logs.connects.refused)


def _clean(line: str) -> str:
    return _UNPRINTABLE.sub("", line)[:_LONGEST_LINE]


def _by_rank(
    lines: list[tuple[int | None, str]], rank: int | None
) -> Iterator[tuple[int, list[str], bool]]:
    """The lines of each rank, and whether an error in them was certainly not caught.

    torch's hook for uncaught errors begins each line with the rank.
    """
    of: dict[int, list[str]] = {}
    unmarked = []
    for who, line in lines:
        if who is not None:
            of.setdefault(who, []).append(line)
        else:
            unmarked.append(line)
    if rank is not None and not any(_TRACEBACK in line for line in of.get(rank, ())):
        yield rank, unmarked, False
    yield from ((who, own, True) for who, own in of.items())


def _last_raised(lines: list[str], certain: bool) -> Raised | None:
    """The last traceback in the lines of a rank."""
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return next(_before_running(lines), None)
    frames, texts, at = _read_frames(lines, starts[-1] + 1)
    match = _RAISED.match(lines[at]) if at < len(lines) else None
    if match is None or not frames:
        return None
    rest = [line for line in lines[at + 1 : at + _MOST_MESSAGE_LINES] if line.strip()]
    text = "\n".join([match[2] or "", *rest]).strip()
    ends = not any(line.strip() for line in lines[at + _MOST_MESSAGE_LINES :])
    name = match[1].rpartition(".")[2]
    return Raised(name, text, tuple(frames), tuple(texts), certain or ends)


def _before_running(lines: list[str]) -> Iterator[Raised]:
    """What kept a script from running, for which Python writes no traceback.

    It could not be compiled; or its arguments were refused, which ends it by SystemExit.
    """
    usage, at, frame = False, 0, None
    for number, line in enumerate(lines):
        usage |= line.startswith("usage: ")
        if match := _COMPILED.match(line):
            at, frame = number, Frame(match[1], int(match[2]), "<module>")
        elif usage and _REFUSED.fullmatch(line):
            yield Raised("SystemExit", line)
        elif frame is not None and (match := _UNREADABLE.fullmatch(line)):
            yield Raised(match[1], match[2], (frame,), (lines[at + 1].strip(),))
            frame = None


def _read_frames(lines: list[str], at: int) -> tuple[list[Frame], list[str], int]:
    """The frames of the traceback that goes on in line `at`, their code, and where they end."""
    frames: list[Frame] = []
    texts: list[str] = []
    while at < len(lines) and (lines[at].startswith(" ") or not lines[at]):
        if match := _FRAME.match(lines[at]):
            frames.append(Frame(match[1], int(match[2]), match[3]))
            follows = lines[at + 1].strip() if at + 1 < len(lines) else ""
            texts.append("" if follows.startswith("File ") else follows)
        at += 1
    return frames, texts, at


def _read_agent(lines: list[str], logs: Logs) -> None:
    """What torchrun's agent says of its processes: whom it ended, and how each one ended."""
    logs.closed.update(int(match[1]) for match in filter(None, map(_CLOSED.search, lines)))
    rank = None
    listed = [match.groups() for match in filter(None, map(_EXIT.match, lines))]
    if all(rank == local for rank, local in listed):
        # They are of the first host: so are the ranks before them, which it need not have listed.
        logs.ranks.update(range(max((int(own) for own, _ in listed), default=0)))
    for line in lines:
        if match := _EXIT.match(line):
            rank = int(match[1])
        elif rank is not None and (match := _CODE.match(line)):
            logs.ranks.add(rank)
            code, pid = int(match[1]), int(match[2] or 0)
            logs.exits[rank] = code
            logs.pids[rank] = pid
            # One that it closed may have failed of that: its connections went away.
            if pid in logs.closed:
                logs.ended_by_agent.add(rank)
            rank = None
