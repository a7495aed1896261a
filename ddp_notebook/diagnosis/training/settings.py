"""Rules about settings that change what a rank computes, and that differ."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, each_with
from ddp_notebook.diagnosis.source_code.singled_out import strayed
from ddp_notebook.model import Category, Finding, in_brackets

_FEWEST_BACKWARDS = 2


def other_precision(context: Context) -> Iterator[Finding]:
    """Ranks that train one model compute with other settings."""
    for model in context.models.values():
        settings = {
            rank: (*context.facts[rank].precision, f"torch.autocast={replica.autocast or 'off'}")
            for rank, replica in model.of.items()
            if replica.forwards
        }
        if len(settings) < 2 or len({len(setting) for setting in settings.values()}) != 1:
            continue
        for values in zip(*settings.values(), strict=True):
            of = dict(zip(settings, values, strict=True))
            if len(set(of.values())) > 1:
                yield _differs(context, of)
                return


def _differs(context: Context, of: dict[int, str]) -> Finding:
    name = of[min(of)].partition("=")[0]
    values = {rank: text.partition("=")[2] for rank, text in of.items()}
    ranks = strayed(context.sources, of, _words_of(name))
    what = f"{name} is {values[ranks[0]]}, and something else on other ranks"
    if len(ranks) == len(of):
        what = f"{name} is {each_with(values)}, which of them is meant cannot be told"
    return Finding(
        Category.NUMERICS_MISMATCH,
        ranks,
        f"{what}: they compute with other precision",
        f"Make the same setting on every rank: {name}.",
        evidence=tuple(f"rank {rank}: {text}" for rank, text in of.items()),
    )


def _words_of(name: str) -> tuple[str, ...]:
    """What a setting is called where it is made: a function, or what gets a value."""
    last = name.rpartition(".")[2].removesuffix("()")
    what = last.removeprefix("get_").removeprefix("are_").removesuffix("_enabled")
    return last, f"set_{what}", f"use_{what}"


def other_mode(context: Context) -> Iterator[Finding]:
    """Some ranks train a model in evaluation mode: without dropout, with other statistics."""
    for model in context.models.values():
        of = {rank: replica.evaluating for rank, replica in model.of.items()}
        fewest = min(of.values())
        ranks = tuple(rank for rank, times in of.items() if times >= fewest + _FEWEST_BACKWARDS)
        if not ranks or not all(each.varies for each in model.of.values()):
            continue
        place = model.of[ranks[0]].start_place
        at = in_brackets(place)
        yield Finding(
            Category.NUMERICS_MISMATCH,
            ranks,
            f"{model.title} is trained in evaluation mode there, in training mode on the other "
            f"ranks: its dropout and batch norm do something else{at}",
            "Call model.train() on every rank before the training forward; after model.eval() for "
            "an evaluation on one rank, too.",
            evidence=by_ranks(
                {
                    rank: f"{times} of {model.of[rank].backwards} backwards in evaluation mode"
                    for rank, times in of.items()
                }
            ),
        )
