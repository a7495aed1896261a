"""Groups that `new_group` made: after `%ddp_abort` those still in use are made again.

The user's own objects go on: a variable or a DDP object that holds such a group holds one that
works.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ddp_notebook import model
from ddp_notebook.model import Place, Ranks, name_ranks
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.component import Component
from ddp_notebook.rank.torch_private import NewGroup


@dataclass(frozen=True, slots=True, eq=False)
class _Subgroup:
    group: weakref.ref[Any]
    new: NewGroup


_Key = tuple[str, Ranks, int]
"""Name, members, and which one of that name and those members: a script's come after a cell's."""


_NO_NAMES = ("undefined", "default_pg", "mesh_default")


def group_name(description: str | None) -> str:
    """Return the user's name of a group: a mesh's dimension, or its description; else empty."""
    if not description or description in _NO_NAMES:
        return ""
    return description.removeprefix("mesh_")


class Subgroups(Component):
    """The groups of this rank that `new_group` made, held by weak references."""

    def __init__(self) -> None:
        self.made: deque[model.GroupMade] = deque(maxlen=64)
        """The last calls of new_group on this rank since it has a default group, the one that
        it is in included."""
        self._known: list[_Subgroup] = []
        """The groups that torch may know."""
        self._lost: list[_Subgroup] = []
        """The groups that it knew when every group was forgotten."""
        self.made_again: weakref.WeakSet[Any] = weakref.WeakSet()
        """Groups that became others the last time."""

    def setup_begins(self) -> None:
        """Remember the groups that were not destroyed, and make torch forget every group."""
        for subgroup in self._known:
            group = subgroup.group()
            if group is not None and not torch_private.is_forgotten(group):
                self._lost.append(subgroup)
        self._known.clear()
        torch_private.forget_groups()

    def begins(self, new: NewGroup, path: tuple[Place, ...]) -> None:
        """torch is about to make a group; this rank may be no member.

        Those that only their members call for have no number: there is no order among them.
        """
        if not new.members:
            self.made.clear()
        elif str(new.name).isdecimal():
            of_mesh = str(new.called or "").startswith("mesh_")
            made = model.GroupMade(int(new.name), tuple(new.members), group_name(new.called), path)
            self.made.append(replace(made, of_mesh=of_mesh))

    def keep(self, group: Any, new: NewGroup) -> None:
        """`new_group` made `group`, with `new`."""
        self._known[:] = [subgroup for subgroup in self._known if subgroup.group() is not None]
        self._known.append(_Subgroup(weakref.ref(group), new))

    def make_again(self, store: dist.Store, rank: int, world_size: int) -> str:
        """Make the lost groups again that every member still has; says which, empty for none.

        All ranks call it, with the same store, when the default group is new. What a member has
        no more (its process is new, or nothing there holds the group) is named and not made.
        """
        lost: dict[_Key, tuple[Any, NewGroup]] = {}
        seen: Counter[tuple[str, Ranks]] = Counter()
        for subgroup in self._lost:
            if (group := subgroup.group()) is not None:
                named = str(subgroup.new.name), tuple(subgroup.new.members)
                lost[*named, seen[named]] = group, subgroup.new
                seen[named] += 1
        self._lost.clear()
        self.made_again.clear()
        store.set(f"kept/{rank}", json.dumps(sorted(lost)))
        kept = [json.loads(store.get(f"kept/{peer}")) for peer in range(world_size)]
        of_rank = [{(name, tuple(members), at) for name, members, at in keys} for keys in kept]
        # Every rank goes through them in the same order, as torch wants it, member or not.
        texts = []
        for key in sorted(set[_Key]().union(*of_rank)):
            members = key[1]
            without = tuple(member for member in members if key not in of_rank[member])
            if without:
                texts.append(
                    f"no group of {name_ranks(members)} ({name_ranks(without)} lost it: new_group)"
                )
                continue
            if key in lost:
                group, before = lost[key]
                made: Any = dist.new_group(members, timeout=before.timeout, backend=before.backend)
                group.ddp_notebook_become(made)
                self.made_again.add(group)
                # The last one is `made`, which `new_group` has just added. It is let go: what the
                # user holds is known by the object that became it.
                self._known[-1] = _Subgroup(weakref.ref(group), self._known[-1].new)
            else:  # this rank is no member
                dist.new_group(members)
            texts.append(f"group of {name_ranks(members)} made again")
        return " · ".join(texts)
