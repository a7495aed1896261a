"""What the live board draws, as JSON: small, and the same for the same picture.

Times are microseconds since `epoch_ns` of the session's monotonic clock. Nothing here changes
while nothing happens: the browser counts ages on by itself. Texts are for `textContent`; escape
codes are taken out here, as in the other views.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.model import (
    Diagnosis,
    Finding,
    Lane,
    Ranks,
    Role,
    Snapshot,
    Stage,
    Standing,
    Status,
    format_ranks,
)
from ddp_notebook.views.ansi import strip_ansi
from ddp_notebook.views.findings_text import only_wait, plain, preformatted, sentence, symbol

MOST_LANES = 128
MOST_FINDINGS = 8
MOST_EVIDENCE = 40
MOST_CHARACTERS = 600
"""Of a text in a lane or a line of code; evidence and remedies may be four times as long."""

STAGES = [{"name": stage.value, "about": stage.about} for stage in Stage]
"""The stages of set-up, which a page is told once."""

_MAGIC = re.compile(r"%ddp_(?:step|why|where|abort|restart)\b(?: --\w+ [\w-]+(?:,[\w-]+)*)*")


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


def board_json(
    headline: str, notes: Sequence[str], snapshot: Snapshot, lanes: Sequence[Lane], epoch_ns: int
) -> dict[str, Any]:
    """The lanes and what stands above and below them."""
    shown = lanes[:MOST_LANES]
    return {
        "headline": _line(headline),
        "world_size": snapshot.world_size,
        "ended": bool(snapshot.ended),
        "lanes": [_lane(lane, epoch_ns) for lane in shown],
        "left_out": format_ranks(rank for lane in lanes[MOST_LANES:] for rank in lane.ranks),
        "notes": [_line(note, 4 * MOST_CHARACTERS) for note in notes],
    }


def _lane(lane: Lane, epoch_ns: int) -> dict[str, Any]:
    entering = lane.entering.number if lane.entering is not None else 0
    stopped = lane.status in (Status.FAILED, Status.DEAD)
    return {
        "ranks": format_ranks(lane.ranks),
        "first": lane.ranks[0],
        "count": len(lane.ranks),
        "role": lane.role.value,
        "status": lane.status.value,
        "passed": entering - 1 if entering else lane.stage.number if lane.stage else 0,
        "entering": entering,
        "stopped": stopped,
        "text": _line(lane.text),
        "waits_for": format_ranks(lane.waits_for),
        "since": _micros(lane.since_ns, epoch_ns),
        "heard": _micros(lane.heard_ns, epoch_ns),
        "where": _line(lane.where),
    }


def measuring_json(what: str, done: float) -> dict[str, Any]:
    """The benchmark that goes on: of what, and how much of it is done, 0 to 1."""
    return {"what": _line(what), "percent": round(100 * done)}


def findings_json(diagnosis: Diagnosis | None) -> list[dict[str, Any]]:
    """The findings, the one that counts most first."""
    found = diagnosis.findings if diagnosis is not None else ()
    return [_finding(each) for each in found[:MOST_FINDINGS]]


def _finding(finding: Finding) -> dict[str, Any]:
    remedy = "\n".join(preformatted(finding.remedy))[: 4 * MOST_CHARACTERS]
    evidence = [_line(each, 4 * MOST_CHARACTERS) for each in finding.evidence[:MOST_EVIDENCE]]
    return {
        "category": finding.category.value,
        "symbol": symbol(finding),
        "passing": finding.passing,
        "sentence": _line(sentence(finding), 4 * MOST_CHARACTERS),
        "ranks": format_ranks(finding.ranks),
        "waiting": only_wait(finding),
        "remedy": remedy,
        "magics": list(dict.fromkeys(_MAGIC.findall(remedy))),
        "evidence": evidence,
    }


def standings_json(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """The lines at which ranks stand."""
    return [
        {
            "ranks": format_ranks(each.ranks),
            "place": _line(each.place),
            "callers": [_line(caller) for caller in each.callers],
            "lines": [[number, _code(text)] for number, text in each.lines],
            "line": each.line,
        }
        for each in standings
    ]


def actions_json(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """The buttons."""
    return [
        {
            "name": each.name,
            "label": each.label,
            "magic": each.magic,
            "takes_ranks": each.takes_ranks,
            "why_not": each.why_not,
        }
        for each in actions
    ]


def actions(
    lanes: Sequence[Lane], running: bool, in_run: bool, measuring: bool = False
) -> tuple[Action, ...]:
    """What can be done with the ranks as they stand. `in_run`: they are in a cell or a script;
    `measuring`: in a benchmark.
    """
    if not running:
        return ()
    if measuring:
        return (
            Action("cancel", "Cancel", INTERRUPT),
            Action("why", "Why?", "%ddp_why"),
            Action("where", "Where?", "%ddp_where", True),
        )
    held = _ranks_of(lanes, {Role.HELD})
    blocked = [lane for lane in lanes if lane.status in (Status.RUNNING, Status.SETTING_UP)]
    dead = _ranks_of(lanes, {Role.DEAD}) or _with_status(lanes, Status.DEAD)
    no_step = "" if held else "no rank is held; %ddp_init --step or %%ddp --step collective hold"
    give_up = blocked or _with_status(lanes, Status.PAUSED)
    end = "end" if in_run else Stage.VERIFIED.value
    restart = f"%ddp_restart --ranks {format_ranks(dead)}" if dead else "%ddp_restart"
    return (
        Action("step", "Step", "%ddp_step", True, no_step),
        Action("continue", "Continue", f"%ddp_step --to {end}", True, no_step),
        Action("why", "Why?", "%ddp_why"),
        Action("where", "Where?", "%ddp_where", True),
        Action("abort", "Abort", "%ddp_abort", False, "" if give_up else "no rank is blocked"),
        Action("restart", "Restart", restart, True, "" if dead else CHOOSE_RANKS),
    )


INTERRUPT = "interrupt the cell: I, I"
"""What the button that cancels a benchmark does as it is done by hand: the keys of Jupyter."""

CHOOSE_RANKS = "choose the ranks to restart: click them"
"""Not all of them by one click: their variables would be gone."""


def _ranks_of(lanes: Sequence[Lane], roles: set[Role]) -> Ranks:
    return tuple(rank for lane in lanes if lane.role in roles for rank in lane.ranks)


def _with_status(lanes: Sequence[Lane], status: Status) -> Ranks:
    return tuple(rank for lane in lanes if lane.status is status for rank in lane.ranks)


def said_json(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a button gave, as text of bounded length."""
    text = strip_ansi(str(said["text"]))
    cut = len(text) > _SAID_CHARACTERS
    return {**said, "text": text[:_SAID_CHARACTERS] + ("\n… (cut)" if cut else "")}


_SAID_CHARACTERS = 20_000


def _micros(at_ns: int, epoch_ns: int) -> int:
    return (at_ns - epoch_ns) // 1000 if at_ns else 0


def _line(text: str, most: int = MOST_CHARACTERS) -> str:
    line = plain(text)
    return line if len(line) <= most else line[: most - 1] + "…"


def _code(text: str) -> str:
    """A line of code, its indentation kept."""
    return preformatted(text)[0][:MOST_CHARACTERS]
