"""Files that an ended job left: sorted, read as one case, and judged.

Files say less than live ranks. What a rank issued after its dump is unknown, so a missing
collective is never proof; a mismatch in one slot is. The rules are those of a session; what they
cannot decide on less evidence is undecided, with the facts.

Files are not trusted: what is read and what is built from it is bounded, control characters are
removed, links are not followed, and what is malformed or cannot be read is left out, with a note.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from ddp_notebook.diagnosis import catalogue, diagnose_run, failures
from ddp_notebook.diagnosis.collectives.exits import GOT_TOO_MUCH
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.diagnosis.standing_still import apart
from ddp_notebook.errors import UsageMistake
from ddp_notebook.files import opened
from ddp_notebook.jobs import dumps, logs
from ddp_notebook.jobs.dumps import Dump, NotPlain
from ddp_notebook.jobs.frames import Sources, function_called
from ddp_notebook.jobs.logs import Logs, Raised
from ddp_notebook.jobs.verdict import own_errors, raised_in_last
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Activity,
    Case,
    Category,
    Collective,
    Collectives,
    Diagnosis,
    Finding,
    InitArguments,
    Part,
    Phase,
    Place,
    ProcessEnd,
    RankError,
    RankReport,
    Ranks,
    at_place,
    cut,
    name_ranks,
)
from ddp_notebook.views.ansi import plain, visible

MOST_IN_FOLDERS = 50_000
"""A folder with more in it is no job's: `/`, or a home folder."""
_MOST_RANKS = 4096
"""So many are judged, and so many files are read: one of each rank's."""
_LOG_TAIL_BYTES = 2 << 20
"""How much of a log is read, from its end, where the errors are."""
_LOGS = frozenset([".log", ".txt", ".out", ".err"])
_TORCHRUN = re.compile(r"attempt_(\d+)/(\d{1,6})/(?:stdout|stderr)\.log$")
_OF_RANK = re.compile(r"rank[_-]?(\d{1,6})(?!\d)")
_ABORTED = -signal.SIGABRT.value


# -- the files -------------------------------------------------------------------------------


@dataclass
class Found:
    """The files that were read. `sources` are the user's files that they name."""

    sources: Sources
    dumps: dict[int, Dump] = field(default_factory=dict)
    logs: list[tuple[str, int | None]] = field(default_factory=list)
    """Texts, each with the rank whose log it is by its name."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """The names of what was not read, by the reason."""

    def leave_out(self, name: str, why: str) -> None:
        """Note that a file was not read."""
        self.left_out.setdefault(plain(why), []).append(visible(name))

    @property
    def notes(self) -> tuple[str, ...]:
        """The files that were not read, and why, a line for each reason."""
        notes = []
        # The last reason may be that there are more files than are read.
        reasons = list(self.left_out.items())
        for why, names in reasons if len(reasons) <= 50 else [*reasons[:49], reasons[-1]]:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            notes.append(f"not read: {', '.join(names[:3])}{more}{why}")
        return tuple(notes)


def found_in(paths: Sequence[Path]) -> Found:
    """Read the files at `paths`, and those in folders among them. Raises UsageMistake."""
    found = Found(Sources())
    written_s = dict(_files(paths, found))
    # torchrun writes LOG_DIR/RUN_ID_random/attempt_N/LOCAL_RANK/stderr.log. Runs of weeks lie in
    # one folder, and so do all attempts of a launcher that was told to restart ranks. An error
    # before the last attempt did not end the job, and to blame its rank would be wrong.
    attempts = {file: file.parent.parent for file in written_s if _TORCHRUN.search(file.as_posix())}
    newest: dict[Path, tuple[float, str, Path]] = {}
    for file, attempt in attempts.items():
        log_dir, age = attempt.parent.parent, (written_s[file], attempt.name, attempt)
        newest[log_dir] = max(age, newest.get(log_dir, age))
    last = {attempt for *_, attempt in newest.values()}
    files = [file for file in sorted(written_s) if file not in attempts or attempts[file] in last]
    # Code that is newer than all of them is not what ran.
    found.sources.before_s = max((written_s[file] for file in files), default=0.0)
    # More than this, in bytes, is no job's logs: what is left out is noted.
    left_bytes = 512 << 20
    # So many collectives are kept in all. An entry that a dump lists 50,000 times takes it two
    # bytes each.
    most_records = min(50_000, 1_000_000 // max(1, len(files)))
    for number, file in enumerate(files):
        if number >= _MOST_RANKS or left_bytes <= 0:
            found.leave_out(f"{len(files) - number:,} more files", ": that is more than are read")
            break
        left_bytes -= _take(file, found, most_records)
    return found


def _files(paths: Sequence[Path], found: Found) -> Iterator[tuple[Path, float]]:
    """Return the files to read, and when each was written; note what is not to be read."""
    for path in paths:
        shown = cut(visible(str(path)), 300)
        try:
            status = path.stat()  # a link that the user names is followed
        except PermissionError as error:
            raise UsageMistake(f"{shown} cannot be read: {error.strerror}.") from None
        except (OSError, ValueError):
            raise UsageMistake(
                f"{shown} does not exist. Name a pid, or a folder or files of a job."
            ) from None
        if not stat.S_ISDIR(status.st_mode):
            yield path, status.st_mtime
            continue
        most, folders = MOST_IN_FOLDERS + 1, [path]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as entries:
                    names = [entry.name for entry in islice(entries, most)]
            except OSError as error:
                found.leave_out(folder.name or str(folder), f": {error.strerror or error}")
                continue
            most -= len(names)
            if most <= 0:
                raise UsageMistake(
                    f"{shown} holds more than {MOST_IN_FOLDERS:,} files and folders. Name the "
                    "folder that one job wrote."
                )
            for file in map(folder.joinpath, names):
                try:
                    status = file.lstat()
                except OSError as error:  # it has gone, or its folder may be listed and no more
                    found.leave_out(file.name, f": {error.strerror or error}")
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield file, status.st_mtime
                elif stat.S_ISDIR(status.st_mode):
                    folders.append(file)
                else:
                    # Links are not followed: they may lead anywhere, also where we may not look,
                    # and in a ring.
                    is_link = stat.S_ISLNK(status.st_mode)
                    what = "a link" if is_link else "a pipe, a socket or a device"
                    found.leave_out(file.name, f": {what}")


def _take(file: Path, found: Found, most_records: int) -> int:
    """Read one file into `found`; return how many bytes that were."""
    data = b""
    try:
        with opened(file) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            start = stream.read(2)
            # A log by its name; or without a suffix what begins as no dump does.
            if file.suffix in _LOGS or not (file.suffix or start[:1] in (b"\x80", b"{", b"")):
                stream.seek(max(0, size_bytes - _LOG_TAIL_BYTES))
                text = stream.read(_LOG_TAIL_BYTES).decode("utf-8-sig", errors="replace")
                if text and not text.strip("\0"):  # it is sparse
                    found.leave_out(file.name, f", which has {size_bytes:,} bytes and no text")
                    return 0
                # Its rank is in its name; torchrun's folders are named by local ranks.
                match = _TORCHRUN.search(file.as_posix()) or _OF_RANK.search(file.name)
                found.logs.append((text, int(match[match.lastindex or 1]) if match else None))
                return sys.getsizeof(text)  # one character of another script makes it four times
            if size_bytes > dumps.MOST_BYTES:
                found.leave_out(file.name, f", which has {size_bytes:,} bytes")
            elif data := start + stream.read(size_bytes):
                wire, rank = dumps.parse(data), dumps.rank_of(file.name)
                if rank is None:
                    found.leave_out(file.name, ", whose name does not say of which rank it is")
                # Of the same dump as a pickle and as JSON, the pickle: it has the stacks.
                elif rank not in found.dumps or data[:1] != b"{":
                    found.dumps[rank] = dumps.read(wire, rank, found.sources, most_records)
    except OSError as error:
        found.leave_out(file.name, f": {error.strerror or error}")
    except NotPlain as error:
        found.leave_out(file.name, f", which is no dump of torch: {error}")
    return len(data)


# -- as one case -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathered:
    """A case out of files. `dumps` and `logs` are the ranks of which there are such.

    `stacks` is true where dumps say at which lines collectives were issued: only then ranks'
    collectives can be told apart by more than their shapes. `unread` says what was left out.
    """

    case: Case
    dumps: Ranks
    logs: Ranks
    stacks: bool
    unread: tuple[str, ...] = ()
    stood: Mapping[int, tuple[Collective, ...]] = field(default_factory=dict)
    """By rank, where no dump says more, the call in which it gave up waiting, by its stack: which
    number is unknown."""
    certain: str = ""
    """Which collective NCCL's watchdogs gave up on, and who had not issued it; or what else is
    certain of logs that name no rank. Empty for none."""

    @property
    def basis(self) -> str:
        """Name the files that were read."""
        parts = []
        if self.dumps:
            stacks = "with stacks" if self.stacks else "without stacks"
            parts.append(f"flight-recorder dumps of {name_ranks(self.dumps)} ({stacks})")
        if self.logs:
            parts.append(f"logs of {name_ranks(self.logs)}")
        return " and ".join(parts) or "a log of torchrun"


def gather(paths: Sequence[Path]) -> Gathered:
    """Read the files and folders at `paths`. Raises UsageMistake if nothing is there."""
    found = found_in(paths)
    written = logs.read(found.logs)
    sources, read = found.sources, dict(sorted(found.dumps.items()))
    if written.two_jobs:
        raise UsageMistake(
            f"These files are of more than one job: in their logs {written.two_jobs}. Name the "
            "files of one job."
        )
    size = _size(read, written, found.notes)
    errors = {
        rank: RankError("DistBackendError", f"NCCL's watchdog timed out in {what}")
        for rank, what in written.watchdogs.gave_up().items()
    }
    stood = {}
    for rank, raised in written.raised.items():
        lines = zip(raised.frames, raised.texts, strict=True)
        places = [(sources.place(frame), text) for frame, text in lines if frame.users]
        at = tuple(replace(place, text=place.text or text) for place, text in places)
        errors[rank] = RankError(raised.type, raised.text, at)
        if (call := _call_of(rank, raised, at, size)) is not None:
            stood[rank] = (call,)
    records = {rank: dump.records for rank, dump in read.items()}
    for rank, issued in records.items():
        # gloo's dumps say of the collective that raised the error that it is done.
        if rank in errors and raised_in_last(errors[rank], issued):
            records[rank] = (*issued[:-1], replace(issued[-1], phase=Phase.FAILED))
    reports = tuple(
        _report(rank, records.get(rank, ()), errors.get(rank), written) for rank in range(size)
    )
    groups: dict[str, Ranks] = {}
    for dump in read.values():
        groups = {**dump.groups, **groups}
    first = {rank: of[0].number for rank, of in records.items() if of and of[0].number}
    return Gathered(
        Case(reports, collectives=Collectives(records, groups, first), sources=sources.texts),
        tuple(read),
        tuple(sorted(written.ranks)),
        all(dump.stacks for dump in read.values() if dump.records),
        found.notes,
        {} if any(records.values()) else stood,  # gloo's dumps have no sends
        written.watchdogs.words() or written.unclaimed,
    )


def _size(read: Mapping[int, Dump], written: Logs, notes: Sequence[str]) -> int:
    """Return how many ranks there are, as far as files tell. Raises UsageMistake for nothing.

    Of torchrun's log alone that may be none.
    """
    sizes = [dump.world_size for dump in read.values()]
    size = max([0, *sizes, *(rank + 1 for rank in (*read, *written.ranks))])
    if not size and not written.closed:
        raise UsageMistake(
            "No files of a job found: no dump of torch's flight recorder, no log that names its "
            "rank, no saved run." + "".join(f"\n  {note}" for note in notes[:5])
        )
    if size > _MOST_RANKS:
        raise UsageMistake(f"The job has {size:,} ranks; at most {_MOST_RANKS:,} are read.")
    return size


def _call_of(rank: int, raised: Raised, at: tuple[Place, ...], size: int) -> Collective | None:
    """Return the call of torch that an error came out of; None where that was none."""
    api, part = function_called(raised.frames[::-1])
    if not api or not at:
        return None
    operation = "all_reduce" if part is Part.BACKWARD else api.rpartition(".")[2]
    # In the default group where the line itself calls the function, and names no group.
    line = at[-1].text
    in_default = f"{api}(" in line and "group" not in line and line.endswith(")")
    return Collective(
        rank,
        0,
        operation,
        group=DEFAULT_GROUP if part is not None or in_default else "?",
        api=api,
        part=part,
        # Of two ranks, the other one.
        peer=1 - rank if operation in ("send", "recv") and size == 2 else None,
        path=at,
    )


def _report(
    rank: int, records: tuple[Collective, ...], error: RankError | None, written: Logs
) -> RankReport:
    """Return one rank's report: its error, else how its process ended, else what it was in."""
    known = RankReport(rank, end=ProcessEnd(last_words=written.last_words.get(rank, "")))
    # A dump with records proves that the process group was made; a log proves nothing of it.
    if records:
        arguments = InitArguments(rank=rank)
        known = replace(known, entered=1, left=1, initialized=True, arguments=arguments)
    if error is not None:
        return replace(known, activity=Activity.FAILED, path=error.at, error=error)
    code = written.exits.get(rank)
    # SIGTERM and SIGINT: a launcher, a scheduler or a person ended it.
    alive = rank in written.ended_by_agent or code in (-signal.SIGTERM, -signal.SIGINT)
    if code == 0:
        # What it issued after its dump is not known: so it is not known either what it lacks.
        return replace(
            known, end=replace(known.end, code=0), doing="its process ended without an error"
        )
    # How a process ends that the launcher ends says nothing of it: others were gone before.
    if code is not None and not alive:
        return replace(known, activity=Activity.DEAD, end=replace(known.end, code=code))
    pending = next((record for record in records if not record.over), None)
    if pending is not None:
        return replace(known, activity=Activity.WAITING, inside="collective", path=pending.path)
    ran = "it still ran when torchrun ended it" if alive else "what it did then is not recorded"
    if records:
        last, at = records[-1], at_place(records[-1].place)
        ran = f"{ran}; collective {last.slot}, {last.operation}{at}, was its last, and is done"
    return replace(known, activity=Activity.SILENT, doing=ran)


# -- judged ----------------------------------------------------------------------------------


def judged(gathered: Gathered) -> Diagnosis:
    """Return the diagnosis of what is in files."""
    case = gathered.case
    # Without lines of code the rules cannot tell an order from a condition: that rank 0 is in a
    # barrier while rank 1 is in an all_reduce may be `if rank == 0:`, or two threads, or a rank
    # that is one iteration behind. JSON dumps have no lines. Then only what logs say is judged.
    by_rules = case if gathered.stacks else replace(case, collectives=Collectives())
    diagnosis = diagnose_run(by_rules)
    findings = [f for f in diagnosis.findings if not _is_victim(f, case)]
    if all(finding.passing for finding in findings):
        findings += [*_ended_in_set_up(case), *own_errors(case), *_conditional(by_rules)]
    # From what proves most to what proves least; each is asked where those before it are silent.
    if not findings:
        findings = list(apart(replace(case, collectives=Collectives(gathered.stood))))
    if not findings:
        dead = [report for report in case.ranks if report.activity is Activity.DEAD]
        findings = [f for f in deaths(case, dead, ()) if not _is_victim(f, case)]
    finished = tuple(report.rank for report in case.ranks if report.end.code == 0)
    lost = case.where(Activity.FAILED)
    if not findings and len(finished) == 1 and len(lost) + 1 == case.world_size:
        # All others lost their connection to a rank that had left.
        findings = [f for f in failures.raised_in(case, finished) if f.ranks == finished]
    findings = findings or _undecided(gathered)
    what = {report.rank: _doing(report) for report in case.ranks}
    diagnosis = replace(diagnosis, findings=tuple(findings), doing=what)
    sure = findings or (finished and len(finished) == len(case.ranks))
    return replace(diagnosis, unsure="" if sure else _NOT_KNOWN)


_NOT_KNOWN = "No problem is seen in these files; how the job went on is not in them."


def _is_victim(finding: Finding, case: Case) -> bool:
    """True if C++ code aborted it: also for what another rank sent, or did not send in time.

    Or for nothing that matters, when all was done.
    """
    died = finding.category is Category.RANK_DIED
    return died and any(e.end.code == _ABORTED for e in case.ranks if e.rank in finding.ranks)


def _ended_in_set_up(case: Case) -> Iterable[Finding]:
    """Return ranks that ended normally while others waited in setup until their timeout."""
    if any(case.collectives.of.values()):
        return
    waited = tuple(
        report.rank
        for report in case.ranks
        if report.activity is Activity.FAILED
        and ("clients joined" in report.error.text or "default_pg/" in report.error.text)
    )
    ended = tuple(report.rank for report in case.ranks if report.end.code == 0)
    if waited and ended and len(waited) + len(ended) == case.world_size:
        yield catalogue.finding("missing-rank.ended", ended, waiting=waited)


def _conditional(case: Case) -> list[Finding]:
    """Return collectives on whose line only some ranks come, where the others ended without it.

    Their dumps do not show that they did not call it later; the condition in the code does.
    """
    at = {
        (record.group, record.slot)
        for report in case.ranks
        if report.activity in (Activity.WAITING, Activity.FAILED)
        for record in case.collectives.of.get(report.rank, ())[-1:]
        if not record.is_point_to_point
    }

    # The ranks whose records lead up to a collective in which another one was left.
    before = {
        rank
        for rank, records in case.collectives.of.items()
        for last in records[-1:]
        if (last.group, last.slot + 1) in at
    }
    ended = {rank for rank in before if case.ranks[rank].end.code == 0}
    if not ended:
        return []
    ranks = tuple(
        replace(report, activity=Activity.IDLE, initialized=False)
        if report.rank in ended
        else report
        for report in case.ranks
    )
    findings = diagnose_run(replace(case, ranks=ranks)).findings
    return [f for f in findings if f.category is Category.CONDITIONAL_COLLECTIVE]


def _undecided(gathered: Gathered) -> list[Finding]:
    """Say who waited, failed or was ended, where no rule says why."""
    case = gathered.case
    facts = []
    stopped = tuple(sorted({*case.where(Activity.WAITING), *case.where(Activity.FAILED)}))
    ended = []
    for report in case.ranks:
        if sizes := GOT_TOO_MUCH.search(report.end.last_words):
            ended.append(report.rank)
            facts.append(
                catalogue.words(
                    "undecided.files-aborted.got-too-much",
                    ranks=(report.rank,),
                    got=sizes[1],
                    expected=sizes[2],
                )
            )
    aborted = tuple(r.rank for r in case.ranks if r.end.code == _ABORTED and r.rank not in ended)
    if aborted:
        facts.append(catalogue.words("undecided.files-aborted.aborted", ranks=aborted))
    if not (gathered.certain or stopped or facts):
        return []
    return [
        catalogue.finding(
            _how_they_stopped(gathered, stopped),
            (),
            waiting=case.where(Activity.WAITING),
            evidence=(*facts, *_facts(case)),
            certain=gathered.certain,
            stopped=stopped,
            rest=tuple(report.rank for report in case.ranks if report.rank not in stopped),
            ended=tuple(sorted((*ended, *aborted))),
        )
    ]


_TIMED_OUT = re.compile(r"Timed out waiting \d+ms for (send|recv) operation")


def _how_they_stopped(gathered: Gathered, stopped: Ranks) -> str:
    """Return the kind that says how these ranks stopped, and what their errors say of others."""
    case = gathered.case
    if gathered.certain:
        return "undecided.files-certain"
    if not stopped:
        return "undecided.files-aborted"
    errors = [case.ranks[rank].error.text for rank in stopped]
    some = len(stopped) < len(case.ranks)
    if not some and all("Connection closed by peer" in text for text in errors):
        return "undecided.files-all-lost"
    if some and all(map(_TIMED_OUT.search, errors)):
        return "undecided.files-gave-up"
    return "undecided.files-stopped"


def _facts(case: Case) -> Iterable[str]:
    same: dict[str, list[int]] = {}
    for report in case.ranks:
        records = case.collectives.of.get(report.rank, ())
        last = next((r for r in records if not r.over), records[-1] if records else None)
        text = _doing(report)
        if last is not None:
            at = at_place(last.place)
            text += f"; its last record is collective {last.slot}: {last.operation}{at}"
        if report.end.last_words:
            text += f"; its last words: {report.end.last_words}"
        same.setdefault(text, []).append(report.rank)
    for text, ranks in list(same.items())[:64]:
        yield f"{name_ranks(ranks)}: {text}"


def _doing(report: RankReport) -> str:
    """Say what a rank did last; no rank can be asked, so one without a record is not silent."""
    return report.doing if report.activity is Activity.SILENT and report.doing else doing(report)
