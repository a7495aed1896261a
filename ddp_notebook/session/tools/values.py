"""Variables on the ranks: set, fetched, completed, described; and a rank's output."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Ranks, Unread, VariableTable, name_ranks, said_by
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import answered
from ddp_notebook.session.guards import (
    check_name,
    check_ranks,
    check_sendable,
    existing,
    living,
)
from ddp_notebook.views import variable_table
from ddp_notebook.views.ansi import strip_ansi

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.runs.run import CellRun

_TIMEOUT_S = 60.0
_BUSY = "busy: the values of its tensors are read when it stands"


class _Globals(pickle.Pickler):
    """Finds the classes and functions of the notebook in what it is given."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.names: dict[str, None] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.names[value.__qualname__.partition(".")[0]] = None
        return NotImplemented


class Values:
    """Values and output of the ranks of a session."""

    def __init__(self, record: Record, pool: RankPool, runs: RunRegistry) -> None:
        self._record = record
        self._pool = pool
        self._runs = runs
        self._owed: Future[Any] | None = None
        """The pending answer of the last rank asked, which may never arrive."""

    def push(self, values: Mapping[str, Any], ranks: Ranks | None = None) -> Ranks:
        """Set variables on ranks; the ranks. Raises UsageMistake for what cannot be sent."""
        cluster = self._pool.need("%ddp_push").cluster
        members = self._runs.idle(ranks, "%ddp_push")
        for name, value in values.items():
            check_sendable(name)
            try:
                pickle.dumps(value)
            except Exception as error:  # noqa: BLE001  # its own code may raise anything
                raise UsageMistake(
                    f"{name} is a {type(value).__name__}, which cannot be sent to the ranks: "
                    f"{error}. Make it there instead: %%ddp, then {name} = ..."
                ) from None
        try:
            # A class must be there before an object of it is unpickled.
            own_first = {n: v for n, v in values.items() if isinstance(v, type | FunctionType)}
            rest = {name: value for name, value in values.items() if name not in own_first}
            for part in filter(None, (own_first, rest)):  # what the rest may be made of, first
                cluster.push(members, part, _TIMEOUT_S)
        except UsageMistake as refused:
            finder = _Globals()
            for value in values.values():
                finder.dump(value)
            own = [name for name in finder.names if name not in values]
            if not own:
                raise
            raise UsageMistake(
                f"{refused} It is made of {', '.join(own)}, of the notebook. Send that as well: "
                f"%ddp_push {' '.join((*own, *values))}"
            ) from None
        return members

    def pull(self, name: str, ranks: Ranks | None = None, *, keep_tensors: bool = False) -> Any:
        """The value of a variable: rank to value; tensors as NumPy unless `keep_tensors`.

        Those of the last script, while its processes stay. Raises UsageMistake when a rank has no
        such variable or it cannot be sent.
        """
        processes = self._pool.need("%ddp_pull")
        check_name(name)
        request = calls.VariableToSend(name, keep_tensors)
        script, replies = processes.script, {}
        if script is not None and self._runs.script_left:  # it is over, or stuck
            members = script.ranks if ranks is None else ranks
            check_ranks(members, self._record.snapshot)
            asked = processes.cluster.ask(members, calls.PULL, request, _TIMEOUT_S)
            gone = calls.PickledValue(error="its process has ended")
            replies = dict.fromkeys(members, gone) | answered(asked)
        else:
            members = self._runs.idle(ranks, "%ddp_pull")
            called = processes.cluster.call(members, calls.GET_VALUE, lambda _: request)
            for rank, answer in called.items():
                replies[rank] = processes.cluster.value_of(answer, _TIMEOUT_S)
        problems = {rank: reply.error for rank, reply in replies.items() if reply.error}
        if problems:
            raise UsageMistake(f"{name} cannot be pulled ({said_by(problems)}).{self._whose()}")
        values = {}
        for rank, reply in replies.items():
            try:
                values[rank] = pickle.loads(reply.pickle)  # noqa: S301  # of a process of our own
            except Exception as error:  # noqa: BLE001  # its own code may raise anything
                # What makes a value may exist on the ranks only: a class, a group.
                why = str(error).rstrip(".")
                raise UsageMistake(
                    f"{name} cannot be made in the notebook: {type(error).__name__}: {why}. "
                    "The notebook has no groups, and not the classes that cells define. Pull its "
                    f"parts, such as a model's: %%ddp, then weights = {name}.state_dict(), and "
                    "%ddp_pull weights"
                ) from None
        return values

    def _whose(self) -> str:
        """A sentence for who misses the ranks' own variables while a script's processes stay."""
        script = self._runs.script
        if script is None or not self._runs.script_left:
            return ""
        return (
            f" These are the variables of {script.title}, whose processes stay until the ranks "
            "run something else. The ranks' own are kept: run a %%ddp cell, and ask again."
        )

    def complete(self, code: str, at: int, ranks: Ranks | None) -> calls.Completions | None:
        """Completions of `code` at the cursor, from the first idle rank of `ranks`.

        None if no rank is idle, or it takes too long; the same holds for `describe`.
        """
        return self._ask_quickly(ranks, calls.COMPLETE, calls.CodeToComplete(code, at))

    def describe(
        self, named: calls.NameToInspect, ranks: Ranks | None = None
    ) -> calls.Inspection | None:
        """Signature, docstring and more of an object, from the first idle rank of `ranks`."""
        return self._ask_quickly(ranks, calls.INSPECT, named)

    def _ask_quickly(
        self, ranks: Ranks | None, call: calls.Call[calls.Request, calls.Answer], request: Any
    ) -> calls.Answer | None:
        """The answer of the first idle rank; None without one, or after the time limit."""
        owed, processes = self._owed, self._pool.processes
        # While an answer is owed its rank is blocked: each Tab would queue behind the last, and
        # wait.
        if processes is None or (owed is not None and not owed.done()):
            return None
        cluster = processes.cluster
        for rank in range(self._record.snapshot.world_size) if ranks is None else ranks:
            with contextlib.suppress(UsageMistake):
                idle = self._runs.idle((rank,), "Tab")
                self._owed = cluster.call(idle, call, lambda _: request)[rank]
                break
        else:
            return None
        with contextlib.suppress(UsageMistake):
            # The longest wait after Tab, as it blocks the kernel.
            return cluster.value_of(self._owed, 0.3)
        return None

    def variables(self, names: Sequence[str] = (), ranks: Ranks | None = None) -> VariableTable:
        """The variables of `ranks` (all by default) as one table; with `names`, those alone.

        From any thread, any time: variables of the function that a rank is in, and globals. Runs
        none of the user's code. Raises UsageMistake for a rank or name that does not exist,
        NoSession, SessionLost.
        """
        cluster = self._pool.need("%ddp_vars").cluster
        snapshot = self._record.snapshot
        members = existing(ranks, snapshot)
        alive = living(members, snapshot)
        request = calls.VariablesRequest(tuple(names))
        answers = cluster.ask(alive, calls.VARIABLES, request, 2.0)
        variables = answered(answers)
        reasons = {
            "dead": set(members) - set(alive),
            "does not answer": set(alive) - variables.keys(),
            _BUSY: {rank for rank, variable in variables.items() if variable.busy},
        }
        unread = [Unread(tuple(sorted(of)), why) for why, of in reasons.items() if of]
        table = variable_table.fold(variables.values(), unread, snapshot.world_size)
        known = {row.name for section in table.sections for row in section.rows}
        missing = [name for name in names if name not in known]
        if missing and variables:
            on = name_ranks(tuple(variables))
            raise UsageMistake(f"There is no variable {missing[0]!r} on {on}.{self._whose()}")
        return table

    def output(self, rank: int, log: bool = False) -> str:
        """The full output of `rank` in its last cell, which may still run, however long it is.

        With `log`, what the rank's process wrote outside of Python: messages of C code.
        """
        processes = self._pool.need("%ddp_output")
        check_ranks((rank,), self._record.snapshot)
        if log:
            logs: tuple[Path, ...] = (processes.log_file(rank),)
            if processes.script is not None and rank in processes.script.ranks:
                logs = processes.script.logs(rank)
            return "".join(processes.places.text_of(rank, file) for file in logs)
        run = next((run for run in reversed(self._runs.all) if rank in run.ranks), None)
        if run is None:
            return ""
        text = processes.places.text_of(rank, processes.output_file(rank, run.cell))
        return with_tracebacks(text or run.events.written(rank), run, rank)


def with_tracebacks(written: str, run: CellRun, rank: int) -> str:
    """A rank's output, and below it its error."""
    texts = [
        f"{strip_ansi(traceback.text)}\n"
        for traceback in run.events.tracebacks()
        if rank in traceback.ranks
    ]
    end = "\n" if texts and written and not written.endswith("\n") else ""
    return f"{written}{end}{''.join(texts)}"
