"""The content of the live board as JSON: small, and the same for the same picture.

Times are microseconds since `epoch_ns` of the session's monotonic clock. Nothing here changes
while nothing happens: the browser counts ages on by itself. Texts are for `textContent`; escape
codes are taken out here, as in the other views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ddp_notebook.model import (
    Board,
    BoardRow,
    Diagnosis,
    Role,
    Snapshot,
    StackLocation,
    Stage,
    Status,
    counted,
    format_ranks,
)
from ddp_notebook.views.ansi import plain, preformatted, strip_ansi
from ddp_notebook.views.board import headline_alone
from ddp_notebook.views.board_rows import loading_what
from ddp_notebook.views.finding_code import Column, columns
from ddp_notebook.views.findings import past_words, sentence, symbol, waiting_words
from ddp_notebook.views.step_rows import stage_in_view, stage_values

MOST_ROWS = 128
MOST_EVIDENCE = 40
MOST_COLUMNS = 6
MOST_CHARACTERS = 600
"""The longest text in a row or line of code; evidence and remedies may be four times as long."""

_ROW_FIELDS = tuple(field.name for field in fields(BoardRow) if field.name != "age_s")

STAGES = [{"name": stage.value, "about": stage.about} for stage in Stage]
"""The stages of setup, which are sent to a page once."""


@dataclass(frozen=True)
class Action:
    """A button. `magic` is what it does, as it is typed; `why_not` says why it cannot be done.

    With `takes_ranks` those that are chosen on the board are added to it.
    """

    name: str
    label: str
    magic: str
    takes_ranks: bool = False
    why_not: str = ""


def board_json(board: Board, epoch_ns: int) -> dict[str, Any]:
    """The board as JSON: the rows, and what is above and below them."""
    standing = board.snapshot.notes
    loading = board.snapshot.loading
    since_us = _micros(loading.since_ns, epoch_ns) if loading is not None else 0
    size, backend = board.snapshot.world_size, board.snapshot.backend or "no backend"
    stage = stage_in_view(board.snapshot)
    named = bool(board.rows) and not board.snapshot.ended
    return {
        "headline": _line(headline_alone(board)),
        "what": _line(f"{counted(size, 'rank')} · {backend}") if named else "",
        "next": stage
        and {
            "stage": stage.value,
            "about": stage.about,
            "values": _line(stage_values(stage, board.snapshot)),
        },
        "address": _line(board.snapshot.init_method or ""),
        "world_size": board.snapshot.world_size,
        "ended": bool(board.snapshot.ended),
        "loading": loading and {"what": loading_what(loading), "since_us": since_us},
        "rows": [_row(row, board.snapshot, epoch_ns) for row in board.rows[:MOST_ROWS]],
        "left_out": format_ranks(rank for row in board.rows[MOST_ROWS:] for rank in row.ranks),
        "notes": [_line(note, 4 * MOST_CHARACTERS) for note in board.notes if note in standing],
        "todo": [_line(note, 4 * MOST_CHARACTERS) for note in board.notes if note not in standing],
    }


def _row(row: BoardRow, snapshot: Snapshot, epoch_ns: int) -> dict[str, Any]:
    """All fields of a row but its age, which changes all the time, and what follows from them.

    Of ranks that raised the error alone: the word beside it says the rest. One that names the rank
    is not for a row of several.
    """
    wire = {
        name.replace("_ns", "_us"): _value(name, getattr(row, name), epoch_ns)
        for name in _ROW_FIELDS
    }
    derived = {"stages_passed": row.stages_passed, "gone": row.gone, "process": _line(row.process)}
    state = next((state for state in snapshot.ranks if state.rank == row.ranks[0]), None)
    alone = len(row.ranks) == 1 and row.role in (Role.REFUSED, Role.CULPRIT)
    if state is not None and state.raised and (alone or row.role is Role.RAISED):
        wire["text"] = _line(state.raised)
    return {**wire, **derived, "first": row.ranks[0], "count": len(row.ranks)}


def _value(name: str, value: Any, epoch_ns: int) -> Any:
    """A row's field for the page: rank sets as text, stages as numbers, times since the epoch."""
    if name.endswith("_ns"):
        return _micros(value, epoch_ns)
    match value:
        case tuple():
            return format_ranks(value)
        case Stage():
            return value.number
        case None:
            return 0
        case str():
            return _line(value)
        case _:
            return value


def benchmark_json(what: str, done: float) -> dict[str, Any]:
    """The running benchmark: of what, and how much of it is done, 0 to 1."""
    return {"what": _line(what), "percent": round(100 * done)}


def findings_json(diagnosis: Diagnosis | None) -> list[dict[str, Any]]:
    """The findings, the one that counts most first, each with its code in columns."""
    if diagnosis is None:
        return []
    made: list[dict[str, Any]] = []
    for finding in diagnosis.findings[:8]:
        evidence = [_line(fact, 4 * MOST_CHARACTERS) for fact in finding.evidence[:MOST_EVIDENCE]]
        if past := past_words(diagnosis):
            evidence.insert(0, _line(past))
        made.append(
            {
                "category": finding.category.value,
                "symbol": symbol(finding),
                "passing": finding.passing,
                "sentence": _line(sentence(finding), 4 * MOST_CHARACTERS),
                "ranks": format_ranks(finding.ranks),
                "waiting": waiting_words(finding, diagnosis),
                "remedy": "\n".join(preformatted(finding.remedy))[: 4 * MOST_CHARACTERS],
                "patch": preformatted(finding.patch) if finding.patch else [],
                "magics": list(map(_line, finding.commands)),
                "evidence": evidence,
                "columns": list(map(_column, columns(finding, before=0)[:MOST_COLUMNS])),
            }
        )
    return made


def _column(column: Column) -> dict[str, Any]:
    """Return the lines of a group of ranks, each with the kind of its mark, and the labels."""
    return {
        "who": _line(column.who),
        "site": _line(column.at),
        "lines": [
            [
                line.number,
                _code(line.text),
                line.marks[0].kind if line.marks else "",
                _line("; ".join(filter(None, (mark.label for mark in line.marks)))),
            ]
            for line in column.lines
        ],
    }


def locations_json(locations: Sequence[StackLocation]) -> list[dict[str, Any]]:
    """The lines in which ranks are."""
    return [
        {
            "ranks": format_ranks(location.ranks),
            "call_site": _line(location.call_site),
            "callers": [_line(caller) for caller in location.callers],
            "lines": [[number, _code(text)] for number, text in location.lines],
            "line": location.line,
        }
        for location in locations
    ]


def actions(
    rows: Sequence[BoardRow],
    running: bool,
    in_run: bool,
    measuring: bool = False,
    at_lines: bool = False,
) -> tuple[Action, ...]:
    """Return the buttons for the ranks as they are. `in_run`: they are in a cell or a script;
    `measuring`: in a benchmark; `at_lines`: some are paused at one.
    """
    # Each reason is empty where the button can be pressed; without ranks none can.
    none, busy = "" if running else _NO_RANK, _MEASURING if measuring else ""
    no_line = "" if at_lines else _NO_LINE
    starting = {row.status for row in rows} == {Status.STARTING}
    no_answer = none or (_NO_ANSWER if starting else "")
    paused = any(row.role is Role.PAUSED for row in rows)
    no_step = none or ("" if paused else busy or _NO_STEP)
    # Outside of runs Continue goes to the last stage, until setup is done.
    in_setup = not in_run and any(row.stages_passed < len(Stage) for row in rows)
    end = Stage.VERIFIED.value if in_setup else "end"
    dead = tuple(rank for row in rows if row.status is Status.DEAD for rank in row.ranks)
    restart = f"%ddp_restart --ranks {format_ranks(dead)}" if dead else "%ddp_restart"
    no_restart = none or busy or ("" if dead else CHOOSE_RANKS)
    # Abort frees blocked ranks, and makes a group for those without one.
    groupless = any(r.status is Status.READY and r.stages_passed < len(Stage) for r in rows)
    helps = groupless or any(row.status in _BLOCKED for row in rows)
    abort = Action("abort", "Abort", "%ddp_abort", False, none or ("" if helps else _NO_ABORT))
    if measuring:
        abort = Action("cancel", "Cancel", INTERRUPT)
    return (
        Action("continue", "Continue", f"%ddp_step --to {end}", True, no_step),
        Action("step", "Step", "%ddp_step", True, no_step),
        Action("into", "Into", "%ddp_step --into", True, no_line),
        Action("out", "Out", "%ddp_step --out", True, no_line),
        abort,
        Action("restart", "Restart", restart, True, no_restart),
        Action("why", "Why?", "%ddp_why", False, no_answer),
        Action("where", "Where?", "%ddp_where", True, no_answer),
    )


_BLOCKED = {Status.RUNNING, Status.SETTING_UP, Status.PAUSED}
_NO_RANK = "no rank runs"
_NO_ANSWER = "the ranks' processes start: none can answer yet"
_NO_ABORT = "no rank is blocked"
_MEASURING = "a benchmark runs"
_NO_STEP = (
    "no rank is paused; breakpoint(), %%ddp --step collective and %ddp_init --step pause them"
)
_NO_LINE = "no rank is paused at a line; breakpoint() and %ddp_break pause them"

INTERRUPT = "interrupt the cell: I, I"
"""The button that cancels a benchmark, as keys of Jupyter."""

CHOOSE_RANKS = "choose the ranks to restart: click them"
"""Not all of them by one click: their variables would be gone."""


def answer_json(answer: Mapping[str, Any], begun: int) -> dict[str, Any]:
    """Return the answer of a button, of bounded length; old once another run has begun."""
    # The answer may quote what ranks printed.
    text = strip_ansi(str(answer["text"]))
    cut = len(text) > _MOST_ANSWER_CHARACTERS
    shown = {name: value for name, value in answer.items() if name != "begun"}
    shown["old"] = answer["begun"] != begun
    shown["nodes"] = [] if cut else answer.get("nodes", [])
    return {**shown, "text": text[:_MOST_ANSWER_CHARACTERS] + ("\n… (cut)" if cut else "")}


_MOST_ANSWER_CHARACTERS = 20_000


def _micros(at_ns: int, epoch_ns: int) -> int:
    return (at_ns - epoch_ns) // 1000 if at_ns else 0


def _line(text: str, most: int = MOST_CHARACTERS) -> str:
    line = plain(text)
    return line if len(line) <= most else line[: most - 1] + "…"


def _code(text: str) -> str:
    """A line of code, its indentation kept."""
    return preformatted(text)[0][:MOST_CHARACTERS]
