"""Watches for the first loss or gradient that is not finite, while a breakpoint is set on that."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

Found = Callable[[str, FrameType, str], None]
"""Called in the thread that computed it: with "nan", its frame, and what is not finite."""


class NotFinite:
    """Looks at what `backward()` begins with, and at gradients before an optimizer's step.

    Nothing of it is there unless it is wanted. On a GPU each look waits for what the GPU is at.
    A GradScaler tries scales that are too large, and skips those steps: that is no finding. So
    the loss is looked at as it was before it was scaled, and gradients in the steps that count.
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self._hook: Any = None
        self._plain: Any = None
        self._ours: Any = None
        self._scaled: Any = WeakIdKeyDictionary()
        """By a loss that a GradScaler has scaled, what it was before."""
        self._scales: dict[type, tuple[Any, Any]] = {}
        """By class of scalers, its own method, and the one that is there in its place."""

    def watch(self, wanted: bool) -> None:
        """Look from now on, or no more."""
        if wanted and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            self._plain = torch.autograd.backward
            self._ours = torch.autograd.backward = self._looking_first(self._plain)
            for kind in _scalers(GradScaler):
                plain = vars(kind)["scale"]
                self._scales[kind] = plain, self._remembering(plain)
                kind.scale = self._scales[kind][1]  # type: ignore[attr-defined]
        elif not wanted and self._hook is not None:
            self._hook.remove()
            self._hook = None
            if torch.autograd.backward is self._ours:
                torch.autograd.backward = self._plain
            for kind, (plain, ours) in self._scales.items():
                if vars(kind)["scale"] is ours:
                    kind.scale = plain  # type: ignore[attr-defined]
            self._scales.clear()

    def _remembering(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def scale(scaler: Any, outputs: Any, *args: Any, **named: Any) -> Any:
            scaled = plain(scaler, outputs, *args, **named)
            if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
                self._scaled[scaled] = outputs.detach()
            return scaled

        return scale

    def _looking_first(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            if self._hook is not None and not torch.compiler.is_compiling():
                each = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
                before = [self._scaled.get(loss, loss) for loss in each]
                self._look(before, "the loss", sys._getframe(1))
            return plain(tensors, *args, **named)

        return backward

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        if self._hook is None or torch.compiler.is_compiling():
            return
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler leaves it to the optimizer to skip the step
        frame, parameters = sys._getframe(1), _named_parameters(optimizer)
        for number, (name, parameter) in enumerate(parameters, 1):
            what = f"the gradient of parameter {number} of {len(parameters)}{name}"
            grad = parameter.grad
            if grad is not None and self._look((grad,), what, frame):
                return

    def _look(self, tensors: Iterable[torch.Tensor], what: str, frame: FrameType) -> bool:
        for tensor in tensors:
            text = _not_finite(tensor)
            if text:
                self._found("nan", frame, f"{what} is not finite: {text}")
                return True
        return False


def _scalers(kind: type) -> list[type]:
    """This class of scalers and those made from it, each with a `scale` of its own."""
    found = [kind] if "scale" in vars(kind) else []
    made: list[type] = kind.__subclasses__()
    return found + [each for sub in made for each in _scalers(sub)]


def _named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """An optimizer's parameters, each with its name in brackets where the optimizer knows it."""
    groups = optimizer.param_groups
    parameters = [each for group in groups for each in group["params"]]
    names = [f" ({name})" for group in groups for name in group.get("param_names", ())]
    if len(names) != len(parameters):
        names = [""] * len(parameters)
    return list(zip(names, parameters, strict=True))


def _not_finite(tensor: torch.Tensor) -> str:
    """``2 NaN of 64``; empty where all are numbers."""
    values = tensor.detach()
    values = values.coalesce().values() if values.is_sparse else values
    if not (values.is_floating_point() or values.is_complex()) or bool(values.isfinite().all()):
        return ""
    nans, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    of = f" of {values.numel():,} values" if values.numel() > 1 else ""
    kinds = [f"{nans:,} NaN"] if nans else []
    kinds += [f"{infinite:,} inf"] if infinite else []
    return (" and ".join(kinds) if of else "NaN" if nans else "inf") + of
