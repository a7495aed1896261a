"""The rule for sums over ranks that are added to, and summed over ranks again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.source_code.running_totals import added_to_sum
from ddp_notebook.model import Category, Finding, Place, in_brackets, name_ranks


def summed_again(context: Context) -> Iterator[Finding]:
    """A sum over all ranks is added to, and summed again: what it was counts once per rank."""
    of = context.collectives.of
    calls = {rank: _sums(context, rank) for rank in of}
    for path in dict.fromkeys(path for count in calls.values() for path in count):
        ranks = tuple(rank for rank, count in calls.items() if count[path] > 1)
        added = added_to_sum(context.sources, path) if len(ranks) > 1 else None
        if added is None or set(ranks) != set(of):
            continue
        name, line = added
        times = max(calls[rank][path] for rank in ranks)
        yield Finding(
            Category.METRIC_MISAGGREGATION,
            ranks,
            f"{name} is summed over the ranks in place, added to, and summed again: what it was "
            f"before counts once for each rank, so it grows {len(ranks)}-fold each time"
            f"{in_brackets(path[-1])}",
            f"Reduce a copy ({_short(name)}_of_all = {name}.clone()), or set {name} to zero after "
            "each all_reduce.",
            evidence=(
                f"all_reduce of {name} up to {times} times, on {name_ranks(ranks)}",
                f"the code adds to it in {path[-1].file}:{line}, and sets it anew nowhere",
            ),
        )


def _sums(context: Context, rank: int) -> Counter[tuple[Place, ...]]:
    """How often each line of a rank's own code summed something over all ranks."""
    members = context.collectives.groups
    return Counter(
        record.path
        for record in context.collectives.of[rank]
        if record.operation == "all_reduce"
        and record.reduce_op == "SUM"
        and record.part is None
        and record.path
        and len(members.get(record.group, ())) > 1
    )


def _short(name: str) -> str:
    return name.rpartition(".")[2]
