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
    the loss is looked at as it was before it was scaled, and gradients in the steps that count,
    and where the scale is 1 or less: then it is not the scale that makes them overflow.
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self._hook: Any = None
        self._plain: Any = None
        self._ours: Any = None
        self._scaled: Any = WeakIdKeyDictionary()
        """By a loss that a GradScaler has scaled, what it was before."""
        self._methods: list[tuple[type, str, Any, Any]] = []
        """Classes of scalers, with a method, their own one and the one in its place."""
        self._skipped: Any = WeakIdKeyDictionary()
        """By optimizer, the steps that a GradScaler has skipped since the last that it made."""

    def watch(self, wanted: bool) -> None:
        """Look from now on, or no more."""
        if wanted and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            self._plain = torch.autograd.backward
            self._ours = torch.autograd.backward = self._looking_first(self._plain)
            self._replace("scale", self._remembering)
            self._replace("step", self._looking_at_skips)
        elif not wanted and self._hook is not None:
            self._hook.remove()
            self._hook = None
            if torch.autograd.backward is self._ours:
                torch.autograd.backward = self._plain
            for kind, name, plain, ours in self._methods:
                if vars(kind)[name] is ours:
                    setattr(kind, name, plain)
            self._methods.clear()

    def _replace(self, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Have this in place of a method of the scalers."""
        for kind in _scalers(GradScaler, name):
            plain = vars(kind)[name]
            ours = by(plain)
            self._methods.append((kind, name, plain, ours))
            setattr(kind, name, ours)

    def _remembering(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def scale(scaler: Any, outputs: Any, *args: Any, **named: Any) -> Any:
            scaled = plain(scaler, outputs, *args, **named)
            for before, after in zip(_tensors(outputs), _tensors(scaled), strict=False):
                self._scaled[after] = before.detach()
            return scaled

        return scale

    def _looking_at_skips(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def step(scaler: Any, optimizer: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            looks = self._hook is not None and not torch.compiler.is_compiling()
            if looks and scaler.is_enabled():
                self._before_scalers_step(scaler, optimizer, sys._getframe(1))
            return plain(scaler, optimizer, *args, **named)

        return step

    def _before_scalers_step(self, scaler: Any, optimizer: Any, frame: FrameType) -> None:
        skipped = self._skipped.get(optimizer, 0)
        scale, bad = scaler.get_scale(), _gradient(optimizer)
        self._skipped[optimizer] = skipped + 1 if bad else 0
        if bad and scale <= 1:
            before = f", after {skipped:,} skipped" if skipped else ""
            self._found(
                "nan",
                frame,
                f"{bad}; the GradScaler skips this step{before}, and its scale of {scale:g} "
                "is no longer what makes it overflow",
            )

    def _looking_first(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            if self._hook is not None and not torch.compiler.is_compiling():
                before = [self._scaled.get(loss, loss) for loss in _tensors(tensors)]
                self._look(before, "the loss", sys._getframe(1))
            return plain(tensors, *args, **named)

        return backward

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        if self._hook is None or torch.compiler.is_compiling():
            return
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler leaves it to the optimizer to skip the step
        bad = _gradient(optimizer)
        if bad:
            self._found("nan", sys._getframe(1), bad)

    def _look(self, tensors: Iterable[torch.Tensor], what: str, frame: FrameType) -> None:
        for tensor in tensors:
            text = _not_finite(tensor)
            if text:
                self._found("nan", frame, f"{what} is not finite: {text}")
                return


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """A loss, or several of them."""
    each = value if isinstance(value, list | tuple) else (value,)
    return tuple(loss for loss in each if isinstance(loss, torch.Tensor))


def _gradient(optimizer: torch.optim.Optimizer) -> str:
    """Which gradient of its parameters is not finite, the first; empty where all are."""
    parameters = _named_parameters(optimizer)
    for number, (name, parameter) in enumerate(parameters, 1):
        grad = parameter.grad
        text = _not_finite(grad) if grad is not None else ""
        if text:
            what = f"the gradient of parameter {number} of {len(parameters)}{name}"
            return f"{what} is not finite: {text}"
    return ""


def _scalers(kind: type, method: str) -> list[type]:
    """This class of scalers and those made from it, each with that method of its own."""
    found = [kind] if method in vars(kind) else []
    made: list[type] = kind.__subclasses__()
    return found + [scaler for sub in made for scaler in _scalers(sub, method)]


def _named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """An optimizer's parameters, each with its name in brackets where the optimizer knows it."""
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
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
