"""Breakpoints of the session: set, listed, cleared, and sent to new processes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import files
from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.model import Ranks, Status, by_value, name_ranks, said_by
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import ON, Bound, Breakpoint, CannotAnswer
from ddp_notebook.rank.inspect.frames import CELL_NAME, cell_file
from ddp_notebook.session.guards import existing
from ddp_notebook.views.step_rows import place

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.runs.run import CellRun

_VERB = "%ddp_break"
_HOW = "%ddp_break 7 (a line of the last cell), %ddp_break train.py:42, %ddp_break Model.forward"


EXCEPTION, NAN, COLLECTIVE = ON
_EVENTS = {
    EXCEPTION: "an error that ends the cell or script",
    NAN: "the first loss or gradient that is not finite",
    COLLECTIVE: "every collective",
}


@dataclass(frozen=True, slots=True)
class BreakpointRow:
    """One breakpoint, and where it is on each rank that has it."""

    breakpoint: Breakpoint
    bounds: Mapping[int, Bound]
    enabled: bool = True
    gone: bool = False
    """The cell was edited, and the line is not in it any more."""

    @property
    def place(self) -> tuple[str, int]:
        """Its file, ``cell 3`` or a path, and its line, from the first rank that has them."""
        known = (bound for bound in self.bounds.values() if bound.line)
        return next(((_shown(bound.file), bound.line) for bound in known), ("", 0))

    @property
    def text(self) -> str:
        """``1  train.py:42  ranks 0-3, if loss > 3: 12 passes``."""
        spec = self.breakpoint
        options = [name_ranks(spec.ranks)] if spec.ranks is not None else []
        options += [f"if {spec.condition}"] if spec.condition else []
        options += [f"from pass {spec.count} on"] if spec.count > 1 else []
        options += ["once"] if spec.once else []
        options += [f"log {spec.log!r}"] if spec.log else []
        what = f" ({', '.join(options)})" if options else ""
        states = {rank: _state_of(bound, spec) for rank, bound in self.bounds.items()}
        text = said_by(states) if len(set(states.values())) > 1 else next(iter(states.values()), "")
        gone = "; its cell was edited and ran without this line" if self.gone else ""
        return f"{spec.number}: {self._where()}{what}. {text[:1].upper()}{text[1:]}{gone}"

    def _where(self) -> str:
        file, line = self.place
        spec, path, here = self.breakpoint, Path(file), Path.cwd().resolve()
        if spec.on:
            return _EVENTS[spec.on]
        if not line:
            return spec.function or place(_shown(spec.file), spec.line)
        inside = str(path.relative_to(here)) if path.is_relative_to(here) else ""
        where = place(file, line, inside)
        if spec.function:
            return f"{spec.function} ({where})"
        if line > spec.line:
            return f"{where} (line {spec.line} has no code)"
        return where if line == spec.line else f"{where} (line {spec.line} is in that statement)"


def _state_of(bound: Bound, spec: Breakpoint) -> str:
    if bound.problem:
        return f"cannot stop: {bound.problem}"
    if spec.on == COLLECTIVE:
        return "each collective pauses; %ddp_step --to end passes those of the run"
    if not spec.on and not (bound.line and bound.loaded):
        return "pending: not imported yet; it stops once it is"
    none = "no hit yet" if spec.condition else "not reached yet"
    hits = {0: none, 1: "1 hit"}.get(bound.passes, f"{bound.passes:,} hits")
    hits = f"{hits}, over" if bound.done else hits
    return f"{hits}; {bound.note}" if bound.note else hits


def _shown(file: str) -> str:
    cell = CELL_NAME.fullmatch(file)
    return f"cell {cell[1]}" if cell else file


def _as_on_ranks(cell: str) -> str:
    """The text of a cell with its line numbers: in place of its magic it has an empty line."""
    return f"\n{cell.partition(chr(10))[2]}" if cell else ""


def _check_has_line(path: Path, line: int) -> None:
    """Raises UsageMistake for a line that a file has not, and for what is no file."""
    if path.is_dir():
        raise UsageMistake(f"{path} is a folder. Type {_HOW}")
    try:
        with files.opened(path) as stream:
            lines = sum(1 for _ in stream)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageMistake(f"{path} cannot be read: {why}. Type {_HOW}") from None
    if not 1 <= line <= lines:
        raise UsageMistake(f"{path.name} has no line {line}: it has {lines:,}.")


class Breakpoints:
    """The breakpoints of a session; new ranks get them before their next run."""

    def __init__(self, record: Record, pool: RankPool, runs: RunRegistry) -> None:
        self._record = record
        self._pool = pool
        self._runs = runs
        self._last_number = 0
        self._all: dict[int, Breakpoint] = {}
        self.enabled = True
        self.known: tuple[BreakpointRow, ...] = ()
        """The breakpoints with their locations, as ranks last reported them."""
        self._sent: dict[int, int] = {}
        """By rank, the process that has them."""
        self._gone: set[int] = set()
        self._over: dict[int, Mapping[int, Bound]] = {}
        """Breakpoints on the first loss or gradient that is not finite, once some rank had it in
        this run: where ranks were then."""

    def add(self, where: str, wanted: Breakpoint) -> BreakpointRow:
        """Stop ranks at `where`: ``train.py:42``, a function, or a line of the last cell.

        The location and number in `wanted` are ignored. Stops also in code that already runs, and
        in files that are imported later. Raises UsageMistake when no rank can ever stop there.
        """
        self._pool.need(_VERB)
        existing(wanted.ranks, self._record.snapshot)
        options = (wanted.ranks, wanted.condition, wanted.once, wanted.log, wanted.count > 1)
        if wanted.on == COLLECTIVE and any(options):
            raise UsageMistake(
                "--on collective pauses every rank before each collective, and takes no other "
                "options. Some ranks alone can then continue: %ddp_step --ranks 1"
            )
        placed = wanted if wanted.on else self._placed(where, wanted)
        _check_code(placed)
        once = placed.once or placed.on == NAN
        spec = replace(placed, number=self._last_number + 1, once=once)
        self._all[spec.number] = spec
        self.enabled = True
        if spec.on == COLLECTIVE and (current := self._runs.current) is not None:
            current.pausing |= not current.done  # what runs now is paused there, too
        # Only ranks know whether a line has code. So it is sent first, and taken back if none can
        # stop.
        row = next(row for row in self._send() if row.breakpoint.number == spec.number)
        if problem := _why_never(row, where):
            del self._all[spec.number]
            self._send()
            raise UsageMistake(problem)
        self._last_number = spec.number
        return row

    def rows(self) -> tuple[BreakpointRow, ...]:
        """All breakpoints, with each rank's hit count."""
        cluster = self._pool.need(_VERB).cluster
        if not self._all:
            return ()
        self.renew()
        answers = cluster.ask(self._ready(), calls.BREAKPOINTS, calls.Nothing(), 3.0)
        return self._rows(answers)

    def clear(self, number: int | None = None) -> int:
        """Remove one, or all; returns how many. Raises UsageMistake for an unknown one."""
        self._pool.need(_VERB)
        if number is not None and number not in self._all:
            known = ", ".join(map(str, self._all)) or "none"
            raise UsageMistake(f"There is no breakpoint {number}; there are: {known}.")
        gone = list(self._all) if number is None else [number]
        for each in gone:
            del self._all[each]
            self._over.pop(each, None)
            self._gone.discard(each)
        self._send()
        return len(gone)

    def enable(self, on: bool) -> None:
        """Enable all breakpoints, or disable them, including `breakpoint()`."""
        self._pool.need(_VERB)
        self.enabled = on
        self._send()

    def renew(self) -> None:
        """Send them to ranks whose process is new."""
        states = self._record.snapshot.ranks
        # By the process: a rank that was restarted has forgotten its breakpoints.
        new = [rank for rank in self._ready() if self._sent.get(rank) != states[rank].pid]
        if new and (self._all or not self.enabled):
            self._send()

    def ranks_move(self) -> None:
        """Paused ranks are about to continue.

        The first value that is not finite, on any rank, ends a breakpoint on it for all: from there
        it comes to the others with the gradients.
        """
        wanted = [n for n, point in self._all.items() if point.on == NAN and n not in self._over]
        if not wanted or not self.enabled:
            return
        rows = [row for row in self.rows() if row.breakpoint.number in wanted]
        ended = [row for row in rows if any(bound.done for bound in row.bounds.values())]
        self._over |= {row.breakpoint.number: row.bounds for row in ended}
        if ended:
            self._send()

    def run_begins(self, run: CellRun) -> None:
        """Send what changed, before `run` is sent to the ranks.

        A cell that was edited and runs again gets the breakpoints of its old version.
        """
        changed = bool(self._over)
        self._over.clear()
        text = _as_on_ranks(run.sources.get(run.title, ""))
        for number, spec in self._all.items() if not run.script else ():
            if spec.text.strip() == text.strip():
                continue  # the ranks know an equal text themselves
            # The number of a cell is another one each time it runs, so a breakpoint in a cell is
            # kept by text: its line is found again in the new version; 0 says that it was taken
            # out, None that this is another cell, and the breakpoint stays where it is.
            line = moved(spec.text, spec.line, text)
            if line is not None:
                changed = True
                self._gone.discard(number)
                if line:
                    file = cell_file(run.number)
                    self._all[number] = replace(spec, file=file, line=line, text=text)
                else:
                    self._gone.add(number)
        if changed:
            self._send()
        if self.enabled and any(spec.on == COLLECTIVE for spec in self._all.values()):
            run.pausing = True
        self.renew()

    # -- where they are --------------------------------------------------------------------

    def _placed(self, where: str, wanted: Breakpoint) -> Breakpoint:
        """`wanted` at the place that the user names. Raises UsageMistake."""
        runs = [run for run in reversed(self._runs.all) if not run.script]
        if where.isdecimal():
            if not runs:
                raise UsageMistake(
                    "No cell has run on the ranks yet, so a line alone does not say where. Run it "
                    "once, or write breakpoint() in it. Lines of files: %ddp_break train.py:42"
                )
            text = _as_on_ranks(runs[0].sources.get(runs[0].title, ""))
            return replace(wanted, file=cell_file(runs[0].number), line=int(where), text=text)
        at = re.fullmatch(r"(.+):(\d+)", where)
        if at is None:
            where = where.replace(".<locals>", "")
            if not all(name.isidentifier() for name in where.split(".")):
                raise UsageMistake(f"{where!r} is neither a line nor a function. Type {_HOW}")
            return replace(wanted, function=where)
        if cell := re.fullmatch(r"cell (\d+)", at[1]):
            number = int(cell[1])  # of the newest cell that had it
            text = next((r.sources.get(r.title, "") for r in runs if r.number == number), "")
            line, text = int(at[2]), _as_on_ranks(text)
            return replace(wanted, file=cell_file(number), line=line, text=text)
        path = named_file(at[1])
        if not files.exists(path):
            return replace(wanted, file=at[1], line=int(at[2]))
        _check_has_line(path, int(at[2]))
        return replace(wanted, file=str(path.resolve()), line=int(at[2]))

    # -- to the ranks ------------------------------------------------------------------------

    def of_rank(self, rank: int) -> calls.Breakpoints:
        """Return the breakpoints of a rank."""
        own = (
            point
            for number, point in self._all.items()
            if number not in self._over and (point.ranks is None or rank in point.ranks)
        )
        may_stop = any(not breakpoint.log for breakpoint in self._all.values())
        return calls.Breakpoints(tuple(own), self.enabled, may_stop)

    def _send(self) -> tuple[BreakpointRow, ...]:
        """Send every rank its breakpoints; returns their locations."""
        cluster = self._pool.need(_VERB).cluster
        answers: dict[int, calls.Bounds | CannotAnswer] = {}
        # Ranks with the same are asked at once, as they mostly have: one after the other they would
        # take seconds where they compute.
        for ranks, request in by_value({rank: self.of_rank(rank) for rank in self._ready()}):
            # A rank that computes may take long to answer.
            replies = cluster.ask(ranks, calls.SET_BREAKPOINTS, request, 10.0)
            answers |= replies
        for rank in answers:
            self._sent[rank] = self._record.snapshot.ranks[rank].pid
        return self._rows(answers)

    def _ready(self) -> Ranks:
        """The ranks that can be given breakpoints: not those that are dead or being started."""
        states = self._record.snapshot.ranks
        return tuple(s.rank for s in states if s.status not in (Status.DEAD, Status.STARTING))

    def _rows(
        self, answers: Mapping[int, calls.Bounds | CannotAnswer]
    ) -> tuple[BreakpointRow, ...]:
        bounds: dict[int, dict[int, Bound]] = {number: {} for number in self._all}
        for rank, answer in sorted(answers.items()):
            if isinstance(answer, CannotAnswer):
                for number, of_ranks in bounds.items():
                    of_ranks[rank] = Bound(number, problem=answer.why)
                continue
            for bound in answer.bounds:
                bounds[bound.number][rank] = bound
        bounds |= {number: dict(of) for number, of in self._over.items() if number in bounds}
        self.known = tuple(
            BreakpointRow(spec, bounds[number], self.enabled, number in self._gone)
            for number, spec in self._all.items()
        )
        return self.known


def moved(before: str, line: int, after: str) -> int | None:
    """Where a line of a text is in another version of it; 0 where it has been taken out.

    None for a text that is no version of it: less than half of its lines are the same.
    """
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    if matcher.ratio() < 0.5:
        return None
    for kind, begin, end, there, there_end in matcher.get_opcodes():
        if begin < line <= end:
            index = there + line - 1 - begin
            kept = kind == "equal" or (kind == "replace" and index < there_end)
            return index + 1 if kept else 0
    return 0


def _check_code(spec: Breakpoint) -> None:
    """Raises UsageMistake for a condition or a message that is no Python, and a count below 1."""
    if spec.count < 1:
        raise UsageMistake("--count is 1 or more: the pass from which on it stops.")
    for name, text, code, why, example in (
        ("condition", spec.condition, spec.condition, "is no Python expression", '--if "i > 3"'),
        ("message", spec.log, f"f{spec.log!r}", "cannot be filled in", '--log "step {i}"'),
    ):
        try:
            if text:
                compile(code, f"<{name}>", "eval")
        except (SyntaxError, ValueError) as error:
            raise UsageMistake(f"The {name} {text!r} {why}: {error}. Such as {example}") from None


def _why_never(row: BreakpointRow, where: str) -> str:
    """Why no rank can ever stop there; empty when one can."""
    bounds = row.bounds.values()
    if not bounds:
        return "No rank answered: %ddp_why says what they are at. Then set it again."
    if all(bound.problem for bound in bounds):
        problems = "; ".join(sorted({bound.problem for bound in bounds}))
        return f"{f'Line {where} of the last cell' if where.isdecimal() else where}: {problems}."
    if row.breakpoint.on or any(bound.line or bound.problem for bound in bounds):
        return ""
    if row.breakpoint.function:
        return (
            f"The ranks know no function {where}. Run the cell that defines it or imports it "
            "first. One of a library has its module's name before it: %ddp_break "
            "torch.nn.functional.relu. Or name its line, also in a file that is imported later: "
            "%ddp_break train.py:42"
        )
    if cell := CELL_NAME.fullmatch(row.breakpoint.file):
        return f"The ranks have run no cell {cell[1]}. Run it once, or write breakpoint() in it."
    return (
        f"There is no file {row.breakpoint.file}: neither in this folder ({Path.cwd()}) nor among "
        "what the ranks can import. Give its path: %ddp_break path/train.py:42"
    )
