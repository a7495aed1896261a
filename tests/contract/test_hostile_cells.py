"""Cells that break what a rank itself needs: they end all the same, and what they say arrives."""

from __future__ import annotations

from ddp_notebook.model import OutputGroup
from ddp_notebook.session import Session

UNREADABLE = """
from IPython.display import HTML, display
class Half:
    def __repr__(self):
        return "half \\ud800"
class Raises:
    def __repr__(self):
        raise ValueError("no")
around = []
around.append(around)
half_of_a_pair = "half \\ud800"
print("printed \\ud800")
display(HTML("html \\ud800"))
display({"application/json": {(1, 2): 3}}, raw=True)
display({"application/json": around, "text/plain": "around"}, raw=True)
display({"application/json": {"it": Raises()}, "text/plain": "raises"}, raw=True)
Half()
"""


def text_of(groups: tuple[OutputGroup, ...]) -> str:
    """All that is shown; an encoder of strict JSON takes it."""
    texts = [f"{item.text}{item.data}" for group in groups for item in group.items]
    return "\n".join(texts).encode("utf-8").decode()


def test_a_cell_that_takes_its_streams_away_is_the_only_one_without(ranks2: Session) -> None:
    ranks2.run_cell("import sys\nsys.stdout = sys.stderr = None").raise_for_error()
    result = ranks2.run_cell("print('there', rank)\nprint('also', file=sys.stderr)")
    result.raise_for_error()
    assert "there 0" in text_of(result.outputs) and "also" in text_of(result.outputs)


def test_text_that_cannot_be_written_is_shown_as_far_as_it_can_be(ranks2: Session) -> None:
    result = ranks2.run_cell(UNREADABLE, ranks=(0,))
    result.raise_for_error()
    shown = text_of(result.outputs)
    for part in ("printed ?", "html ?", "half ?", "cannot be sent as JSON", "whose repr raised"):
        assert part in shown
    failed = ranks2.run_cell('raise ValueError("cut \\ud800")', ranks=(0,))
    assert str(failed.error) == "rank 0 raised ValueError: cut ? (cell line 2)."
    assert "cut ?" in text_of(failed.tracebacks)
    named = ranks2.run_cell("raise type('E\\ud800', (Exception,), {})('x')", ranks=(0,))
    str(named.error).encode("utf-8")
    table = ranks2.variables(("half_of_a_pair", "around"))
    repr(table).encode("utf-8")


def test_a_rank_that_cannot_even_say_that_a_cell_ended_ends_itself(ranks2: Session) -> None:
    # What `sys.modules.clear()` may do, or may not: it depends on what is collected when.
    source = "from ddp_notebook.rank.events import EventSender\nEventSender.emit_now = None"
    result = ranks2.run_cell(source, ranks=(1,))
    try:
        assert "rank 1 died, exited with code 1" in str(result.error)
    finally:
        ranks2.restart((1,))
    assert ranks2.run_cell("rank", ranks=(0,)).error is None


FORKED = """
import os
child = os.fork()
if child == 0:
    raise SystemExit(3)
os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_process_that_a_cell_forks_ends_with_the_cell_as_it_would_with_a_program(
    ranks2: Session,
) -> None:
    result = ranks2.run_cell(FORKED, ranks=(1,))
    result.raise_for_error()
    assert "'3'" in text_of(result.outputs)
    ranks2.run_cell("dist.all_reduce(torch.ones(1))").raise_for_error()


def test_a_rank_that_cannot_report_is_known_by_how_its_cell_ended(ranks2: Session) -> None:
    ranks2.run_cell("dist.all_reduce = dist.is_initialized = None", ranks=(1,)).raise_for_error()
    try:
        result = ranks2.run_cell("dist.all_reduce(torch.ones(1))")
        assert str(result.error).startswith(
            "Rank 1 raised TypeError: 'NoneType' object is not callable"
        )
        assert result.pending == (0,)
    finally:
        ranks2.restart()


def test_a_rank_whose_code_replaced_what_answers_need_is_named_within_seconds(
    ranks2: Session,
) -> None:
    source = """
if rank == 1:
    import builtins, torch.distributed
    torch.distributed.is_initialized = None
    builtins.input = lambda: __import__("signal").pause()
    input()
dist.all_reduce(torch.ones(1))
"""
    result = ranks2.run_cell(source)
    try:
        assert str(result.error).startswith(
            "Rank 1 cannot answer (TypeError: 'NoneType' object is not callable) and uses no CPU "
            "time."
        )
        assert "`%ddp_restart --ranks 1`" in str(result.error)
        assert "replaced something that Python or torch needs" in str(result.error)
    finally:
        ranks2.restart()
