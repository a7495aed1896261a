"""The first evaluations of a replica, and the random numbers drawn before its training forwards.

An evaluation is a sequence of forwards without gradients, between two backwards.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddp_notebook import model
from ddp_notebook.model import Place
from ddp_notebook.rank.collectives.call_sites import CallSites, Line, place_of
from ddp_notebook.rank.training.samplers import Source, hash_of, samples_in

_EVALUATIONS, _INPUTS, _STARTS = 8, 2, 8
_FEW_SUMS, _FEWEST_SAMPLES, _SUMS = 16, 2, 4
DROPOUTS = (
    *(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d),
    *(torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout),
)
_STATISTICS, _STATISTICS_BYTES, _WEIGHTS = 64, 2**20, 16


class Evaluation:
    """One sequence of forwards without gradients."""

    def __init__(self, backwards: int, module: torch.nn.Module, call_sites: CallSites) -> None:
        self._call_sites = call_sites
        self.backwards = backwards
        self.training = module.training
        self.line = call_sites.users_line()
        self.statistics = _statistics(module)
        self.weights = _weights(module) if self.statistics else ""
        self.forwards = 0
        self.source: Source | None = None
        self.inputs: list[str] = []
        self.written = 0
        self.wrote: bool | None = None
        self.over = False
        self.padded: tuple[int, int] | None = None
        self.counted: tuple[Line, ...] = ()
        self.samples = 0
        self.sums: list[tuple[Line, ...]] = []
        self._rows: dict[tuple[Line, ...], int] = {}

    def summed(self, tensors: Any) -> None:
        """Note whether values that are about to be summed over the ranks hold the padded count."""
        few = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        if len(self.sums) < _SUMS and sum(tensor.numel() for tensor in few) <= _FEW_SUMS:
            self.sums.append(self._call_sites.users_path(sys._getframe(1)))
        padding = _padding(self.source) if self.source is not None else None
        if padding is not None and any(padding[1] in _few_values(tensor) for tensor in tensors):
            self.padded = padding
            self.counted = self._call_sites.users_path(sys._getframe(1))

    def gathered(self, tensors: Any) -> None:
        """Add up how many rows of what each line gathers from all ranks are this rank's."""
        padding = _padding(self.source) if self.source is not None else None
        first = tensors[0]
        of_rows = padding is not None and first.dim() and first.dtype is not torch.uint8
        rows = first.shape[0] if of_rows else 0  # objects are gathered as bytes
        path = self._call_sites.users_path(sys._getframe(1)) if rows else ()
        if path in self._rows or len(self._rows) < _SUMS:
            self._rows[path] = self._rows.get(path, 0) + rows

    @property
    def joined(self) -> bool:
        """Something that it may have come to was summed up over the ranks, or gathered."""
        return bool(self.sums or any(self._rows.values()))

    def _gathered_all(self) -> tuple[tuple[int, int] | None, tuple[Line, ...]]:
        """The padding, and the line that gathered a row for each of this rank's samples.

        Or several: of the predictions, and of the labels.
        """
        padding = _padding(self.source) if self.source is not None else None
        rows = self._rows.items() if padding is not None else ()
        path = next((path for path, n in rows if n and padding and not n % padding[1]), ())
        return (padding, path) if path else (None, ())

    def facts(self) -> model.EvaluationFacts:
        """As facts for a report."""
        padded, gathered = self._gathered_all()
        return model.EvaluationFacts(
            self.backwards,
            self.forwards,
            self.training,
            self.source is not None,
            tuple(self.inputs),
            self.statistics,
            self.wrote,
            place_of(self.line),
            self.padded or padded,
            tuple(Place(*each) for each in self.counted),
            self.samples,
            tuple(tuple(Place(*each) for each in path) for path in self.sums),
            tuple(Place(*each) for each in gathered),
            self.weights,
        )


JOINS: Mapping[str, Callable[[Evaluation, Any], None]] = {
    "allreduce": lambda evaluation, args: evaluation.summed(args[0]),
    "allgather": lambda evaluation, args: evaluation.gathered(args[1]),
    "_allgather_base": lambda evaluation, args: evaluation.gathered(args[1:2]),
}
"""What is noted of a collective that follows an evaluation, by the name of torch's method."""


def _padding(source: Source) -> tuple[int, int] | None:
    """The size of a data set, and the number of samples of each rank, if some occur twice."""
    seen = source.seen
    length, replicas = seen.get("length", 0), seen.get("num_replicas", 0)
    if source.trained or not replicas or seen["drop_last"] or not length % replicas:
        return None
    got = -(-length // replicas)
    return (length, got) if got >= _FEWEST_SAMPLES else None


def _few_values(tensor: Any) -> list[float]:
    """The values of a small tensor on a CPU (sums, counts); empty for other tensors."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    few = plain and tensor.is_cpu and tensor.numel() <= _FEW_SUMS
    values: list[float] = tensor.reshape(-1).tolist() if few else []
    return values


class Moments:
    """What is recorded of one replica: its evaluations, and the random numbers of its forwards."""

    def __init__(self, call_sites: CallSites) -> None:
        self._call_sites = call_sites
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.evaluations: list[Evaluation] = []
        self.starts: list[model.StepStart] = []
        self.start_line: Line | None = None
        self.autocast = ""
        self._evaluation: Evaluation | None = None
        self._random = ""
        self._loads = 0

    def evaluates(
        self, module: torch.nn.Module, inputs: Any, backwards: int, source: Source | None
    ) -> Evaluation | None:
        """A forward without gradients begins; its batches may come from `source`."""
        current = self._evaluation
        if current is None:
            if len(self.evaluations) >= _EVALUATIONS:
                return None
            current = Evaluation(backwards, module, self._call_sites)
            current.written = _printed() or 0
            self._evaluation = current
            self.evaluations.append(current)
        current.forwards += 1
        current.source = source
        current.samples += samples_in(inputs)
        if len(current.inputs) < _INPUTS:
            current.inputs.append(hash_of(inputs))
        return current

    def trains(self, module: torch.nn.Module, inputs: Any, loads: int) -> None:
        """A forward with gradients begins; `loads` counts the loaders iterated so far."""
        if len(self.starts) >= _STARTS:
            return
        if self.start_line is None:
            self.start_line = self._call_sites.users_line()
            self.autocast = _autocast()
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
        current, self._evaluation = self._evaluation, None
        if current is not None:
            self._end(current)

    def _end(self, evaluation: Evaluation) -> None:
        written = _printed()
        evaluation.wrote = None if written is None else written > evaluation.written
        if evaluation.source is not None and evaluation.source.trained:
            evaluation.source = None

    def evaluation_facts(self) -> tuple[model.EvaluationFacts, ...]:
        """The first evaluations, the last one in its present state."""
        return tuple(evaluation.facts() for evaluation in list(self.evaluations))


def _printed() -> int | None:
    """How many characters were printed so far; None if unknown."""
    count = getattr(sys.stdout, "printed", None)
    return count() if callable(count) else None


def _autocast() -> str:
    """The dtype of torch.autocast, on a CPU or a GPU; "" where it is off."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


def drops_out(layer: torch.nn.Module) -> bool:
    """True of a layer that drops values at random in training mode."""
    if isinstance(layer, DROPOUTS):
        return layer.p > 0
    if isinstance(layer, torch.nn.RNNBase):
        return layer.num_layers > 1 and layer.dropout > 0
    return isinstance(layer, torch.nn.MultiheadAttention) and layer.dropout > 0


def random_state() -> str:
    """A hash of the state of torch's generator."""
    return f"{zlib.crc32(torch.get_rng_state().numpy().data):08x}"


def _weights(module: torch.nn.Module) -> str:
    """A hash of some values of each parameter; "" if one cannot be read."""
    hashed = 0
    for tensor in module.parameters():
        if type(tensor) is not torch.nn.Parameter or not tensor.is_cpu or tensor.is_meta:
            return ""
        some = tensor.detach().reshape(-1)[:_WEIGHTS].contiguous().view(torch.uint8)
        hashed = zlib.crc32(some.numpy().data, hashed)
    return f"{hashed:08x}"


def _statistics(module: torch.nn.Module) -> str:
    """A hash of the running statistics of batch norms; "" if there are none, or too many."""
    hashed, seen, size = 0, 0, 0
    for part in module.modules():
        for name in ("running_mean", "running_var"):
            tensor = getattr(part, name, None)
            if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu:
                continue
            seen += 1
            size += tensor.numel() * tensor.element_size()
            if seen > _STATISTICS or size > _STATISTICS_BYTES:
                return ""
            hashed = zlib.crc32(tensor.detach().contiguous().numpy().data, hashed)
    return f"{hashed:08x}" if seen else ""
