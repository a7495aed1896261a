"""Watches for the first loss or gradient that is not finite, while a breakpoint is set on that."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ddp_notebook.rank import gpu, torch_private
from ddp_notebook.rank.main_thread import MainThread

Found = Callable[[str, FrameType, str], None]
"""Called in the thread that computed it: with "nan", its frame, and what is not finite."""


class NotFinite:
    """Looks at what `backward()` begins with, and at gradients before an optimizer's step.

    Nothing of it is there unless it is wanted. On a GPU each look first waits until that is done.
    A GradScaler tries scales that are too large, and skips those steps: that is no finding. So
    the loss is looked at as it was before it was scaled, and gradients in the steps that count,
    and where the scale is 1 or less: then it is not the scale that makes them overflow.
    """

    def __init__(self, found: Found, main_thread: MainThread) -> None:
        self._found = found
        self._main_thread = main_thread
        self._is_on = False
        self._undo = contextlib.ExitStack()
        """Gives torch its own functions back."""
        self._scaled: Any = WeakIdKeyDictionary()
        """By a loss that a GradScaler has scaled, what it was before."""
        self._skipped: Any = WeakIdKeyDictionary()
        """By optimizer, the steps that a GradScaler has skipped since the last that it made."""

    def watch(self, wanted: bool) -> None:
        """Look from now on, or no more."""
        if wanted and not self._is_on:
            hook = register_optimizer_step_pre_hook(self._before_step)
            self._undo.callback(hook.remove)
            self._replace(torch.autograd, "backward", self._looking_first)
            for kind in _with_subclasses(GradScaler):
                self._replace(kind, "scale", self._remembering)
                self._replace(kind, "step", self._looking_at_skips)
        elif not wanted:
            self._undo.close()
        self._is_on = wanted

    def _replace(self, owner: Any, name: str, by: Callable[[Any], Callable[..., Any]]) -> None:
        """Have this in place of a function of `owner`, if that has one of its own."""
        plain = vars(owner).get(name)
        if plain is None:
            return
        ours = by(plain)
        setattr(owner, name, ours)

        def undo() -> None:
            # Who has replaced ours meanwhile calls it, and stays: ours is off, and calls torch's.
            if vars(owner)[name] is ours:
                setattr(owner, name, plain)

        self._undo.callback(undo)

    def _looks(self) -> bool:
        """Return whether to look, once what the GPU was given before is done."""
        if not self._is_on or torch.compiler.is_compiling() or torch_private.is_capturing():
            return False
        gpu.await_work(self._main_thread.awaits_gpu)
        return True

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
            if self._looks() and scaler.is_enabled():
                skipped = self._skipped.get(optimizer, 0)
                scale, bad = scaler.get_scale(), _gradient(optimizer)
                self._skipped[optimizer] = skipped + 1 if bad else 0
                if bad and scale <= 1:
                    before = f", after {skipped:,} skipped" if skipped else ""
                    self._found(
                        "nan",
                        sys._getframe(1),
                        f"{bad}; the GradScaler skips this step{before}, and its scale of "
                        f"{scale:g} is no longer what makes it overflow",
                    )
            return plain(scaler, optimizer, *args, **named)

        return step

    def _looking_first(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            if self._looks():
                before = [self._scaled.get(loss, loss) for loss in _tensors(tensors)]
                bad = next(filter(None, map(_not_finite, before)), "")
                if bad:
                    self._found("nan", sys._getframe(1), f"the loss is not finite: {bad}")
            return plain(tensors, *args, **named)

        return backward

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        # The frame above is the optimizer's own `step`; the user's is found from there.
        # With `found_inf` a GradScaler leaves it to the optimizer to skip the step.
        if not self._looks() or getattr(optimizer, "found_inf", None) is not None:
            return
        if bad := _gradient(optimizer):
            self._found("nan", sys._getframe(1), bad)


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """A loss, or several of them."""
    each = value if isinstance(value, list | tuple) else (value,)
    return tuple(loss for loss in each if isinstance(loss, torch.Tensor))


def _gradient(optimizer: torch.optim.Optimizer) -> str:
    """Return which gradient of its parameters is not finite, the first; empty where all are."""
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    names = [f" ({name})" for group in groups for name in group.get("param_names", ())]
    for number, parameter in enumerate(parameters, 1):
        text = _not_finite(parameter.grad) if parameter.grad is not None else ""
        if text:
            name = names[number - 1] if len(names) == len(parameters) else ""
            what = f"the gradient of parameter {number} of {len(parameters)}{name}"
            return f"{what} is not finite: {text}"
    return ""


def _with_subclasses(kind: type) -> list[type]:
    made: list[type] = kind.__subclasses__()
    return [kind, *(each for sub in made for each in _with_subclasses(sub))]


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
