"""Ports of ranks for an editor, such as VS Code: opened, described and closed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Ranks, format_ranks, name_ranks, said_by
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer, EditorPort, answered
from ddp_notebook.rank.editor.port import LOOPBACK
from ddp_notebook.session.guards import check_alive, check_ranks, existing, living
from ddp_notebook.session.setup.preflight import check_processes

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record

_VERB = "%ddp_attach_editor"
_ANSWER_WITHIN_S = 30.0
"""A rank imports debugpy first."""
_INSTALL = (
    'Type: %pip install "ddp-notebook[editor]", or %pip install debugpy; then '
    f"{_VERB} again. Without it: %ddp_step, %ddp_print and %ddp_where"
)


@dataclass(frozen=True, slots=True)
class OpenPort:
    """The port of a rank that waits for an editor, or has one."""

    rank: int
    port: EditorPort

    @property
    def launch(self) -> str:
        """What the launch.json of VS Code wants among its configurations."""
        wanted = {
            "name": f"rank {self.rank}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": LOOPBACK, "port": self.port.port},
            "justMyCode": False,
        }
        return json.dumps(wanted, indent=4)

    @property
    def text(self) -> str:
        """Where it is, who can reach it, and what to do in the editor."""
        if self.port.taken:
            return (
                f"Rank {self.rank} has an editor already, at port {self.port.port}. Take the rank "
                f"back: {_VERB} --off --ranks {self.rank}\n{self.launch}"
            )
        number = self.port.port
        return "\n".join(
            (
                f"Rank {self.rank} waits for an editor at {LOOPBACK}:{number}, for 10 minutes. "
                f"{self._who()} In VS Code, with its extension Python Debugger, put this among "
                '"configurations" in .vscode/launch.json and start it (F5):',
                self.launch,
                "An editor on another computer needs the port there: ssh -L "
                f"{number}:{LOOPBACK}:{number} HOST; if its folder is another one than "
                f'here, it needs "pathMappings": [{{"localRoot": "${{workspaceFolder}}", '
                f'"remoteRoot": {json.dumps(self.port.folder)}}}] too.',
            )
        )

    def _who(self) -> str:
        if self.port.checked:
            return (
                "One is let in, and none but this user's or root's: who is in can run any code "
                "as you."
            )
        return (
            "While it waits, anybody on this host who connects first can run any code as you: "
            "this system does not say who connects."
        )


_MEANWHILE = (
    "While an editor is there, its stops are in the tables here, and %ddp_break and breakpoint() "
    "stop in it; %ddp_step moves the rank on as well. debugpy traces every line of the rank then: "
    "before Python 3.12, calls in Python take about ten times as long. When the editor leaves, "
    "the port is closed, and a rank that it had stopped stays where it is, for %ddp_step. "
    "JupyterLab's own debugger panel reaches the notebook's kernel only, and no rank."
)


class Editors:
    """Lets editors in at ranks, one each."""

    def __init__(self, record: Record, pool: RankPool) -> None:
        self._record = record
        self._pool = pool

    def open(self, ranks: Ranks | None) -> str:
        """Open a port for an editor at each of `ranks`; what to do with it. Raises UsageMistake."""
        check_processes(_VERB)
        answers = self._ask(ranks, open=True)
        problems = {rank: answer.problem for rank, answer in answers.items() if answer.problem}
        if problems:
            self._ask(tuple(answers), open=False)
            install = _INSTALL if any(port.lacks_debugpy for port in answers.values()) else ""
            raise UsageMistake(f"No editor can be let in ({said_by(problems)}). {install}".rstrip())
        texts = [OpenPort(rank, answer).text for rank, answer in answers.items()]
        return "\n\n".join((*texts, _MEANWHILE))

    def close(self, ranks: Ranks | None) -> str:
        """Close the ports of `ranks` (all by default), and have editors leave; in words."""
        members = ranks if ranks is not None else self._alive()
        answers = self._ask(members, open=False)
        taken = tuple(rank for rank, answer in answers.items() if answer.taken)
        waiting = tuple(r for r, answer in answers.items() if answer.port and r not in taken)
        if not taken and not waiting:
            whose = name_ranks(tuple(answers)).capitalize()
            return f"{whose} had no port open for an editor."
        lines = [f"The port of {name_ranks(waiting)} is closed."] if waiting else []
        if taken:
            lines.append(
                f"The editor leaves {name_ranks(taken)}, and the port is closed. What it had "
                "stopped stays paused: %ddp_step"
            )
        return "\n".join(lines)

    def _alive(self) -> Ranks:
        self._pool.need(_VERB)
        snapshot = self._record.snapshot
        return living(existing(None, snapshot), snapshot)

    def _ask(self, ranks: Ranks | None, *, open: bool) -> dict[int, EditorPort]:
        cluster = self._pool.need(_VERB).cluster
        snapshot = self._record.snapshot
        if ranks is None and snapshot.world_size > 1:
            raise UsageMistake(
                f"An editor has one rank, each at a port of its own. Say which: {_VERB} --ranks 1"
            )
        members = ranks if ranks is not None else (0,)
        check_ranks(members, snapshot)
        check_alive(members, _VERB, snapshot)
        wanted = calls.EditorWanted(open)
        answers = cluster.ask(members, calls.EDITOR, wanted, _ANSWER_WITHIN_S)
        silent = tuple(r for r in members if isinstance(answers.get(r), CannotAnswer | None))
        if silent:
            raise UsageMistake(
                f"{name_ranks(silent).capitalize()} did not answer: %ddp_why says what it is at. "
                f"Then: {_VERB} --ranks {format_ranks(silent)}"
            )
        return answered(answers)
