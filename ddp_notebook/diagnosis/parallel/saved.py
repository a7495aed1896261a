"""Rules for checkpoints of sharded models: parts of tensors that are in no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.model import (
    Category,
    Finding,
    Ranks,
    SaveFacts,
    Shards,
    in_brackets,
    name_ranks,
    verb,
)
from ddp_notebook.model.parallel.split import CheckpointCall

_FULL = (
    "Save the whole state: get_model_state_dict(model, options=StateDictOptions("
    "full_state_dict=True, cpu_offload=True)) on every rank, then torch.save on rank 0; or have "
    "all ranks call torch.distributed.checkpoint.save with one path."
)

_Saved = dict[int, list[tuple[str, SaveFacts, Shards]]]


def lost_shards(context: Context) -> Iterator[Finding]:
    """Files of torch.save that have parts of a sharded model, and lack the others."""
    for ranks, saved in _by_model(context).items():
        if not set(ranks) <= set(context.facts):
            continue
        each = next(iter(saved.values()))[0][2]
        written = {shards.part for of in saved.values() for _, _, shards in of}
        if len(written) < each.parts:
            yield _only_some(ranks, saved, each)
            continue
        together = _over_each_other(saved)
        if together:
            yield _overwritten(together, saved)


def _by_model(context: Context) -> dict[Ranks, _Saved]:
    found: dict[Ranks, _Saved] = {}
    for rank, facts in sorted(context.facts.items()):
        for save in facts.saves:
            if save.shards is not None:
                of = found.setdefault(save.shards.ranks, {})
                of.setdefault(rank, []).append((facts.host, save, save.shards))
    return found


def _only_some(ranks: Ranks, saved: _Saved, shards: Shards) -> Finding:
    savers = tuple(saved)
    _, first, _ = saved[savers[0]][0]
    return Finding(
        Category.CHECKPOINT_MISUSE,
        savers,
        f"only {verb(savers, 'saves', 'save')} a model that is sharded over {name_ranks(ranks)}: "
        f"the file has a part of {shards.name}, and the others are in no file"
        f"{in_brackets(first.place)}",
        _FULL,
        evidence=(
            *(f"rank {rank}: {_parts(of)}" for rank, of in saved.items()),
            f"{shards.count} tensors are sharded into {shards.parts} parts",
        ),
    )


def _over_each_other(saved: _Saved) -> dict[int, str]:
    """The ranks that write other parts to one path, and that path."""
    parts: dict[tuple[str, str], dict[int, int]] = {}
    for rank, of in saved.items():
        for host, save, shards in of:
            parts.setdefault((host, save.path), {})[rank] = shards.part
    return {
        rank: path
        for (_, path), of_ranks in parts.items()
        if len(set(of_ranks.values())) > 1
        for rank in of_ranks
    }


def _overwritten(together: Mapping[int, str], saved: _Saved) -> Finding:
    ranks = tuple(sorted(together))
    _, first, shards = next(e for e in saved[ranks[0]] if e[1].path == together[ranks[0]])
    return Finding(
        Category.CHECKPOINT_MISUSE,
        ranks,
        f"{name_ranks(ranks)} each save their own part of a sharded model to one path: only the "
        f"last one's part of {shards.name} is left in it{in_brackets(first.place)}",
        f"{_FULL} A path of its own for each rank does as well, if the same ranks load it again.",
        evidence=tuple(f"rank {rank}: {_parts(saved[rank])}" for rank in ranks),
    )


def _parts(of: list[tuple[str, SaveFacts, Shards]]) -> str:
    _, each, shards = of[0]
    more = f", and {len(of) - 1} more files" if len(of) > 1 else ""
    return f"part {shards.part + 1} of {shards.parts} in {each.path}{more}"


def apart_checkpoints(context: Context) -> Iterator[Finding]:
    """One checkpoint of torch.distributed.checkpoint that ranks write to other paths."""
    by_group: dict[Ranks, dict[int, list[CheckpointCall]]] = {}
    for rank, facts in sorted(context.facts.items()):
        for call in facts.split.checkpoints:
            by_group.setdefault(call.ranks, {}).setdefault(rank, []).append(call)
    for ranks, of in by_group.items():
        if set(of) != set(ranks) or len({len(calls) for calls in of.values()}) != 1:
            continue
        apart = [row for row in zip(*of.values(), strict=True) if len({e.path for e in row}) > 1]
        if apart:
            yield _apart(ranks, apart[0])


def _apart(ranks: Ranks, row: tuple[CheckpointCall, ...]) -> Finding:
    at = in_brackets(row[0].place)
    return Finding(
        Category.CHECKPOINT_MISUSE,
        ranks,
        f"each rank gives torch.distributed.checkpoint.save another path: one checkpoint is spread "
        f"over {len({e.path for e in row})} folders, and none of them can be loaded{at}",
        "Give every rank the same checkpoint_id: each writes files of its own into that folder.",
        evidence=tuple(f"rank {rank}: {e.path}" for rank, e in zip(ranks, row, strict=True)),
    )
