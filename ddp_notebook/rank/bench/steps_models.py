"""The model whose steps are timed: one that ships, or a copy of the user's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_SEED = 0
_TOKENS, _WIDTH = 16, 256
_FEATURES = 256
_CLASSES = 10


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


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model that nothing else uses, and the options of the user's own DDP object."""

    module: nn.Module
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `DistributedDataParallel`."""
    notes: tuple[str, ...] = ()
    default_data: str = ""
    """The input of a model that ships; empty for the user's."""

    @property
    def device(self) -> torch.device:
        """The device of its first parameter."""
        return next(self.module.parameters()).device

    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(
            p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad
        )

    def parameters(self) -> int:
        """The number of elements that DDP reduces."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)


def cnn() -> nn.Module:
    """A small convolutional network for 8 x 8 images: 0.5 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, _CLASSES),
    )


def mlp() -> nn.Module:
    """Four linear layers: 2.4 million parameters, little computation for each."""
    return nn.Sequential(
        nn.Linear(_FEATURES, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, _CLASSES),
    )


def transformer() -> nn.Module:
    """One block of an encoder, width 256: 0.8 million parameters, much computation for each."""
    return nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)


SHIPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "cnn": (cnn, "digits"),
    "mlp": (mlp, "random classes"),
    "transformer": (transformer, "random tokens"),
}
"""By name: a function that makes the model, and its input."""

SHAPES = {"random classes": (_FEATURES,), "random tokens": (_TOKENS, _WIDTH)}


def prepare(name: str, names: Mapping[str, Any], device: str) -> Subject:
    """A copy of the model `name` of the user's `names`, or a model that ships; it may be changed.

    Raises Unusable.
    """
    if name not in names and name in SHIPPED:
        make, data = SHIPPED[name]
        torch.manual_seed(_SEED)
        return Subject(make().to(device).train(), name, default_data=data)
    if name not in names:
        raise Unusable(
            f"there is no {name!r} on this rank, and no such model ships ({', '.join(SHIPPED)})"
        )
    value = names[name]
    if isinstance(value, nn.Module):
        return _copied(value, name)
    if not callable(value):
        raise Unusable(
            f"{name} is of type {type(value).__name__}: a torch module is needed, or a function "
            "without arguments that makes one"
        )
    return _made(value, name)


def _made(make: Callable[[], Any], name: str) -> Subject:
    with users_code(f"{name}() raised {{}}"):
        made = make()
    if not isinstance(made, nn.Module):
        raise Unusable(f"{name}() gave a {type(made).__name__}, not a torch module")
    _check(made, name)
    if isinstance(made, DistributedDataParallel):
        return Subject(made.module.train(), f"{name}()", _options(made))
    return Subject(made.train(), f"{name}()")


def _copied(value: nn.Module, name: str) -> Subject:
    options: Mapping[str, Any] = {}
    module = value
    if isinstance(value, DistributedDataParallel):
        options, module = _options(value), value.module
    _check(module, name)
    with users_code(
        f"{name} cannot be copied, and the model itself is not to be changed: {{}}. "
        f"Give a function that makes it: --model make_{name}"
    ):
        made = copy.deepcopy(module)
    made.zero_grad(set_to_none=True)
    return Subject(made.train(), name, options)


def _check(module: nn.Module, name: str) -> None:
    for part, tensor in module.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise Unusable(f"{name}.{part} has no shape yet: run a forward first")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise Unusable(f"no parameter of {name} requires a gradient, so there is nothing to reduce")


def _options(wrapped: DistributedDataParallel) -> dict[str, Any]:
    """The options of the user's DDP object; also its bucket size, if one was given."""
    names = (
        "find_unused_parameters",
        "broadcast_buffers",
        "gradient_as_bucket_view",
        "static_graph",
    )
    options = {name: getattr(wrapped, name) for name in names if hasattr(wrapped, name)}
    if not getattr(wrapped, "bucket_bytes_cap_default", True):
        options["bucket_cap_mb"] = wrapped.bucket_bytes_cap / 2**20
    return options


def on_a_line(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
