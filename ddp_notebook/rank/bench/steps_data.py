"""The input data of the timed training steps, and their loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_notebook.rank.bench.steps_models import SHAPES, Subject, Unusable, users_code

_TRY = 2
"""The batch size of a trial."""
_SIDES = (32, 28, 64, 224, 8, 16)
"""Sizes of images to try for a convolution, which does not tell; the first that works is used."""
_LENGTHS = (32, 64, 256)
_DIGITS_SHAPE = (1, 8, 8)
_CLASSES = 10

Inputs = Any
"""A tensor; a tuple or list of positional arguments; a dict of keyword arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """Batches of any size for one model, and the loss. `text` describes them."""

    batch: Callable[[int], tuple[Inputs, Any]]
    """Inputs and target (or None), by number of samples."""
    loss: Callable[[Any, Any], torch.Tensor]
    """A function of the model's output and the target."""
    text: str

    def run(self, model: nn.Module, batch: tuple[Inputs, Any]) -> torch.Tensor:
        """The loss of `model` on a batch: the forward."""
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
            raise Unusable(f"there is no {name!r} on this rank ({option} {name})")
    if loss and not callable(names[loss]):
        raise Unusable(f"--loss {loss}: it is a {type(names[loss]).__name__}, not a function")
    batch, text = _batches(subject, data, names)
    if loss:
        return _with_loss(subject, batch, names[loss], f"{text}, loss {loss}")
    if subject.default_data in ("digits", "random classes") and not data:
        return Feed(batch, nn.functional.cross_entropy, f"{text}, cross entropy")
    return Feed(batch, _mean_square, f"{text}, mean square of the output")


def _mean_square(output: Any, _: Any) -> torch.Tensor:
    """A loss for any model: its own if its output has one, else the mean of the squares."""
    for own in (getattr(output, "loss", None), output):
        if isinstance(own, torch.Tensor) and own.is_floating_point():
            return own if own.dim() == 0 else own.float().pow(2).mean()
    parts = output.values() if isinstance(output, Mapping) else output
    if isinstance(parts, str | bytes) or not hasattr(parts, "__iter__"):
        raise Unusable(f"its output is a {type(output).__name__}: give a loss with --loss")
    return _mean_square(next(iter(parts)), None)


def _batches(
    subject: Subject, data: str, names: Mapping[str, Any]
) -> tuple[Callable[[int], tuple[Inputs, Any]], str]:
    if data:
        return _users(names[data], data, subject.device), f"data {data}"
    if subject.default_data == "digits":
        return _digits(subject.device)
    if subject.default_data:
        shape = SHAPES[subject.default_data]
        classes = subject.default_data == "random classes"
        return _random(shape, subject.device, classes=classes), _named(shape, subject.default_data)
    return _guessed(subject)


def _named(shape: tuple[int, ...], what: str) -> str:
    return f"{what} [batch, {', '.join(map(str, shape))}]"


def _random(
    shape: tuple[int, ...], device: torch.device, *, classes: bool = False
) -> Callable[[int], tuple[Inputs, Any]]:
    def batch(count: int) -> tuple[Inputs, Any]:
        target = torch.arange(count, device=device) % _CLASSES if classes else None
        return torch.randn(count, *shape, device=device), target

    return batch


def _digits(device: torch.device) -> tuple[Callable[[int], tuple[Inputs, Any]], str]:
    """scikit-learn's 1,797 images of digits; random images if it is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        text = "random images instead of scikit-learn's digits"
        return _random(_DIGITS_SHAPE, device, classes=True), _named(_DIGITS_SHAPE, text)
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    return _rows((images, labels)), "scikit-learn's digits"


def _users(value: Any, name: str, device: torch.device) -> Callable[[int], tuple[Inputs, Any]]:
    """Batches of the user's data, on the model's device. The data itself is only read."""
    if isinstance(value, torch.utils.data.DataLoader):
        value = value.dataset
    if isinstance(value, torch.Tensor | tuple | list | dict):
        whole = value
    elif hasattr(value, "__getitem__") and hasattr(value, "__len__"):
        return lambda count: _pair(_moved(_collated(value, count), device))
    elif callable(value):
        return lambda count: _pair(_moved(value(count), device))
    else:
        raise Unusable(
            f"--data {name}: it is a {type(value).__name__}. It can be (inputs, targets) as "
            "tensors, a Dataset, or a function of a batch size that gives inputs and targets"
        )
    rows = _rows(whole)
    return lambda count: _pair(_moved(rows(count), device))


def _collated(dataset: Any, count: int) -> Any:
    return torch.utils.data.default_collate([dataset[i % len(dataset)] for i in range(count)])


def _pair(value: Any) -> tuple[Inputs, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    return value, None


def _moved(value: Any, device: torch.device) -> Any:
    return _each_tensor(value, lambda tensor: tensor.to(device))


def _rows(value: Any) -> Callable[[int], Any]:
    """The first samples of `value`, repeated if there are too few."""

    def take(count: int) -> Any:
        return _each_tensor(
            value,
            lambda tensor: tensor.detach().index_select(
                0, torch.arange(count, device=tensor.device) % max(len(tensor), 1)
            ),
        )

    return take


def _each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_each_tensor(item, change) for item in value)
    return value


# -- defaults --------------------------------------------------------------------------


def _guessed(subject: Subject) -> tuple[Callable[[int], tuple[Inputs, Any]], str]:
    """Random inputs in the shape that the model's first layer takes. Raises Unusable."""
    for layer, make, text in _shapes(subject.module, subject.device):
        if _goes_through(subject.module, make(_TRY)[0]):
            return make, f"random inputs, {text}, as {layer} takes them"
    raise Unusable(
        f"what {subject.title} takes cannot be told from its first layer: give samples with "
        "--data batch, where batch = (inputs, targets) on the ranks"
    )


def _goes_through(module: nn.Module, inputs: Inputs) -> bool:
    try:
        with torch.no_grad(), users_code():
            module(inputs)
    except Unusable:
        return False
    return True


def _shapes(
    module: nn.Module, device: torch.device
) -> Iterator[tuple[str, Callable[[int], tuple[Inputs, Any]], str]]:
    """Inputs to try: the layer that they are for, a function that makes them, a description."""
    first = next(
        (m for m in module.modules() if any(True for _ in m.parameters(recurse=False))), module
    )
    layer = type(first).__name__
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        count = first.num_embeddings
        for length in _LENGTHS:

            def tokens(batch: int, length: int = length) -> tuple[Inputs, Any]:
                return torch.randint(count, (batch, length), device=device), None

            yield layer, tokens, f"numbers below {count} [batch, {length}]"
    for shape in _shapes_of(first):
        yield layer, _random(shape, device), f"[batch, {', '.join(map(str, shape))}]"


def _shapes_of(layer: Any) -> Iterator[tuple[int, ...]]:
    if isinstance(layer, nn.Linear):
        yield (layer.in_features,)
        yield (_LENGTHS[0], layer.in_features)
    elif isinstance(layer, nn.Conv2d):
        yield from ((layer.in_channels, side, side) for side in _SIDES)
    elif isinstance(layer, nn.Conv1d):
        yield from ((layer.in_channels, length) for length in _LENGTHS)
    elif isinstance(layer, nn.MultiheadAttention):
        yield (_LENGTHS[0], layer.embed_dim)
    elif isinstance(layer, nn.RNNBase):
        yield (_LENGTHS[0], layer.input_size)


def _with_loss(
    subject: Subject,
    batch: Callable[[int], tuple[Inputs, Any]],
    loss: Callable[..., Any],
    text: str,
) -> Feed:
    """The user's loss, with random targets that it accepts if there are none. Raises Unusable."""
    plain = Feed(batch, loss, text)
    if batch(_TRY)[1] is not None:
        return plain
    tried = []
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
            tried.append(str(error))
            continue
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return made
        tried.append("it gave no scalar")
    raise Unusable(
        f"the loss takes no target that can be made up ({tried[-1]}): give samples with "
        "--data batch, where batch = (inputs, targets) on the ranks"
    )
