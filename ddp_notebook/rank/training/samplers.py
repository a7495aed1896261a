"""What the batches of this rank come from: DistributedSamplers, and loaders without one."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ddp_notebook import model
from ddp_notebook.rank.collectives.call_sites import CallSites, Line, place_of

_MOST = 32
_EPOCHS = 32
_INPUTS = 4
_HASHED_BYTES, _MOST_TENSORS = 2**20, 8


class Source:
    """A sampler or a loader that was iterated in this run."""

    def __init__(self, owner: Any, line: Line | None) -> None:
        self.ref = weakref.ref(owner)
        self.line = line
        self.seen: dict[str, Any] = {}
        """Its settings when it was last iterated."""
        self.epoch = 0
        self.epochs: list[int] = []
        self.epochs_set = 0
        self.trained = False
        """A backward has run since it was last iterated."""
        self.inputs: list[str] = []


class Samplers:
    """All samplers and loaders of this run."""

    def __init__(self, call_sites: CallSites) -> None:
        self._call_sites = call_sites
        self.samplers: dict[int, Source] = {}
        self.loaders: dict[int, Source] = {}
        self.current: Source | None = None
        """The loader or sampler that is being iterated."""
        self.iterations = 0
        """How often any loader, or any sampler, was iterated."""

    def begin(self) -> None:
        """Forget what the last run iterated."""
        self.samplers.clear()
        self.loaders.clear()
        self.current = None

    def _of(self, sources: dict[int, Source], owner: Any) -> Source | None:
        known = sources.get(id(owner))
        if known is not None and known.ref() is owner:
            return known
        # One that is gone and was of use keeps its facts, under a number no object has.
        if known is not None:
            sources[-len(sources) - 1] = known
        if len(sources) >= _MOST:
            return None
        source = sources[id(owner)] = Source(owner, self._call_sites.users_line())
        return source

    def sampled(self, sampler: DistributedSampler[Any]) -> None:
        """A DistributedSampler is iterated."""
        self.iterations += 1
        source = self._of(self.samplers, sampler)
        if source is None:
            return
        source.seen = {
            "length": _length(sampler.dataset),
            "num_replicas": int(sampler.num_replicas),
            "rank": int(sampler.rank),
            "shuffle": bool(sampler.shuffle),
            "seed": int(sampler.seed),
            "drop_last": bool(sampler.drop_last),
        }
        source.epoch = int(sampler.epoch)
        source.trained = False
        self.current = source

    def epoch_set(self, sampler: DistributedSampler[Any]) -> None:
        """`set_epoch` of a DistributedSampler was called."""
        source = self._of(self.samplers, sampler)
        if source is not None:
            source.epochs_set += 1

    def loaded(self, loader: DataLoader[Any]) -> None:
        """A DataLoader is iterated."""
        self.iterations += 1
        batches = getattr(loader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
        plain = isinstance(
            sampler, torch.utils.data.SequentialSampler | torch.utils.data.RandomSampler
        )
        stream = isinstance(loader.dataset, IterableDataset)
        if not (plain or stream):
            return
        source = self._of(self.loaders, loader)
        if source is None:
            return
        source.seen = {
            "length": 0 if stream else _length(loader.dataset),
            "sampler": "" if stream else type(sampler).__name__,
            "stream": type(loader.dataset).__name__ if stream else "",
        }
        source.trained = False
        self.current = source

    def forward(self, inputs: Any) -> None:
        """A DDP object gets `inputs`; the first ones from a loader are kept as hashes."""
        source = self.current
        if source is None or len(source.inputs) >= _INPUTS or "sampler" not in source.seen:
            return
        source.inputs.append(hash_of(inputs))

    def backward(self) -> None:
        """A backward begins: the loader that is being iterated is trained on."""
        source = self.current
        if source is None or source.trained:
            return
        source.trained = True
        if "sampler" not in source.seen and len(source.epochs) < _EPOCHS:
            source.epochs.append(source.epoch)

    def sampler_facts(self) -> tuple[model.SamplerFacts, ...]:
        """The samplers with which a model was trained."""
        used = [source for source in self.samplers.values() if source.epochs]
        return tuple(
            model.SamplerFacts(
                key=str(number),
                **source.seen,
                epochs=tuple(source.epochs),
                epochs_set=source.epochs_set,
                place=place_of(source.line),
            )
            for number, source in enumerate(used)
        )

    def loader_facts(self) -> tuple[model.LoaderFacts, ...]:
        """The loaders whose batches trained a model."""
        used = [source for source in self.loaders.values() if source.inputs and source.trained]
        return tuple(
            model.LoaderFacts(
                key=str(number),
                **source.seen,
                inputs=tuple(source.inputs),
                place=place_of(source.line),
            )
            for number, source in enumerate(used)
        )


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


def hash_of(inputs: Any) -> str:
    """A hash of all tensors in a model's inputs; "" if one cannot be read, or without any."""
    tensors = list(itertools.islice(tensors_in(inputs), _MOST_TENSORS + 1))
    if not tensors or len(tensors) > _MOST_TENSORS:
        return ""
    hashed = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or size > _HASHED_BYTES:
            return ""
        if size:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            hashed = zlib.crc32(flat.numpy().data, hashed)
    return f"{hashed:08x}"


def samples_in(inputs: Any) -> int:
    """The first dimension of the first tensor in a model's inputs; 0 without one."""
    first = next(tensors_in(inputs), None)
    return first.shape[0] if first is not None and first.dim() else 0


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, in its dicts, tuples and lists too, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
