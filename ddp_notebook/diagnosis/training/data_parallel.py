"""The rule for ranks that use torch.nn.DataParallel in place of DDP."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.diagnosis.training.replicas import differing, some
from ddp_notebook.model import Category, Collectives, Finding, ParallelFacts, name_ranks


def data_parallel(context: Context) -> Iterator[Finding]:
    """Several ranks train a model each: they differ by now, or nothing was ever exchanged."""
    facts = context.facts
    for key in dict.fromkeys(each.key for one in facts.values() for each in one.parallels):
        of = {
            rank: each
            for rank in sorted(facts)
            for each in facts[rank].parallels
            if each.key == key
        }
        names = differing({rank: each.parameters for rank, each in of.items()})
        if len(of) > 1 and (names or not _exchanged(context.collectives)):
            yield _alone(of, names)


def _exchanged(collectives: Collectives) -> bool:
    """True when ranks sent each other more than a number: it may have been gradients."""
    return any(each.numel > 1 for records in collectives.of.values() for each in records)


def _alone(of: dict[int, ParallelFacts], names: tuple[str, ...]) -> Finding:
    first = of[min(of)]
    at = f" ({first.place})" if first.place is not None else ""
    does = (
        f"it spreads each batch of its own process over {first.devices} GPUs"
        if first.devices
        else "on CPUs it only calls the module"
    )
    apart = (f"not the same on {name_ranks(of)}: {some(names)}",) if names else ()
    return Finding(
        Category.DDP_BYPASS,
        tuple(of),
        f"{first.type} is trained with torch.nn.DataParallel, which knows nothing of the other "
        f"ranks: {does}, and no gradient is reduced{at}",
        "Wrap the model in torch.nn.parallel.DistributedDataParallel on every rank: each trains on "
        "its own part of the batch, and the gradients are averaged.",
        evidence=(*by_ranks({r: _steps(e.steps) for r, e in of.items()}), *apart),
    )


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'} with DataParallel"
