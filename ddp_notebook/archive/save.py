"""A run written to a file, as JSON that is also a trace.

The same file is a trace: viewers read ``traceEvents`` and pass over the rest.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from ddp_notebook.archive.format import KEY, Dropped, SavedRun, encode_run
from ddp_notebook.archive.history import Kept
from ddp_notebook.archive.trace import trace
from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.model import Case, Diagnosis, RankExited, Snapshot, codec


def saved_run(
    snapshot: Snapshot,
    kept: Kept,
    case: Case | None,
    found: Diagnosis | None = None,
    *,
    script: str = "",
    run: int = 0,
    output: bool = False,
) -> SavedRun:
    """Return all that is known of a run, to be written; what the ranks wrote only with `output`.

    Without a rank to ask, `case` is empty. `found` is what `%ddp_why` says: what post-run
    checks found of a run that is over is not in `case`. `script` and `run` say what ran last.
    """
    if case is not None:
        # Only the files that ranks were seen in: beside a script lies much else.
        paths = [record.path for issued in case.collectives.of.values() for record in issued]
        seen = {p.file for path in (*paths, *(report.path for report in case.ranks)) for p in path}
        case = replace(case, sources={n: text for n, text in case.sources.items() if n in seen})
    # Of the package, Python and torch; of the ranks, or else installed here.
    versions = {"python": platform.python_version()}
    for name in ("ddp_notebook", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    reports = case.ranks if case is not None else ()
    known = (report.process.versions for report in reports if report.process.versions)
    versions |= next(known, {})
    collectives = case.collectives if case is not None else None
    diagnosis = diagnose_run(case) if case is not None else None
    # What post-run checks alone have found stands on more than the case.
    stands = bool(found and found.findings and not (diagnosis and diagnosis.findings))
    saved = SavedRun(
        snapshot=snapshot,
        start=kept.start,
        wall_ns=time.time_ns() - (time.monotonic_ns() - snapshot.taken_ns),
        moments=kept.moments,
        outputs=kept.outputs if output else (),
        case=case,
        diagnosis=found if stands else diagnosis,
        script=script,
        run=run,
        versions=versions,
        dropped=Dropped(
            kept.dropped_events,
            kept.dropped_outputs if output else 0,
            {r: n for r, n in collectives.first.items() if n} if collectives else {},
        ),
        stands=stands,
    )
    return saved if output else _without_output(saved)


# -- what ranks wrote --------------------------------------------------------------------------


def _without_output(saved: SavedRun) -> SavedRun:
    """The same without what ranks wrote, except the line that the board shows of a dead one."""
    case, diagnosis = saved.case, saved.diagnosis
    if case is not None:
        brief = (
            replace(e, end=replace(e.end, last_words=_last_line(e.end.last_words)))
            for e in case.ranks
        )
        case = replace(case, ranks=tuple(brief))
    moments = []
    for moment in saved.moments:
        state, event = moment.state, moment.event
        if state is not None:
            state = _brief(state)
        elif isinstance(event, RankExited):
            event = structs.replace(event, last_words=_last_line(event.last_words))
        moments.append(replace(moment, state=state, event=event))
    return replace(
        saved,
        snapshot=_brief(saved.snapshot),
        start=_brief(saved.start),
        moments=tuple(moments),
        case=case,
        diagnosis=replace(diagnosis, tracebacks=()) if diagnosis is not None else None,
    )


def _brief(snapshot: Snapshot) -> Snapshot:
    brief = (replace(state, last_words=_last_line(state.last_words)) for state in snapshot.ranks)
    return replace(snapshot, ranks=tuple(brief))


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


# -- the file ----------------------------------------------------------------------------------


def check_target(path: str | os.PathLike[str], force: bool, verb: str = "%ddp_save") -> Path:
    """Where `verb` writes. Raises UsageMistake when that cannot be."""
    target = named_file(path)
    if target.is_dir():
        raise UsageMistake(f"{target} is a folder. Name a file in it: {verb} {target}/run.json")
    if not target.parent.is_dir():
        raise UsageMistake(f"Folder {target.parent} does not exist. Create it, or name another.")
    if os.path.lexists(target) and not force:
        raise _exists(target, verb)
    return target


def _exists(target: Path, verb: str = "%ddp_save") -> UsageMistake:
    return UsageMistake(
        f"{target} exists already. Name another file, or replace it: {verb} {target} --force"
    )


def line(saved: SavedRun) -> str:
    """Return a run as one line of JSON that a reader of files takes too; as a trace it is empty."""
    return codec.dumps({"traceEvents": [], KEY: encode_run(saved)})


def write(target: Path, saved: SavedRun, force: bool) -> None:
    """Write beside the target first and put it in place when it is whole."""
    # traceEvents come first: viewers look there to know what a file is.
    # One file for both readers: no one has to export a trace separately, and viewers pass over keys
    # that they do not know.
    whole = {**trace(saved), KEY: encode_run(saved)}
    text = codec.dumps(whole)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise _unwritable(target, error) from None
    beside = Path(name)  # which this user alone can read: mkstemp sees to it
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if not force:
            target.touch(0o600, exist_ok=False)  # the name is ours: what comes now is refused
        try:
            beside.replace(target)
        except BaseException:
            if not force:
                target.unlink(missing_ok=True)  # an empty file would refuse the next try
            raise
    except FileExistsError:
        raise _exists(target) from None
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _unwritable(target: Path, error: OSError) -> UsageMistake:
    why = error.strerror or str(error)
    return UsageMistake(f"{target} cannot be written: {why}. Name another file: %ddp_save FILE")
