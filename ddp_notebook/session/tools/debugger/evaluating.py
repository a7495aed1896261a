"""Evaluates an expression, or assigns a variable, where each rank stands, and compares."""

from __future__ import annotations

import ast
import contextlib

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Ranks, Unread, VariableTable, by_value
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer, answered
from ddp_notebook.session.tools import differences
from ddp_notebook.session.tools.debugger.looking import Looking
from ddp_notebook.session.tools.debugger.subjects import Subject
from ddp_notebook.state import variable_table

_ASK_TIMEOUT_S = 2.0
_EXPRESSION = "expression, such as loss.item()", "%ddp_print loss.item()"
_ASSIGNMENT = "assignment, such as x = 3", "%ddp_set x = 3"


def evaluate(
    subject: Subject,
    looking: Looking,
    source: str,
    ranks: Ranks | None = None,
    up: int | None = None,
    *,
    assign: bool = False,
    own_text: bool = False,
) -> VariableTable:
    """The value of an expression on `ranks` (all by default) of `subject`, equal ones as one.

    Evaluated where each rank is: at a line, in a collective, where it raised, or idle; `up`
    user frames above that (default: the selected frame). With `assign` it is an assignment,
    with `own_text` shown by its own `repr`; `unread` says why not. Raises UsageMistake.
    """
    subject.need("%ddp_set" if assign else "%ddp_print")
    members = subject.members(ranks)
    _check_source(source, assign=assign)
    if up is not None and up < 0:
        raise UsageMistake("--up is 0 or more; 0 is the innermost. %ddp_frame shows all frames")
    alive = subject.alive(members)
    everywhere = subject.stops().keys() >= set(range(subject.world_size)) == set(members)
    up = looking.up if up is None else up
    request = calls.Expression(source, up, assign, own_text, everywhere)
    answers = subject.ask(alive, calls.EVALUATE, request, _ASK_TIMEOUT_S)
    evaluated = answered(answers)
    values = [answer.value for answer in evaluated.values() if answer.value is not None]
    reasons = {rank: _why_none(answers.get(rank), alive=rank in alive) for rank in members}
    unread = [Unread(of, why) for of, why in by_value(reasons) if why]
    table = variable_table.fold(values, unread, subject.world_size, evaluated=True)
    return differences.placed(table, values, subject)


def _why_none(answer: calls.Evaluated | CannotAnswer | None, *, alive: bool) -> str:
    """Why a rank gave no value; empty if none was requested."""
    if answer is None:
        return "does not answer" if alive else "dead"
    return answer.why if isinstance(answer, CannotAnswer) else answer.problem


def _check_source(source: str, *, assign: bool) -> None:
    """Raises UsageMistake for text that is not an expression, or not an assignment."""
    what, example = _ASSIGNMENT if assign else _EXPRESSION
    if not source.strip():
        raise UsageMistake(f"The {what.partition(',')[0]} is missing. For example: {example}")
    try:
        tree = ast.parse(source, mode="exec" if assign else "eval")
    except (SyntaxError, ValueError) as error:
        why = f"{getattr(error, 'msg', error)}).{_to_assign(source)}"
        raise UsageMistake(f"{source!r} is no {what} ({why}") from None
    assignments = (ast.Assign, ast.AugAssign, ast.AnnAssign)
    if isinstance(tree, ast.Module) and not all(isinstance(n, assignments) for n in tree.body):
        raise UsageMistake(f"{source!r} is no {what}.")


def _to_assign(source: str) -> str:
    """What to type where an expression is wanted, and this is an assignment."""
    with contextlib.suppress(SyntaxError, ValueError):
        if any(isinstance(node, ast.Assign | ast.AugAssign) for node in ast.parse(source).body):
            return f" To assign: %ddp_set {source}"
    return ""
