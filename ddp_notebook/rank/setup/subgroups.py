"""Groups that `new_group` made: after `%ddp_abort` those still in use are made again.

The user's own objects go on: a variable or a DDP object that holds such a group holds one that
works.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ddp_notebook.model import Ranks, name_ranks
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.torch_private import NewGroup


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    group: weakref.ref[Any]
    new: NewGroup


_Key = tuple[str, Ranks, int]
"""Name, members, and which one of that name and those members: a script's come after a cell's."""

_known: list[_Kept] = []
"""Those that torch may know."""
_lost: list[_Kept] = []
"""Those that it knew when every group was forgotten."""
made_again: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups that became others the last time."""


def keep(group: Any, new: NewGroup) -> None:
    """`new_group` made `group`, with `new`."""
    _known[:] = [each for each in _known if each.group() is not None]
    _known.append(_Kept(weakref.ref(group), new))


def before_all_are_forgotten() -> None:
    """Remember those that nobody destroyed."""
    for each in _known:
        group = each.group()
        if group is not None and not torch_private.is_forgotten(group):
            _lost.append(each)
    _known.clear()


def make_again(store: dist.Store, rank: int, world_size: int) -> str:
    """Make the lost groups again that every member still has; says which, empty for none.

    All ranks call it, with the same store, when the default group is new. What a member has no
    more (its process is new, or nothing there holds the group) is not made, and told.
    """
    mine = _by_key([each for each in _lost if each.group() is not None])
    _lost.clear()
    made_again.clear()
    store.set(f"kept/{rank}", json.dumps(sorted(mine)))
    told = [_told(store.get(f"kept/{each}")) for each in range(world_size)]
    # Every rank goes through them in the same order, as torch wants it, member or not.
    says = []
    for key in sorted({key for keys in told for key in keys}):
        members = key[1]
        without = tuple(member for member in members if key not in told[member])
        if without:
            says.append(
                f"no group of {name_ranks(members)} ({name_ranks(without)} lost it: new_group)"
            )
        else:
            _make(mine.get(key), members)
            says.append(f"group of {name_ranks(members)} made again")
    return " · ".join(says)


def _by_key(kept: list[_Kept]) -> dict[_Key, _Kept]:
    found: dict[_Key, _Kept] = {}
    seen: Counter[tuple[str, Ranks]] = Counter()
    for each in kept:
        alike = str(each.new.name), tuple(each.new.members)
        found[*alike, seen[alike]] = each
        seen[alike] += 1
    return found


def _told(text: bytes) -> set[_Key]:
    return {(name, tuple(members), number) for name, members, number in json.loads(text)}


def _make(before: _Kept | None, members: Ranks) -> None:
    """Make one group; the object that a member has goes on as it."""
    group = before.group() if before is not None else None
    if before is None or group is None:  # no member
        dist.new_group(members)
        return
    made: Any = dist.new_group(members, timeout=before.new.timeout, backend=before.new.backend)
    group.ddp_notebook_become(made)
    made_again.add(group)
    _known[-1] = _Kept(before.group, _known[-1].new)
