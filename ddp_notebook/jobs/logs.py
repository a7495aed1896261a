"""Logs of ranks, of NCCL's watchdogs and of torchrun's agent: errors, timeouts and exits of ranks.

A log says little: the last error of a rank, where it was raised, and how processes ended. Which
collectives were issued before is not in it. Which rank wrote a line is known by the marks that
torch and torchrun put before it, or by the name of the log.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ddp_notebook.jobs.frames import Frame
from ddp_notebook.model import name_ranks

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "([^"]+)", line (\d{1,9}), in (.+)')
_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$", re.DOTALL)
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COMPILED = re.compile(r'  File "([^"]+)", line (\d{1,9})$')
_UNREADABLE = re.compile(r"(SyntaxError|IndentationError|TabError): (.*)")
_REFUSED = re.compile(r"[\w./-]{1,200}: error: .+")
"""The last line of argparse, after a line with the usage, before it ends a process."""
_ABORTED = re.compile(r"\s*what\(\):\s*(.*)")
_EXIT = re.compile(r"\brank\s+: (\d{1,7}) \(local_rank: (\d{1,7})\)")
_CODE = re.compile(r"\bexitcode\s+: (-?\d{1,5})\b(?: \(pid: (\d+)\))?")
_CLOSED = re.compile(r"Sending process (\d+) closing signal")


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


# -- NCCL's watchdogs ------------------------------------------------------------------------

_WHERE = r"\[(?:PG (?P<group>[^\]]{1,200}?) )?Rank (?P<number>\d{1,7})\]"
_TIMED_OUT = re.compile(
    rf"{_WHERE} *(?:Process group w|NCCL w|W)atchdog.{{0,200}}?collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<at>\d{1,12}), OpType=(?P<operation>\w{1,60})"
    r"(?:, NumelIn=(?P<numel>\d{1,15})\b)?"
)
_STATUS = re.compile(
    rf"{_WHERE}.{{0,400}}?[Ll]ast enqueued (?:NCCL )?work: (?P<issued>-?\d{{1,12}}), "
    r"last completed"
)


@dataclass
class Watchdogs:
    """Which collective each rank gave up on, and how far it had come, as numbers of torch's log.

    Whose line it is, its mark says (``[rank3]:``): the number behind it counts in a group, and is a
    rank in the default group alone.
    """

    timed_out: dict[tuple[int, str], tuple[int, str]] = field(default_factory=dict)
    """By rank and group: the number of the collective, and its description."""
    issued: dict[tuple[int, str], int] = field(default_factory=dict)
    """By rank and group: the number of the last collective that it had issued."""
    unclear: bool = False
    """Some line does not tell of which rank or of which of several groups it is."""

    def add(self, lines: Sequence[tuple[int | None, str]], of_all: int | None) -> None:
        """Read the lines of a log, each with the rank that its mark names; `of_all` wrote all of
        them, if it is not None."""
        for marked, line in lines:
            match = _TIMED_OUT.search(line) or _STATUS.search(line)
            if match is None:
                continue
            group = _group(match["group"])
            rank = marked if marked is not None else of_all
            if rank is None and group in ("", _DEFAULT):
                rank = int(match["number"])
            if match.re is _STATUS:
                if rank is not None and group:
                    self.issued[rank, group] = int(match["issued"])
                continue
            operation, numel = match["operation"], match["numel"]
            size = f" of {int(numel):,} elements" if numel and operation != "COALESCED" else ""
            late = int(match["at"]), f"{operation}{size} (SeqNum={match['at']})"
            # A watchdog gives up once in a group. A second collective of the same rank and group
            # means that the log does not name its groups, as an older torch does not: then no
            # numbers can be compared.
            if rank is None or self.timed_out.setdefault((rank, group), late) != late:
                self.unclear = True

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of which something is known."""
        return frozenset(rank for rank, _ in (*self.timed_out, *self.issued))

    def gave_up(self) -> dict[int, str]:
        """Return the ranks that gave up on one collective, with its description."""
        of: dict[int, set[str]] = {}
        for (rank, _), (_, words) in self.timed_out.items():
            of.setdefault(rank, set()).add(words)
        if self.unclear:
            return {}
        return {rank: min(words) for rank, words in sorted(of.items()) if len(words) == 1}

    def words(self) -> str:
        """Say which ranks gave up on what, and which had not issued it; empty if none gave up."""
        if self.unclear:
            return (
                "NCCL's watchdogs timed out, and the log does not tell in which of several groups"
            )
        if not self.timed_out:
            return ""
        group = min(group for _, group in self.timed_out)
        late = [(*what, rank) for (rank, of), what in self.timed_out.items() if of == group]
        first = min(number for number, *_ in late)
        same: dict[str, list[int]] = {}
        for number, words, rank in late:
            if number == first:
                same.setdefault(words, []).append(rank)
        where = f" of {group}" if group else ""
        parts = [f"{name_ranks(who)} timed out in {what}{where}" for what, who in same.items()]
        if not group:  # an older torch names none here: it is the one of the other lines
            groups = {of for _, of in self.issued}
            group = groups.pop() if len(groups) == 1 else "?"
        # -1: the watchdog of that rank has seen nothing of the group, which proves nothing.
        lacks = {
            rank: number
            for (rank, of), number in self.issued.items()
            if of == group and 0 <= number < first
        }
        if not lacks:
            return "; ".join(parts)
        last = "; ".join(f"the last of rank {rank} was {number}" for rank, number in lacks.items())
        return f"{'; '.join(parts)}, which {name_ranks(lacks)} had not issued by then ({last})"


_DEFAULT = "the default group"


def _group(text: str | None) -> str:
    """Return a name for a group, the same on all ranks: its unique id, where the log has that."""
    if text is None:
        return ""
    if "default_pg" in text:
        return _DEFAULT
    unique = re.search(r"GUID (\S+)", text)
    return f"group {(unique[1] if unique else text.removeprefix('ID ')).strip()}"


# -- all that is written -----------------------------------------------------------------------


@dataclass
class Logs:
    """The facts about ranks in logs. `exits` are codes; negative for signals.

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
    unclaimed: str = ""
    """The certain facts for which no rank is named, in words: errors that ended some, or how many
    processes torchrun ended; empty for nothing."""
    last_words: dict[int, str] = field(default_factory=dict)
    watchdogs: Watchdogs = field(default_factory=Watchdogs)
    ranks: set[int] = field(default_factory=set)
    """The ranks that wrote, or about which something is written."""


def read(texts: Iterable[tuple[str, int | None]]) -> Logs:
    """Read logs, each with the rank that wrote it; None where its lines name their ranks."""
    logs = Logs()
    unmarked: list[str] = []
    before: dict[int, int] = {}
    texts = list(texts)
    most_lines = min(50_000, 2_000_000 // max(1, len(texts)))  # a line may be one byte of a log
    for text, rank in texts:
        last = text.splitlines()[-most_lines:]
        lines = _attributed([_UNPRINTABLE.sub("", line)[:2000] for line in last])
        if rank is not None:
            logs.ranks.add(rank)
        _read_agent([line for _, line in lines], logs)
        # Logs are put side by side by rank. Two processes of one rank mean that an earlier job
        # wrote there, too: its errors would be told as those of this one.
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
    aborted = [rank for rank, code in logs.exits.items() if code == -signal.SIGABRT.value]
    words = [match[1] for match in filter(None, map(_ABORTED.match, lines))]
    if len(aborted) == len(words) == 1:
        logs.last_words.setdefault(aborted[0], words[0])
    errors = list(_all_raised(lines))
    failed = [rank for rank, code in logs.exits.items() if code > 0 and rank not in logs.raised]
    # An address or a time may be each rank's own: only words without numbers are compared.
    alike = {(e.type, re.sub(r"\d+", "…", e.text.partition("\n")[0]), e.frames) for e in errors}
    if failed and len(alike) == 1:
        error = errors[0]
        if any(other.text != error.text for other in errors):
            error = replace(error, text=re.sub(r"\d+", "…", error.text))
        logs.raised.update(dict.fromkeys(failed, error))
    elif errors:
        # That one of these ended it is known; how it ended says nothing without that.
        logs.ranks.update(failed)
        for rank in failed:
            del logs.exits[rank]
        texts = [f"{e.type}: {e.text[:200]}".partition("\n")[0] for e in errors]
        different = "; ".join([*dict.fromkeys(texts)][:4])
        logs.unclaimed = f"the log does not tell which ranks raised {different}"
    elif logs.closed and not logs.ranks:
        count = len(logs.closed)
        logs.unclaimed = (
            f"{count} processes still ran when torchrun ended them, and no rank wrote what it did"
        )


def _all_raised(lines: list[str]) -> Iterator[Raised]:
    """Return the errors in lines that name no rank, without those of the launcher."""
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    yield from _before_running(lines[: starts[0]] if starts else lines)
    # Without marks the tracebacks of ranks stand in any order, even within one another. What can be
    # told is how many different errors there are: if it is one, all ranks that failed had it; if
    # there are more, it stays unknown which rank had which.
    for start, end in pairwise([*starts, len(lines)]):
        if any(line.startswith(_CHAINED) for line in lines[start:end]):
            continue  # the error after it is the uncaught one
        raised = _last_raised(lines[start:end], True)
        if raised is not None and not any(_OF_LAUNCHER.search(f.file) for f in raised.frames):
            yield raised


_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_OF_LAUNCHER = re.compile(r"/torchrun$|torch/distributed/(run|launch)\.py$|/elastic/|/srun$")


def _read_ranks(lines: list[tuple[int | None, str]], rank: int | None, logs: Logs) -> None:
    """Read what the ranks themselves and NCCL's watchdogs in them wrote."""
    of: dict[int | None, list[str]] = {}
    for who, line in lines:
        of.setdefault(who, []).append(line)
    # torch's hook for uncaught errors begins each line with the rank: one that stands in other
    # lines may have been caught.
    unmarked = of.pop(None, [])
    parts = [(who, own, True) for who, own in of.items() if who is not None]
    if rank is not None and not any(_TRACEBACK in line for line in of.get(rank, ())):
        parts.insert(0, (rank, unmarked, False))
    for who, own, certain in parts:
        logs.ranks.add(who)
        if (raised := _last_raised(own, certain)) is not None:
            logs.raised[who] = raised
        if match := next(filter(None, map(_ABORTED.match, own)), None):
            logs.last_words[who] = match[1]
    logs.watchdogs.add(lines, rank)
    logs.ranks.update(logs.watchdogs.ranks)


def _last_raised(lines: list[str], certain: bool) -> Raised | None:
    """Return the error of the last traceback in the lines of a rank."""
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return next(_before_running(lines), None)
    frames, texts, at = _read_frames(lines, starts[-1] + 1)
    match = _RAISED.match(lines[at]) if at < len(lines) else None
    if match is None or not frames:
        return None
    # An error's message has eight lines at most, or it is taken for what follows.
    message, after = lines[at + 1 : at + 8], lines[at + 8 :]
    rest = [line for line in message if line.strip()]
    text = "\n".join([match[2] or "", *rest]).strip()
    # An error that is followed by more of the rank's output was caught and logged, unless torch's
    # own hook marked it.
    ends = not any(line.strip() for line in after)
    name = match[1].rpartition(".")[2]
    return Raised(name, text, tuple(frames), tuple(texts), certain or ends)


def _before_running(lines: list[str]) -> Iterator[Raised]:
    """Return what kept a script from running, for which Python writes no traceback.

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
    """Return the frames of the traceback that goes on in line `at`, their code, and its end."""
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
    """Read what torchrun's agent says: which processes it ended, and how each one ended."""
    text = "\n".join(lines)
    logs.closed.update(map(int, _CLOSED.findall(text)))
    # torchrun's summary lists the ranks that failed, and not those that ended well. Local ranks
    # begin with 0 on each host: where they equal the ranks, the log is of the first host, and all
    # ranks before those listed ran there, too.
    listed = _EXIT.findall(text)
    if all(own == local for own, local in listed):
        # A number in a log may be any: of so many ranks no job is read.
        logs.ranks.update(range(min(max((int(own) for own, _ in listed), default=0), 10_000)))
    rank = None
    for line in lines:
        if match := _EXIT.search(line):
            rank = int(match[1])
        elif rank is not None and (match := _CODE.search(line)):
            logs.ranks.add(rank)
            code, pid = int(match[1]), int(match[2] or 0)
            logs.exits[rank] = code
            logs.pids[rank] = pid
            # One that it closed may have failed of that: its connections went away.
            if pid in logs.closed:
                logs.ended_by_agent.add(rank)
            rank = None


# -- whose line it is ------------------------------------------------------------------------

_RANK = re.compile(r"(?:.{0,120}?[\s:])?\[rank(\d{1,6})\]:\s?(.*)", re.DOTALL)
"""torch's own mark, on uncaught errors and what its C++ code writes. What schedulers and containers
put before it is read past."""
_LOCAL = re.compile(r"\s*\[default(\d{1,6})\]:(.*)", re.DOTALL)
"""That of torchrun's ``--tee``, on what its processes write: a local rank."""


def _attributed(lines: Iterable[str]) -> list[tuple[int | None, str]]:
    """Return each line without its marks, and the rank that wrote it, where a mark says that."""
    none = -1
    marked: list[tuple[int, int | None, str]] = []
    ranks_of: dict[int, set[int]] = {none: set()}
    for text in lines:
        local, rank = none, None
        if match := _LOCAL.match(text):
            local, text = int(match[1]), match[2]
            ranks_of.setdefault(local, set())
        elif match := _EXIT.search(text):
            ranks_of.setdefault(int(match[2]), set()).add(int(match[1]))
        if match := _RANK.match(text):
            rank, text = int(match[1]), match[2]
            ranks_of[local].add(rank)
        marked.append((local, rank, text))
    # torchrun's processes are counted on each host, so in a log of several hosts one number is of
    # several ranks. On one host, as far as is known, all have the numbers of their ranks.
    del ranks_of[none]
    on_one_host = all(ranks <= {local} for local, ranks in ranks_of.items())
    is_rank = {
        local: min(ranks, default=local)
        for local, ranks in ranks_of.items()
        if on_one_host or len(ranks) == 1
    }
    return [(is_rank.get(local) if rank is None else rank, text) for local, rank, text in marked]
