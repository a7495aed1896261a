"""The inputs of this rank's models: from which samplers and loaders, by hash, in which state.

They are those of the first training forwards, and of the first evaluations: sequences of forwards
without gradients, between two backwards. Equal inputs have equal hashes on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from ddp_notebook import model
from ddp_notebook.rank.collectives.call_sites import CallSites

_MOST_ITEMS = 100_000
_HASHED_BYTES, _MOST_TENSORS = 2**20, 8


class Source:
    """A sampler or a loader that was iterated in this run."""

    def __init__(self, owner: Any, line: model.Place | None) -> None:
        self.ref = weakref.ref(owner)
        self.line = line
        self.seen: dict[str, Any] = {}
        """Its settings when it was last iterated."""
        self.complete = False
        """No more inputs are kept: a stream may give its second epoch's to other ranks."""
        self.data = "", ""
        """The result of `order_of` for the data set, when it was first iterated."""
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
        if len(sources) >= 32:
            return None
        source = sources[id(owner)] = Source(owner, self._call_sites.users_line())
        return source

    def sampled(self, sampler: DistributedSampler[Any]) -> None:
        """A DistributedSampler is iterated."""
        self.iterations += 1
        source = self._of(self.samplers, sampler)
        if source is None:
            return
        if not source.seen:
            with contextlib.suppress(Exception):  # it is the user's, and may be anything
                source.data = order_of(sampler.dataset)
        source.seen = {
            "length": _length(sampler.dataset),
            "data": source.data[0],
            "order": source.data[1],
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
        # Who gives it a DistributedSampler divides the data, and is judged by that: `sampled`.
        batches = getattr(loader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return
        if batches is not None and type(batches) is not BatchSampler:
            sampler = batches  # of the user's own
        source = self._of(self.loaders, loader)
        if source is None:
            return
        if isinstance(loader.dataset, IterableDataset):
            source.seen = {"sampler": "", "stream": type(loader.dataset).__name__}
            source.complete = source.complete or bool(source.inputs)
        else:
            length = _length(loader.dataset)
            source.seen = {"length": length, "sampler": type(sampler).__name__}
        source.trained = False
        self.current = source

    def forward(self, inputs: Any) -> None:
        """A model gets `inputs`; the first ones from a loader are kept as hashes."""
        source = self.current
        if source is not None and "sampler" in source.seen and not source.complete:
            source.inputs.append(hash_of(inputs))
            source.complete = len(source.inputs) >= 8

    def backward(self) -> None:
        """A backward begins: the loader that is being iterated is trained on."""
        # Only once for each iteration. Which loader a batch came from is not known, so that of the
        # loader which was iterated last is taken: an evaluation in between begins its own.
        source = self.current
        if source is None or source.trained:
            return
        source.trained = True
        if "sampler" not in source.seen and len(source.epochs) < 32:
            source.epochs.append(source.epoch)

    def sampler_facts(self) -> tuple[model.SamplerFacts, ...]:
        """The samplers with which a model was trained."""
        used = [source for source in self.samplers.values() if source.epochs]
        return tuple(
            model.SamplerFacts(
                str(number),
                **source.seen,
                epochs=tuple(source.epochs),
                epochs_set=source.epochs_set,
                place=source.line,
            )
            for number, source in enumerate(used)
        )

    def loader_facts(self) -> tuple[model.LoaderFacts, ...]:
        """The loaders whose batches trained a model."""
        used = [source for source in self.loaders.values() if source.inputs and source.trained]
        return tuple(
            model.LoaderFacts(
                str(number), **source.seen, inputs=tuple(source.inputs), place=source.line
            )
            for number, source in enumerate(used)
        )


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # also of a tensor without dimensions
        return 0


def order_of(dataset: Any, nested: int = 3) -> tuple[str, str]:
    """A hash of what a data set has, in whatever order, and one of its order; "" where unknown.

    Of the lists and tensors that are as long as it is: an order for each of them. Of a Subset, what
    that is a part of, and behind a bar by which indices. Of one that transforms the samples of
    another, and that may do the same, what that has.
    """
    if isinstance(dataset, Subset):
        data, order = order_of(dataset.dataset, nested)
        indices = array("q", itertools.islice(dataset.indices, _MOST_ITEMS + 1))
        known = data and len(indices) <= _MOST_ITEMS
        return data, f"{order}|{zlib.crc32(indices.tobytes()):08x}" if known else ""
    length = _length(dataset)
    if not 0 < length <= _MOST_ITEMS:
        return "", ""
    attributes = (*getattr(dataset, "__dict__", {}).values(),)
    columns: tuple[Any, ...] = attributes
    if isinstance(dataset, TensorDataset):
        columns = dataset.tensors
    elif isinstance(dataset, list | tuple):
        columns = (dataset,)
    hashed = [
        hashes
        for column in columns
        if isinstance(column, list | tuple | torch.Tensor) and _length(column) == length
        if (hashes := _hashes(column))
    ]
    inner = [e for e in attributes if isinstance(e, Dataset) and _length(e) == length]
    if not hashed and len(inner) == 1 and nested:
        return order_of(inner[0], nested - 1)
    # The sums do not depend on the order. Of a column whose items are all alike there is none.
    sums = " ".join(f"{sum(hashes):x}" for hashes in hashed)
    varied = (array("Q", hashes).tobytes() for hashes in hashed if len(set(hashes)) > 1)
    in_order = " ".join(f"{zlib.crc32(text):08x}" for text in varied)
    return (f"{length}: {sums}", in_order) if in_order else ("", "")


def _hashes(column: Any) -> list[int]:
    """A hash of each item of a column of data, or of some of a large one; none of other items."""
    if not isinstance(column, torch.Tensor):
        texts = [text for item in column if (text := _text(item)) is not None]
        same = len(texts) == len(column)
        return [zlib.crc32(text.encode(errors="replace")) for text in texts] if same else []
    if type(column) is not torch.Tensor or column.device.type != "cpu":
        return []
    large = column.numel() * column.element_size() > _HASHED_BYTES
    rows = column.detach()[:: max(1, len(column) // 64) if large else 1]
    flat = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)
    return [zlib.crc32(row.data) for row in flat.numpy()]


def _text(item: object) -> str | None:
    """A text that stands for a plain value, in any process; None of another value."""
    if item is None or isinstance(item, str | int | float | bytes | PurePath):
        return repr(item)
    if isinstance(item, tuple | list) and len(item) <= _MOST_TENSORS:
        parts = [part for each in item if (part := _text(each)) is not None]
        return ",".join(parts) if len(parts) == len(item) else None
    return hash_of(item) or None if isinstance(item, torch.Tensor) else None


def hash_of(inputs: Any) -> str:
    """A hash of all tensors in a model's inputs; "" if one cannot be read, or without any."""
    # None of a tensor on a device, which would wait for that, and none of a part: a hash of the
    # first tensors alone might be equal on ranks whose other tensors differ.
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


# -- evaluations, and the random numbers before training forwards --------------------------

_STARTS = 8
_DROPOUTS = (
    *(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d),
    *(torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout),
)


class Moments:
    """The records of one replica: its evaluations, and the random numbers of its forwards."""

    def __init__(self, call_sites: CallSites) -> None:
        self._users_line = call_sites.users_line
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.evaluations: list[model.EvaluationFacts] = []
        """The first ones: sequences of forwards without gradients."""
        self.starts: list[model.StepStart] = []
        self.start_place: model.Place | None = None
        self.autocast = ""
        self.evaluating: int | None = None
        """While an evaluation is under way: how many characters were printed before it."""
        self._source: Source | None = None
        self._random = ""
        self._loads = 0

    def evaluates(
        self, module: torch.nn.Module, inputs: Any, backwards: int, source: Source | None
    ) -> None:
        """A forward without gradients begins; its batches may come from `source`."""
        known = self.evaluations
        if self.evaluating is None:
            if len(known) >= 8:
                return
            self.evaluating = _printed() or 0
            statistics, line = _statistics(module), self._users_line()
            known.append(
                model.EvaluationFacts(backwards, module.training, statistics=statistics, place=line)
            )
        self._source = source
        now, loader = known[-1], source is not None
        if len(now.inputs) < 2:
            known[-1] = replace(now, loader=loader, inputs=(*now.inputs, hash_of(inputs)))
        elif now.loader is not loader:
            known[-1] = replace(now, loader=loader)

    def trains(self, inputs: Any, loads: int) -> None:
        """A forward with gradients begins; `loads` counts the loaders iterated so far."""
        # Did the user's code draw random numbers since the last step? A DataLoader that begins
        # draws the seed of its workers, and that is none of the user's.
        if len(self.starts) >= _STARTS:
            return
        if self.start_place is None:
            self.start_place = self._users_line()
            on = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
            dtypes = (str(torch.get_autocast_dtype(device)) for device in on)
            self.autocast = next(dtypes, "").removeprefix("torch.")
        random = random_state()
        drew = bool(self._random) and random != self._random and loads == self._loads
        self.starts.append(model.StepStart(random, drew, hash_of(inputs)))
        self._random = ""

    def stepped(self, loads: int) -> None:
        """A training step is over."""
        if len(self.starts) < _STARTS:
            self._random, self._loads = random_state(), loads

    def backward(self) -> None:
        """A backward begins, or the run is over: this ends an evaluation.

        Its batches may be those that are trained on.
        """
        # Forwards without gradients on a batch that is trained on next belong to the training: a
        # target network's, a teacher's. That shows only now, by the loader.
        before, self.evaluating = self.evaluating, None
        if before is not None:
            written, source = _printed(), self._source
            self.evaluations[-1] = replace(
                self.evaluations[-1],
                loader=source is not None and not source.trained,
                wrote=None if written is None else written > before,
            )


def _printed() -> int | None:
    """How many characters were printed so far; None if unknown."""
    count = getattr(sys.stdout, "printed", None)
    return count() if callable(count) else None


def drops_out(layer: torch.nn.Module) -> bool:
    """True of a layer that drops values at random in training mode."""
    if isinstance(layer, _DROPOUTS):
        return layer.p > 0
    if isinstance(layer, torch.nn.RNNBase):
        return layer.num_layers > 1 and layer.dropout > 0
    return isinstance(layer, torch.nn.MultiheadAttention) and layer.dropout > 0


def random_state() -> str:
    """A hash of the state of torch's generator."""
    return f"{zlib.crc32(torch.get_rng_state().numpy().data):08x}"


def _statistics(module: torch.nn.Module) -> str:
    """Return a hash of the running statistics of batch norms; "" without any, or of too many."""
    hashed, seen, size = 0, 0, 0
    for part in module.modules():
        for name in ("running_mean", "running_var"):
            tensor = getattr(part, name, None)
            if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu:
                continue
            seen += 1
            size += tensor.numel() * tensor.element_size()
            if seen > 64 or size > 2**20:
                return ""
            hashed = zlib.crc32(tensor.detach().contiguous().numpy().data, hashed)
    return f"{hashed:08x}" if seen else ""
