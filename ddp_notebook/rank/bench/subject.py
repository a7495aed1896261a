"""The model whose steps are timed, what it is fed with, and its loss.

The model is one that ships, or a copy of the user's. Samples and loss are the user's, or random
inputs in the shape that the model's first layer takes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_TOKENS, _WIDTH = 16, 256
_FEATURES = 256
_CLASSES = 10
_TRY = 2
"""The batch size of a trial."""
_LENGTHS = (32, 64, 256)

Batch: TypeAlias = tuple[Any, Any]
"""Inputs and target (or None). Inputs are a tensor, a tuple or list of positional arguments, or a
dict of keyword arguments."""
MakeBatch: TypeAlias = Callable[[int], Batch]


class Unusable(Exception):
    """The user's model, loss or data cannot be used; `str()` says why and what to type.

    If the user's code raised, its exception is the `__cause__`.
    """


@contextlib.contextmanager
def users_code(text: str = "{}") -> Iterator[None]:
    """Within, the user's code runs. An exception becomes Unusable, with it in `text`."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(text.format(on_a_line(error))) from error


def on_a_line(error: BaseException) -> str:
    """Return an error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


# -- the model ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model that nothing else uses, and the options of the user's own DDP object."""

    module: nn.Module
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `DistributedDataParallel`."""

    @property
    def device(self) -> torch.device:
        """The device of its first parameter."""
        return next(self.module.parameters()).device

    @property
    def reduced(self) -> list[nn.Parameter]:
        """The parameters whose gradients DDP reduces."""
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.reduced)


SHIPPED = ("cnn", "mlp", "transformer")
_OPTIONS = "find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph"
"""Options of the user's DDP object that are taken over as they are."""


def _shipped(name: str) -> nn.Module:
    """A model that ships: what it computes for each parameter differs, and how many it has."""
    if name == "transformer":  # one block of an encoder: 0.8 million, much computation for each
        return nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
    if name == "mlp":  # four linear layers: 2.4 million, little computation for each
        widths = (_FEATURES, 1024, 1024, 1024, _CLASSES)
        layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])
    return nn.Sequential(  # a small convolutional network for 8 x 8 images: 0.5 million
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, _CLASSES),
    )


def prepare(name: str, names: Mapping[str, Any], device: str) -> Subject:
    """A copy of the model `name` of the user's `names`, or a model that ships; it may be changed.

    Raises Unusable.
    """
    if name not in names:
        if name in SHIPPED:
            torch.manual_seed(0)
            return Subject(_shipped(name).to(device).train(), name)
        raise Unusable(
            f"this rank has no variable {name!r}, and no model of that name ships "
            f"({', '.join(SHIPPED)})"
        )
    value, title = names[name], name
    if not isinstance(value, nn.Module):
        if not callable(value):
            raise Unusable(
                f"{name} is of type {type(value).__name__}; expected a torch module, or a function "
                "without arguments that makes one"
            )
        title = f"{name}()"
        with users_code(f"{title} raised {{}}"):
            value = value()
        if not isinstance(value, nn.Module):
            raise Unusable(f"{title} gave a {type(value).__name__}, not a torch module")
    options: dict[str, Any] = {}
    if isinstance(value, DistributedDataParallel):
        # Its bucket size, too, if one was given.
        options = {option: getattr(value, option) for option in _OPTIONS if hasattr(value, option)}
        if not getattr(value, "bucket_bytes_cap_default", True):
            options["bucket_cap_mb"] = value.bucket_bytes_cap / 2**20
        value = value.module
    _check_trainable(name, value)
    if title == name:
        with users_code(
            f"{name} cannot be copied, and the model itself is not to be changed: {{}}. "
            f"Give a function that makes it: --model make_{name}"
        ):
            value = copy.deepcopy(value)
        value.zero_grad(set_to_none=True)
    return Subject(value.train(), title, options)


def _check_trainable(name: str, module: nn.Module) -> None:
    """Raises Unusable for a module that DDP could not wrap."""
    for part, tensor in module.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise Unusable(f"{name}.{part} has no shape yet: run a forward first")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise Unusable(f"no parameter of {name} requires a gradient, so there is nothing to reduce")


# -- what it is fed with -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """Batches of any size for one model, and the loss. `text` describes them."""

    batch: MakeBatch
    loss: Callable[[Any, Any], torch.Tensor]
    """A function of the model's output and the target."""
    text: str

    def run(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of `model` on a batch: the forward."""
        inputs, target = batch
        if isinstance(inputs, dict):
            return self.loss(model(**inputs), target)
        if isinstance(inputs, tuple | list):
            return self.loss(model(*inputs), target)
        return self.loss(model(inputs), target)


def feed(subject: Subject, loss: str, data: str, names: Mapping[str, Any]) -> Feed:
    """The input data and loss of `subject`. `loss` and `data` are variables of `names`, or empty.

    Raises Unusable, with what to type, if they cannot be found out.
    """
    for option, name in (("--loss", loss), ("--data", data)):
        if name and name not in names:
            raise Unusable(f"this rank has no variable {name!r} ({option} {name})")
    if loss and not callable(names[loss]):
        raise Unusable(f"--loss {loss}: it is a {type(names[loss]).__name__}, not a function")
    shipped = subject.title if subject.title in SHIPPED and subject.title not in names else ""
    if data:
        batch, text = _users(names[data], data, subject.device), f"data {data}"
    elif shipped:
        batch, text = _for_shipped(shipped, subject.device)
    else:
        batch, text = _guessed(subject)
    if loss:
        return _with_loss(subject, batch, names[loss], f"{text}, loss {loss}")
    if shipped in ("cnn", "mlp") and not data:
        return Feed(batch, nn.functional.cross_entropy, f"{text}, cross entropy")
    return Feed(batch, _mean_square, f"{text}, mean square of the output")


def _mean_square(output: Any, _: Any) -> torch.Tensor:
    """Return a loss for any model: its own if its output has one, else the mean of the squares."""
    for own in (getattr(output, "loss", None), output):
        if isinstance(own, torch.Tensor) and own.is_floating_point():
            return own if own.dim() == 0 else own.float().pow(2).mean()
    parts = output.values() if isinstance(output, Mapping) else output
    if isinstance(parts, str | bytes) or not hasattr(parts, "__iter__"):
        raise Unusable(f"its output is a {type(output).__name__}: give a loss with --loss")
    return _mean_square(next(iter(parts)), None)


def _for_shipped(name: str, device: torch.device) -> tuple[MakeBatch, str]:
    """Batches for a model that ships: scikit-learn's digits for the cnn, else random ones."""
    if name == "transformer":
        shape: tuple[int, ...] = (_TOKENS, _WIDTH)
        return _random(shape, device), f"random tokens {_named(shape)}"
    if name == "mlp":
        return _random((_FEATURES,), device, classes=True), f"random classes {_named((_FEATURES,))}"
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        shape = (1, 8, 8)
        text = f"random images instead of scikit-learn's digits {_named(shape)}"
        return _random(shape, device, classes=True), text
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    return _rows((images, labels)), "scikit-learn's digits"


def _named(shape: tuple[int, ...]) -> str:
    return f"[batch, {', '.join(map(str, shape))}]"


def _random(shape: tuple[int, ...], device: torch.device, *, classes: bool = False) -> MakeBatch:
    def batch(count: int) -> Batch:
        target = torch.arange(count, device=device) % _CLASSES if classes else None
        return torch.randn(count, *shape, device=device), target

    return batch


def _users(value: Any, name: str, device: torch.device) -> MakeBatch:
    """Return batches of the user's data, on the model's device. The data itself is only read."""
    if isinstance(value, torch.utils.data.DataLoader):
        value = value.dataset
    if isinstance(value, torch.Tensor | tuple | list | dict):
        take = _rows(value)
    elif hasattr(value, "__getitem__") and hasattr(value, "__len__"):

        def take(count: int) -> Any:
            samples = [value[i % len(value)] for i in range(count)]
            return torch.utils.data.default_collate(samples)

    elif callable(value):
        take = value
    else:
        raise Unusable(
            f"--data {name}: it is a {type(value).__name__}. It can be (inputs, targets) as "
            "tensors, a Dataset, or a function of a batch size that gives inputs and targets"
        )

    def batch(count: int) -> Batch:
        samples = _each_tensor(take(count), lambda tensor: tensor.to(device))
        if isinstance(samples, tuple) and len(samples) == 2:
            return samples[0], samples[1]
        return samples, None

    return batch


def _rows(value: Any) -> Callable[[int], Any]:
    """Return the first samples of `value`, repeated if there are too few."""

    def first(tensor: torch.Tensor, count: int) -> torch.Tensor:
        rows = torch.arange(count, device=tensor.device) % max(len(tensor), 1)
        return tensor.detach().index_select(0, rows)

    return lambda count: _each_tensor(value, lambda tensor: first(tensor, count))


def _each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_each_tensor(item, change) for item in value)
    return value


# -- defaults ----------------------------------------------------------------------------


def _guessed(subject: Subject) -> tuple[MakeBatch, str]:
    """Return random inputs in the shape that the model's first layer takes. Raises Unusable."""
    module, device = subject.module, subject.device
    first = next(
        (m for m in module.modules() if any(True for _ in m.parameters(recurse=False))), module
    )
    tries: list[tuple[MakeBatch, str]] = []
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        count = first.num_embeddings
        for length in _LENGTHS:

            def tokens(batch: int, length: int = length) -> Batch:
                return torch.randint(count, (batch, length), device=device), None

            tries.append((tokens, f"numbers below {count} [batch, {length}]"))
    # A convolution does not tell the sides of its images: several are tried.
    for kind, shapes_of in _SHAPES.items():
        if isinstance(first, kind):
            tries += [(_random(shape, device), _named(shape)) for shape in shapes_of(first)]
    for make, text in tries:
        with contextlib.suppress(Unusable), torch.no_grad(), users_code():
            module(make(_TRY)[0])
            return make, f"random inputs, {text}, as {type(first).__name__} takes them"
    raise Unusable(
        f"what {subject.title} takes does not follow from its first layer: give samples with "
        "--data batch, where batch = (inputs, targets) on the ranks"
    )


_SHAPES: Mapping[type[nn.Module], Callable[[Any], list[tuple[int, ...]]]] = {
    nn.Linear: lambda of: [(of.in_features,), (_LENGTHS[0], of.in_features)],
    nn.Conv2d: lambda of: [(of.in_channels, side, side) for side in (32, 28, 64, 224, 8, 16)],
    nn.Conv1d: lambda of: [(of.in_channels, length) for length in _LENGTHS],
    nn.MultiheadAttention: lambda of: [(_LENGTHS[0], of.embed_dim)],
    nn.RNNBase: lambda of: [(_LENGTHS[0], of.input_size)],
}
"""The shapes of a sample that layers may take."""


def _with_loss(subject: Subject, batch: MakeBatch, loss: Callable[..., Any], text: str) -> Feed:
    """The user's loss, with random targets that it accepts, without given ones. Raises Unusable."""
    if batch(_TRY)[1] is not None:
        return Feed(batch, loss, text)
    why = ""
    for what, target in (
        ("zeros like the output", torch.zeros_like),
        ("class 0", lambda out: torch.zeros(len(out), dtype=torch.int64, device=out.device)),
    ):

        def with_target(output: Any, _: Any, make: Any = target) -> Any:
            return loss(output, make(output))

        made = Feed(batch, with_target, f"{text} (targets: {what})")
        try:
            with users_code():
                value = made.run(subject.module, batch(_TRY))
        except Unusable as error:
            why = str(error)
            continue
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return made
        why = "it gave no scalar"
    raise Unusable(
        f"the loss takes no target that can be made up ({why}): give samples with "
        "--data batch, where batch = (inputs, targets) on the ranks"
    )
