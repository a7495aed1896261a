"""The parameters of one optimizer that ranks have alike, beside others of which each has a part.

Digests of some are made before the first step and after a few of the next ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ddp_notebook.model import Place, Ranks, TensorDigest
from ddp_notebook.model.parallel.split import Copy, ShardSum
from ddp_notebook.rank.collectives.call_sites import Line
from ddp_notebook.rank.training import digests
from ddp_notebook.rank.training.parallel import fsdp_private, meshes

_MOST, _MOST_VALUES = 24, 2**14
_MOST_SUMS = 8
_LOOKED_AT = (1, 2, 4, 8)
"""The steps after which digests are made."""


@dataclass(frozen=True)
class Reduced:
    """An all_reduce of `ranks` on a tensor at `address`, after so many backwards."""

    backwards: int
    address: int
    ranks: Ranks
    line: Line | None


@dataclass
class _Copy:
    name: str
    tensor: weakref.ref[Any]
    row: meshes.Row
    declared: bool
    begin: TensorDigest
    end: TensorDigest


class Copies:
    """Those of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self.ref = weakref.ref(optimizer)
        self._steps = 0
        self.shard_sums: list[ShardSum] = []
        named = list(_named(optimizer, names))
        self.split = any(meshes.is_placed(each) for _, each in named)
        """Some of its parameters are DTensors."""
        self._copies = list(_copies(named))[:_MOST] if self.split else []

    def compare(self, reduced: Iterable[Reduced], names: Mapping[int, str]) -> None:
        """The first step begins: which of these were on gradients of this optimizer's shards?"""
        optimizer = self.ref()
        at = {each.address: each for each in reduced}
        if optimizer is None or not self.split or not at:
            return
        for name, parameter in _named(optimizer, names):
            local = fsdp_private.local_part(parameter.grad) if meshes.is_placed(parameter) else None
            found = at.get(local.data_ptr()) if local is not None and local.numel() else None
            if found is None or len(self.shard_sums) >= _MOST_SUMS:
                continue
            for row in meshes.rows(parameter):
                if row.sharded and set(row.ranks) <= set(found.ranks):
                    place = Place(*found.line) if found.line else None
                    self.shard_sums.append(ShardSum(name, found.ranks, row.dimension, place))

    def stepped(self) -> None:
        """A step is over."""
        self._steps += 1
        if self._copies and self._steps in _LOOKED_AT:
            self._look()

    def facts(self) -> tuple[Copy, ...]:
        """As they are now, or were last."""
        self._look()
        return tuple(
            Copy(e.name, e.row.ranks, e.declared, e.begin, e.end, e.row.dimension)
            for e in self._copies
            if self._steps
        )

    def _look(self) -> None:
        for each in self._copies:
            each.end = _digest(each.name, each.tensor()) or each.end


def _named(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterable[tuple[str, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"param_groups[{g}]['params'][{i}]"), parameter


def _copies(named: list[tuple[str, torch.Tensor]]) -> Iterable[_Copy]:
    placed = {id(each): list(meshes.rows(each)) for _, each in named if meshes.is_placed(each)}
    managed = {id(e.tensor): e.group for e in fsdp_private.held_by_units().values()}
    split = {
        row.ranks: row
        for number, of in placed.items()
        for row in of
        if row.sharded and row.ranks != managed.get(number)
    }
    for name, each in named:
        own = placed.get(id(each), [])
        covered = [set(row.ranks) for row in own]
        by_plan = [row for ranks, row in split.items() if not any(c >= set(ranks) for c in covered)]
        digest = _digest(name, each) if each.grad is not None else None
        for row in [*(row for row in own if not row.sharded), *by_plan] if digest else ():
            yield _Copy(name, weakref.ref(each), row, row in own, digest, digest)


def _digest(name: str, tensor: Any) -> TensorDigest | None:
    """Of the first values of what this rank has; None for what cannot be read without waiting."""
    local = fsdp_private.local_part(tensor) if tensor is not None else None
    if local is None or not local.is_contiguous():
        return None
    return digests.digest(name, local.view(-1)[:_MOST_VALUES])
