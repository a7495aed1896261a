"""Keeps what this rank computes in each training step, for a comparison.

Only in a script that is run for a comparison (`--against`): it reads every parameter in every step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_notebook.model.against import trail
from ddp_notebook.model.against.trail import Parameter, Trail, TrailOrder, TrainingStep
from ddp_notebook.rank.collectives.call_sites import CallSites, Line, place_of
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.training.against.batches import Batches
from ddp_notebook.rank.training.against.sketching import Sketcher
from ddp_notebook.rank.training.inputs import drops_out, tensors_in

_MOST_NUMBERS = 2**21
"""In one trail; they take 16 MiB."""
_MOST_NAMED = 5
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Without SyncBatchNorm, which uses the samples of all ranks."""


class TrailRecorder(Component):
    """Keeps the trail of this process, and writes it when the script is over."""

    def __init__(self, order: TrailOrder, call_sites: CallSites) -> None:
        self._order = order
        self._call_sites = call_sites
        self._sketcher = Sketcher()
        read = trail.read_all(Path(order.folder), order.feed)
        self._fed = [read[name][0] for name in order.feed if name in read]
        self._batches = Batches([fed.loadings for fed in self._fed], turned=order.turned)
        self._numbers = array("d")
        self._steps: list[TrainingStep] = []
        self._optimizers: list[tuple[weakref.ref[Any], list[torch.Tensor]]] = []
        self._described: list[tuple[Parameter, ...]] = []
        self._models: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._inside = 0
        self._samples: list[float] = []
        self._losses: list[float] = []
        self._backward: Line | None = None
        self._after_backward: dict[int, list[float]] = {}
        self._dropout: list[str] = []
        self._batch_norm: list[str] = []
        self._sharded = False
        self._rates_given = False
        self._own_rates: list[Any] = []
        self._cut = False
        self._problem = ""
        self._pid = os.getpid()

    def attach(self) -> None:
        """Install hooks in torch's public classes."""
        self._batches.attach()
        self._wrap_ddp()
        self._wrap_backward()
        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def run_begins(self, run: Run) -> None:
        """Code that draws random numbers without a seed draws the same ones in each run."""
        random.seed(0)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)

    def run_ends(self) -> None:
        """Write the trail."""
        kept = Trail(
            tuple(self._described),
            tuple(self._steps),
            self._batches.loadings(),
            tuple(self._dropout),
            tuple(self._batch_norm),
            self._sharded,
            self._rates_given,
            self._cut,
            self._problem,
        )
        trail.write(Path(self._order.folder), self._order.name, kept, self._numbers)

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """An error in the recorder is noted in the trail, and recording stops."""
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
            self._problem = self._problem or f"{type(error).__name__}: {error}"

    @property
    def _off(self) -> bool:
        return bool(self._problem) or self._cut or os.getpid() != self._pid

    # -- what the model gets -----------------------------------------------------------------

    def _wrap_ddp(self) -> None:
        forward: Callable[..., Any] = DistributedDataParallel.forward
        make: Callable[..., Any] = DistributedDataParallel.__init__

        @functools.wraps(make)
        def made(wrapped: Any, *args: Any, **named: Any) -> None:
            __tracebackhide__ = True
            make(wrapped, *args, **named)
            with self._contained():
                self._add(wrapped.module)

        @functools.wraps(forward)
        def through(wrapped: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            if not self._off and torch.is_grad_enabled():
                with self._contained():
                    self._trains(wrapped.module, (args, named))
            self._inside += 1
            try:
                return forward(wrapped, *args, **named)
            finally:
                self._inside -= 1

        DistributedDataParallel.__init__ = made  # type: ignore[method-assign, assignment]
        DistributedDataParallel.forward = through  # type: ignore[method-assign, assignment]

    def _add(self, module: nn.Module) -> None:
        self._models[id(module)] = module
        for name, parameter in module.named_parameters():
            self._names.setdefault(id(parameter), name)

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        """A forward begins; that of a module that contains the DDP object counts as training."""
        known = self._models.get(id(module)) is module
        if known and not self._inside and not self._off and torch.is_grad_enabled():
            with self._contained():
                self._trains(module, (inputs, {}))

    def _trains(self, module: nn.Module, inputs: Any) -> None:
        self._samples.extend(self._sketcher.samples(list(tensors_in(inputs))))
        for name, part in module.named_modules():
            if not part.training:
                continue
            if drops_out(part):
                _note(self._dropout, f"{type(part).__name__} {name or 'itself'}")
            elif isinstance(part, _BATCH_NORM):
                _note(self._batch_norm, f"{type(part).__name__} {name or 'itself'}")

    # -- backward ----------------------------------------------------------------------------

    def _wrap_backward(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            result = original(tensors, *args, **named)
            if not self._off:
                with self._contained():
                    self._after(tensors)
            return result

        torch.autograd.backward = backward

    def _after(self, loss: Any) -> None:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(float(loss))
        self._backward = self._call_sites.users_line()
        for model in self._models.values():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    self._after_backward[id(parameter)] = self._sketcher.sketch(parameter.grad)

    # -- steps -------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        if self._off:
            return
        with self._contained():
            number = self._number(optimizer)
            parameters = self._optimizers[number][1]
            self._keep(parameters)
            none = self._sketcher.sketch(None)
            for parameter in parameters:
                self._numbers.extend(self._after_backward.get(id(parameter), none))
            self._keep([parameter.grad for parameter in parameters])
            self._give_rates(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        if self._off:
            return
        with self._contained():
            number = self._number(optimizer)
            self._keep(self._optimizers[number][1])
            loss = sum(self._losses) / len(self._losses) if self._losses else None
            own = self._take_rates_back(optimizer)
            self._steps.append(
                TrainingStep(
                    number,
                    tuple(self._samples),
                    own,
                    loss,
                    place_of(self._call_sites.users_line()),
                    place_of(self._backward),
                )
            )
            self._samples, self._losses = [], []
            self._after_backward = {}
            self._cut = len(self._numbers) > _MOST_NUMBERS

    def _keep(self, tensors: Iterable[torch.Tensor | None]) -> None:
        for tensor in tensors:
            self._numbers.extend(self._sketcher.sketch(tensor))

    def _give_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """The other ranks' learning rates, for this step."""
        self._own_rates = [group.get("lr") for group in optimizer.param_groups]
        at = len(self._steps)
        if not self._fed or at >= len(self._fed[0].steps):
            return
        given = self._fed[0].steps[at].rates
        for group, own, rate in zip(optimizer.param_groups, self._own_rates, given, strict=False):
            if isinstance(own, float | int) and own != rate:
                group["lr"] = rate
                self._rates_given = True

    def _take_rates_back(self, optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
        """Restore this rank's learning rates after the step; returns those that were used."""
        rates = tuple(float(group.get("lr") or 0.0) for group in optimizer.param_groups)
        for group, own in zip(optimizer.param_groups, self._own_rates, strict=False):
            if isinstance(own, float | int):
                group["lr"] = own
        return rates

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        for number, (ref, known) in enumerate(self._optimizers):
            if ref() is optimizer:
                if len(parameters) != len(known):
                    raise ValueError("an optimizer got further parameters after its first step")
                return number
        self._optimizers.append((weakref.ref(optimizer), parameters))
        self._described.append(())
        self._describe(len(self._optimizers) - 1)
        return len(self._optimizers) - 1

    def _describe(self, number: int) -> None:
        parameters = self._optimizers[number][1]
        self._sharded |= any(type(tensor).__name__ == "DTensor" for tensor in parameters) or any(
            hasattr(tensor, "_local_tensor") or hasattr(tensor, "_sharded_size")
            for tensor in parameters
        )
        self._described[number] = tuple(
            Parameter(
                self._names.get(id(tensor), f"a parameter in no DDP object {tuple(tensor.shape)}"),
                tensor.numel(),
                torch.finfo(tensor.dtype).eps,
            )
            for tensor in parameters
        )


def _note(noted: list[str], text: str) -> None:
    if text not in noted and len(noted) < _MOST_NAMED:
        noted.append(text)
