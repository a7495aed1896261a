"""A rank's trail: a compact record of what it computed in each training step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_notebook.model import codec
from ddp_notebook.model.collectives import Place

WIDTH = 16
"""Numbers per sketch. A tensor with at most this many values is kept exactly."""
STAGES = ("start", "backward", "gradient", "update")
"""What is sketched of a parameter in each step: its values at the beginning, its gradient after the
last backward and as the optimizer uses it, and its values afterwards."""

_Batches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TrailOrder:
    """How a rank keeps its trail: in `folder`, under `name`.

    `feed`: the names of other trails, whose joined batches replace its own, with the learning rates
    of the first. `turned`: the last rank's samples come first.
    """

    folder: str
    name: str
    feed: tuple[str, ...] = ()
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an optimizer. `epsilon` is its dtype's machine epsilon."""

    name: str
    numel: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A step of an optimizer; `samples` has a number for each sample since the last step.

    `loss` is the mean of the tensors that `backward` was called on, None if one is not a scalar.
    """

    optimizer: int
    samples: tuple[float, ...]
    rates: tuple[float, ...]
    loss: float | None
    place: Place | None
    backward: Place | None


@dataclass(frozen=True, slots=True)
class Loading:
    """The indices that a batch sampler returned: for each iteration, batch by batch.

    `length` is its number of batches and `samples` that of what it gives indices of, None where
    it does not know.
    """

    iterations: tuple[_Batches, ...]
    length: int | None
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class Trail:
    """The trail of one rank, without its sketches.

    `optimizers` are the parameters of each. `dropout` and `batch_norm` are layers of these kinds
    that were trained; `sharded` is True where parameters are parts of tensors. `rates_given`: the
    learning rates were not its own. `cut`: there was no room for further steps.
    """

    optimizers: tuple[tuple[Parameter, ...], ...]
    steps: tuple[TrainingStep, ...]
    loadings: tuple[Loading, ...]
    dropout: tuple[str, ...] = ()
    batch_norm: tuple[str, ...] = ()
    sharded: bool = False
    rates_given: bool = False
    cut: bool = False
    problem: str = ""


class Sketches:
    """The sketches of a trail: of each step, stage and parameter `WIDTH` numbers.

    They are sums over the tensor with random signs, the same in each run: the squared distance of
    two sketches is on average that of the tensors.
    """

    def __init__(self, trail: Trail, numbers: Sequence[float]) -> None:
        self._numbers = numbers
        self._begins: list[int] = []
        begin = 0
        for step in trail.steps:
            self._begins.append(begin)
            begin += len(trail.optimizers[step.optimizer]) * len(STAGES) * WIDTH
        self._sizes = [len(trail.optimizers[step.optimizer]) for step in trail.steps]

    def of(self, step: int, stage: int, parameter: int) -> Sequence[float]:
        """One sketch."""
        begin = self._begins[step] + (stage * self._sizes[step] + parameter) * WIDTH
        return self._numbers[begin : begin + WIDTH]


def norm(sketch: Sequence[float]) -> float:
    """The approximate 2-norm of the tensor."""
    return math.sqrt(sum(value * value for value in sketch))


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The approximate 2-norm of the difference of two tensors; NaN if one is not finite."""
    if one == other:
        return 0.0
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def write(folder: Path, name: str, trail: Trail, sketches: array[float]) -> None:
    """Save a trail. Raises OSError."""
    with (folder / f"{name}.sketches").open("wb") as file:
        sketches.tofile(file)
    (folder / f"{name}.json").write_text(codec.dumps(codec.encode(trail)))


def read(folder: Path, name: str) -> tuple[Trail, Sketches] | None:
    """A saved trail; None without one."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    trail = codec.decode(Trail, codec.loads(path.read_text()))
    numbers = array("d")
    numbers.frombytes((folder / f"{name}.sketches").read_bytes())
    return trail, Sketches(trail, numbers)


def read_all(folder: Path, names: Sequence[str]) -> Mapping[str, tuple[Trail, Sketches]]:
    """Those of these trails that were saved."""
    trails = {name: read(folder, name) for name in names}
    return {name: trail for name, trail in trails.items() if trail is not None}
