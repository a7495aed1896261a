"""What must be the same on ranks that share a model, in its first training steps."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.model.collectives import Place
from ddp_notebook.model.parallel.digests import TensorDigest
from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Claim:
    """A tensor that DTensor was told to be the same on all of `ranks`: Replicate, in from_local.

    `backwards` is how many backwards this rank had begun.
    """

    backwards: int
    ranks: Ranks
    tensor: TensorDigest
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """A trained parameter of a model with DTensors, which all of `ranks` have, none a part of it.

    `declared`: as a DTensor it is Replicate there; otherwise nothing but the plan says so. `begin`
    is what it was before the first step, `end` at the end, or after one of the first steps.
    """

    name: str
    ranks: Ranks
    declared: bool
    begin: TensorDigest
    end: TensorDigest
    dimension: str = ""
    """The name of the mesh's dimension along which they have it; empty where it has none."""


@dataclass(frozen=True, slots=True)
class Input:
    """A hash of what a model got in a training forward, after so many backwards; "" if unread.

    `random` is a hash of torch's generator then; "" where unknown.
    """

    backwards: int
    hash: str
    random: str = ""


@dataclass(frozen=True, slots=True)
class Forwards:
    """The first training forwards of a model during which ranks communicate."""

    key: str
    inputs: tuple[Input, ...] = ()
    place: Place | None = None
    drops: bool = False
    """It has layers that drop values at random."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Partial results that a function of the user's own (torch.autograd.Function) sums up.

    Over the activations of a forward, or their gradients in a backward.
    """

    ranks: Ranks
    backward: bool = False
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class ShardSum:
    """Gradients of a sharded parameter, of which `ranks` have other parts, that were summed."""

    name: str
    ranks: Ranks
    dimension: str = ""
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class CheckpointCall:
    """A checkpoint of torch.distributed.checkpoint, of all `ranks`: where this rank writes it."""

    path: str
    ranks: Ranks
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """What one rank knows of models that are split over ranks; `losses` are those of backwards."""

    claims: tuple[Claim, ...] = ()
    copies: tuple[Copy, ...] = ()
    forwards: tuple[Forwards, ...] = ()
    sums: tuple[PartialSum, ...] = ()
    shard_sums: tuple[ShardSum, ...] = ()
    checkpoints: tuple[CheckpointCall, ...] = ()
    losses: tuple[float, ...] = ()
    data_ranks: Ranks = ()
    """Ranks that FSDP2 shards its models over: each must train on samples of its own."""
