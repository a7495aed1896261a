"""Where ranks stand: their frames, and expressions there, watched or evaluated once."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_notebook import syntax
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import (
    Frame,
    Ranks,
    RankVariables,
    StepTable,
    TensorFacts,
    Unread,
    VariableRow,
    VariableTable,
    by_value,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer, answered
from ddp_notebook.session.guards import existing, living
from ddp_notebook.views import step_rows, variable_table

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry

_ASK_TIMEOUT_S = 2.0
_MOST_WATCHED = 20


@dataclass(frozen=True, slots=True)
class Stand:
    """Ranks with the same user frames, the innermost first; or why they have no frames."""

    ranks: Ranks
    frames: tuple[Frame, ...]
    why: str = ""


class Looking:
    """Frames and expressions. A frame is selected until ranks move; watched expressions stay."""

    def __init__(self, record: Record, pool: RankPool, runs: RunRegistry) -> None:
        self._record = record
        self._pool = pool
        self._runs = runs
        self._chosen: tuple[object, int] = (None, 0)
        self.watched: tuple[str, ...] = ()
        """Expressions whose values are shown after each step."""

    # -- frames ----------------------------------------------------------------------------

    @property
    def up(self) -> int:
        """The selected frame: the number of user frames above the innermost."""
        at, up = self._chosen
        return up if up and at == self._moment() else 0

    def _moment(self) -> object:
        """A value that changes whenever ranks have moved."""
        # By the numbers of stops, not by lines: a loop comes back to the same line.
        return tuple(
            (run.cell, run.pending, tuple((r, s.stop) for r, s in sorted(run.stops.items())))
            for run in self._runs.all
        )

    def stands(self, ranks: Ranks | None) -> tuple[Stand, ...]:
        """The frames of `ranks` (all by default). Raises UsageMistake for an unknown rank."""
        cluster = self._pool.need("%ddp_frame").cluster
        members = existing(ranks, self._record.snapshot)
        alive = living(members, self._record.snapshot)
        answers = cluster.ask(alive, calls.STANDING, calls.Nothing(), _ASK_TIMEOUT_S)
        found: dict[int, tuple[tuple[Frame, ...], str]] = {}
        for rank in members:
            answer = answers.get(rank)
            if not isinstance(answer, calls.Standing):
                found[rank] = (), "does not answer"
            elif answer.busy:
                found[rank] = (), "computes; its frames change"
            else:
                found[rank] = answer.frames, "" if answer.frames else "is in no code of yours"
        return tuple(Stand(of, *each) for of, each in by_value(found))

    def choose(self, frame: str, ranks: Ranks | None) -> tuple[Stand, ...]:
        """Select this frame: ``up``, ``down``, a number, or empty for the selected one.

        Raises UsageMistake where no rank has it.
        """
        stands = self.stands(ranks)
        deepest = max((len(stand.frames) for stand in stands), default=0)
        steps = {"": 0, "up": 1, "down": -1}
        up = self.up + steps[frame] if frame in steps else int(frame)
        if not deepest:
            raise UsageMistake(
                "No rank is in your code. A rank is there at a breakpoint (%ddp_break), in a "
                "collective, and after a cell that raised."
            )
        if not 0 <= up < deepest:
            known = f"they are 0 (innermost) to {deepest - 1}" if deepest > 1 else "there is only 0"
            raise UsageMistake(f"There is no frame {up if up > 0 else 'below 0'}: {known}.")
        self._chosen = (self._moment(), up)
        return stands

    # -- expressions -----------------------------------------------------------------------

    def watch(self, source: str) -> None:
        """Show this expression after each step. Raises UsageMistake for one too many."""
        if source not in self.watched and len(self.watched) >= _MOST_WATCHED:
            raise UsageMistake(
                f"Already {_MOST_WATCHED} expressions are watched. Stop: %ddp_print --unwatch"
            )
        self.watched = tuple(dict.fromkeys((*self.watched, source)))

    def unwatch(self, source: str) -> None:
        """Stop watching this expression, or all if it is empty. Raises UsageMistake."""
        if source and source not in self.watched:
            known = ", ".join(self.watched) or "none"
            raise UsageMistake(f"{source!r} is not watched; watched: {known}.")
        self.watched = tuple(each for each in self.watched if source and each != source)

    def with_watched(self, table: StepTable) -> StepTable:
        """`table` with the watched expressions, on the ranks that are paused at lines."""
        paused = self._paused()
        if not paused or not self.watched:
            return table
        lines = [step_rows.watched(each, self.evaluate(each, paused)) for each in self.watched]
        return replace(table, details=(*table.details, *lines))

    def evaluate(
        self,
        source: str,
        ranks: Ranks | None = None,
        up: int | None = None,
        *,
        assign: bool = False,
        own_text: bool = False,
    ) -> VariableTable:
        """Return the value of an expression on `ranks` (all by default), equal ones as one.

        Evaluated where each rank is: at a line, in a collective, where it raised, or idle; `up`
        user frames above that (default: the selected frame). With `assign` it is an assignment,
        with `own_text` shown by its own `repr`; `unread` says why not. Raises UsageMistake.
        """
        cluster = self._pool.need("%ddp_set" if assign else "%ddp_print").cluster
        snapshot = self._record.snapshot
        members = existing(ranks, snapshot)
        check_source(source, assign=assign)
        up = self.up if up is None else up
        if up < 0:
            raise UsageMistake("--up is 0 or more; 0 is the innermost. %ddp_frame shows all frames")
        alive = living(members, snapshot)
        # Only where all ranks evaluate it may an expression communicate: else it never ends.
        everywhere = {*self._paused()} >= {*range(snapshot.world_size)} == {*members}
        request = calls.Expression(source, up, assign, own_text, everywhere)
        answers = cluster.ask(alive, calls.EVALUATE, request, _ASK_TIMEOUT_S)
        silent = {rank: "does not answer" if rank in alive else "dead" for rank in members}
        said = {
            rank: answer.why if isinstance(answer, CannotAnswer) else answer.problem
            for rank, answer in answers.items()
        }
        unread = [Unread(of, why) for of, why in by_value(silent | said) if why]
        evaluated = answered(answers).values()
        values = [answer.value for answer in evaluated if answer.value is not None]
        table = variable_table.fold(values, unread, snapshot.world_size, evaluated=True)
        return self._with_first_differences(table, values)

    def _paused(self) -> Ranks:
        """The ranks that are paused at lines."""
        return tuple(sorted(self._runs.stops))

    # -- where tensors differ --------------------------------------------------------------

    def _with_first_differences(
        self, table: VariableTable, values: Sequence[RankVariables]
    ) -> VariableTable:
        """`table`, of one expression, with the index at which tensors differ from most ranks'."""
        facts = {
            variables.rank: variable.tensor
            for variables in values
            for scope in variables.scopes
            for variable in scope.variables
            if variable.tensor is not None
        }
        sections = tuple(
            replace(section, rows=tuple(self._compared(row, facts) for row in section.rows))
            for section in table.sections
        )
        return replace(table, sections=sections)

    def _compared(self, row: VariableRow, facts: Mapping[int, TensorFacts]) -> VariableRow:
        base = next((cell for cell in row.cells if not cell.note and not cell.odd), None)
        other = facts.get(base.ranks[0]) if base is not None else None
        if base is None or other is None or not other.read:
            return row
        cells = list(row.cells)
        # Of many values the first ones are enough: they probably differ everywhere.
        for number, cell in enumerate(row.cells[:4]):
            own = facts.get(cell.ranks[0])
            if cell is base or own is None or not own.read or own.shape != other.shape:
                continue
            if not 1 < own.size <= 2**24:
                continue
            index, far = self._first_difference((base.ranks[0], cell.ranks[0]), own.size)
            if index is None:
                continue
            note, place = cell.note, f"first at {unravelled(index, own.shape)}"
            if far and own.size <= calls.MOST_VALUES:
                note = f"max difference {far:.4g}"
            elif far and not note.startswith("max difference"):
                note = f"max difference {far:.4g} or more"
            cells[number] = replace(cell, note=f"{note}, {place}" if note else place)
        return replace(row, cells=tuple(cells))

    def _first_difference(self, ranks: Ranks, size: int) -> tuple[int | None, float | None]:
        """The index of the first of `size` values that differs between two ranks; None if unknown.

        Found by checksums of parts, then of parts of the first part that differs. Also the largest
        difference among the values read: all of them if they are few.
        """
        begin, end, far = 0, size, None
        cluster = self._pool.need("%ddp_print").cluster
        while True:
            answers = cluster.ask(ranks, calls.CHECKSUMS, calls.TensorPart(begin, end), 1.0)
            found = [each for each in answers.values() if isinstance(each, calls.Checksums)]
            if len(found) < len(ranks) or not all(each.step for each in found):
                return None, far
            one, other = found
            pairs = zip(one.of, other.of, strict=False)
            number = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            if number is None:
                return None, far
            values = zip(one.values, other.values, strict=False)
            apart = [abs(a - b) for a, b in values if a is not None and b is not None]
            far = max(apart, default=None) or far
            begin, step = begin + number * one.step, one.step
            if step == 1:
                return begin, far
            end = min(begin + step, end)


def unravelled(index: int, shape: Sequence[int]) -> list[int]:
    """Return a flat index of a tensor as a multi-dimensional one."""
    found = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        found.append(at)
    return found[::-1]


def check_source(source: str, *, assign: bool) -> None:
    """Raises UsageMistake for text that is not an expression, or not an assignment."""
    what, example = "expression, such as loss.item()", "%ddp_print loss.item()"
    if assign:
        what, example = "assignment, such as x = 3", "%ddp_set x = 3"
    if not source.strip():
        raise UsageMistake(f"The {what.partition(',')[0]} is missing. For example: {example}")
    assignments = (ast.Assign, ast.AugAssign, ast.AnnAssign)
    try:
        tree = syntax.parse(source, mode="exec" if assign else "eval")
    except (SyntaxError, ValueError) as error:
        why = f"{getattr(error, 'msg', error)})."
        with contextlib.suppress(SyntaxError, ValueError):
            if any(
                isinstance(node, ast.Assign | ast.AugAssign) for node in syntax.parse(source).body
            ):
                why += f" To assign: %ddp_set {source}"
        raise UsageMistake(f"{source!r} is not a valid {what} ({why}") from None
    if isinstance(tree, ast.Module) and not all(isinstance(n, assignments) for n in tree.body):
        raise UsageMistake(f"{source!r} is not a valid {what}.")
