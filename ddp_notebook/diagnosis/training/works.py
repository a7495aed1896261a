"""Rules about collectives that were started, and whose end was not waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.model import Category, Finding, FunctionalFacts, WorkFacts

_WAIT = "Keep every handle, and call its wait() before the tensor is used."


def unwaited(context: Context) -> Iterator[Finding]:
    """A tensor was changed, or gradients used, while a collective may still have been at work."""
    lines: dict[tuple[str, str], dict[int, WorkFacts]] = {}
    for rank, facts in sorted(context.facts.items()):
        for each in facts.works:
            if each.written or each.stepped:
                lines.setdefault((str(each.place), each.operation), {})[rank] = each
    for of in lines.values():
        yield _misused(of)
    yield from _functional({rank: facts.functional for rank, facts in context.facts.items()})


def _misused(of: Mapping[int, WorkFacts]) -> Finding:
    each = next(iter(of.values()))
    at = f" ({each.place})" if each.place is not None else ""
    if each.operation in ("isend", "send"):
        what = "the tensor that it sends is changed"
    elif any(one.stepped for one in of.values()):
        what = "the optimizer uses the gradients that it reduces"
    else:
        what = "the tensor is changed that it works on"
    return Finding(
        Category.ASYNC_MISUSE,
        tuple(of),
        f"{what} before {each.operation} was waited for{at}: the result depends on which is first",
        _WAIT,
        evidence=by_ranks({rank: _counts(one) for rank, one in of.items()}),
    )


def _counts(each: WorkFacts) -> str:
    words = [f"{each.issued} started, {each.unwaited} never waited for"]
    if each.written:
        words.append(f"{each.written} tensors changed before")
    if each.stepped:
        words.append(f"{each.stepped} gradients used before")
    return "; ".join(words)


def _functional(of: Mapping[int, FunctionalFacts]) -> Iterator[Finding]:
    """More results are left than torch itself may have left: a line of the user's left them."""
    ranks = {rank: each for rank, each in sorted(of.items()) if each.left > each.others}
    if not ranks:
        return
    each = next(iter(ranks.values()))
    at = f" ({each.place})" if each.place is not None else ""
    yield Finding(
        Category.ASYNC_MISUSE,
        tuple(ranks),
        f"results of torch.ops._c10d_functional were never given to wait_tensor{at}: they were "
        "there to be read before the collective had written them",
        "Read torch.ops._c10d_functional.wait_tensor(result), not the result itself; or call "
        "torch.distributed._functional_collectives, whose results wait by themselves.",
        evidence=by_ranks(
            {
                r: f"{e.left} of {e.direct + e.others} results not waited for"
                for r, e in ranks.items()
            }
        ),
    )
