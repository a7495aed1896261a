"""The parameters of one optimizer that must be the same on several ranks, beside sharded ones.

Digests of some are made before the first step and after a few of the next ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ddp_notebook import model
from ddp_notebook.model import Ranks, TensorDigest
from ddp_notebook.rank.collectives.call_sites import Line, place_of
from ddp_notebook.rank.training import digests
from ddp_notebook.rank.training.parallel import fsdp_private, meshes

_MOST, _MOST_VALUES = 24, 2**14
_MOST_SUMS = 8
_LOOKED_AT = (1, 2, 4, 8)
"""Digests are made after these steps."""


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
    """The replicated parameters of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self.ref = weakref.ref(optimizer)
        self._steps = 0
        self.shard_sums: list[model.ShardSum] = []
        named = list(_named(optimizer, names))
        self.split = any(meshes.is_placed(tensor) for _, tensor in named)
        """Some of its parameters are DTensors."""
        self._copies = list(_copies(named))[:_MOST] if self.split else []

    def compare(self, reduced: Iterable[Reduced], names: Mapping[int, str]) -> None:
        """The first step begins: which of these were on gradients of this optimizer's shards?"""
        optimizer = self.ref()
        at = {each.address: each for each in reduced}
        if optimizer is None or not self.split or not at:
            return
        found = (
            shard_sum
            for name, parameter in _named(optimizer, names)
            if meshes.is_placed(parameter)
            for shard_sum in _sums_of(name, parameter, at)
        )
        self.shard_sums = list(islice(found, _MOST_SUMS))

    def stepped(self) -> None:
        """Make digests after a step, if it is one of `_LOOKED_AT`."""
        self._steps += 1
        if self._copies and self._steps in _LOOKED_AT:
            self._look()

    def facts(self) -> tuple[model.Copy, ...]:
        """The digests, current or the last ones."""
        self._look()
        return tuple(
            model.Copy(e.name, e.row.ranks, e.declared, e.begin, e.end, e.row.dimension)
            for e in self._copies
            if self._steps
        )

    def _look(self) -> None:
        for copy in self._copies:
            copy.end = _digest(copy.name, copy.tensor()) or copy.end


def _sums_of(name: str, parameter: Any, at: Mapping[int, Reduced]) -> Iterable[model.ShardSum]:
    """The all_reduces, by address, that summed a gradient with those of other parts."""
    local = fsdp_private.local_part(parameter.grad)
    found = at.get(local.data_ptr()) if local is not None and local.numel() else None
    if found is not None:
        place = place_of(found.line)
        for row in meshes.rows(parameter):
            if row.sharded and set(row.ranks) <= set(found.ranks):
                yield model.ShardSum(name, found.ranks, row.dimension, place)


def _named(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterable[tuple[str, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"param_groups[{g}]['params'][{i}]"), parameter


def _copies(named: list[tuple[str, torch.Tensor]]) -> Iterable[_Copy]:
    placed = {
        id(tensor): list(meshes.rows(tensor)) for _, tensor in named if meshes.is_placed(tensor)
    }
    split, data = _split_rows(placed)
    for name, tensor in named:
        digest = _digest(name, tensor) if tensor.grad is not None else None
        if digest is not None:
            own = placed.get(id(tensor), [])
            for row in own:
                if not row.sharded:
                    yield _Copy(name, weakref.ref(tensor), row, True, digest, digest)
            for row in _without(own, split) if id(tensor) in placed else [*split, *data]:
                yield _Copy(name, weakref.ref(tensor), row, False, digest, digest)


def _without(own: list[meshes.Row], split: list[meshes.Row]) -> list[meshes.Row]:
    """The rows that none of a tensor's own has."""
    return [r for r in split if not any(set(r.ranks) <= set(other.ranks) for other in own)]


def _split_rows(
    placed: Mapping[int, list[meshes.Row]],
) -> tuple[list[meshes.Row], list[meshes.Row]]:
    """The rows along which these parameters are in parts: by a plan, and by FSDP2."""
    managed = {id(e.tensor): e.group for e in fsdp_private.held_by_units().values()}
    planned: dict[Ranks, meshes.Row] = {}
    by_fsdp: dict[Ranks, meshes.Row] = {}
    for number, rows in placed.items():
        for row in rows:
            if row.sharded:
                (by_fsdp if row.ranks == managed.get(number) else planned)[row.ranks] = row
    return list(planned.values()), list(by_fsdp.values())


def _digest(name: str, tensor: Any) -> TensorDigest | None:
    """Of the first values of what this rank has; None for what cannot be read without waiting."""
    local = fsdp_private.local_part(tensor) if tensor is not None else None
    if local is None or not local.is_contiguous():
        return None
    return digests.digest(name, local.view(-1)[:_MOST_VALUES])
