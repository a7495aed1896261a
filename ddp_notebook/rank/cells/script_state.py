"""The process state of a script: like new when it begins; afterwards as it was before."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import random
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def process(folder: Path, loaded_before: frozenset[str]) -> Iterator[None]:
    """Within, what torchrun would find in a new process; the script lies in `folder`.

    `loaded_before` are top-level modules that are not the user's: they stay.

    Its random numbers are its own, its folder's modules are imported anew, so that changes in
    them count, and no start method of processes was chosen. Afterwards the environment, the
    working directory, torch's settings, signal handlers, warnings and the root logger are put
    back.
    """
    with contextlib.ExitStack() as stack:
        for part in (_environment, _random_numbers, _torch, _signals, _logging, _start_method):
            stack.enter_context(part())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_modules_of(folder, loaded_before))
        yield


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    variables, folder = dict(os.environ), Path.cwd()
    path = list(sys.path)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        sys.path[:] = path


@contextlib.contextmanager
def _random_numbers() -> Iterator[None]:
    # torch begins each process with another seed, as Python and NumPy do.
    numpy: Any = sys.modules.get("numpy")
    state = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    random.seed()
    torch.default_generator.seed()
    if numpy:
        numpy.random.seed()
    try:
        yield
    finally:
        random.setstate(state[0])
        torch.set_rng_state(state[1])
        if numpy:
            numpy.random.set_state(state[2])


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    device = torch.get_default_device()
    gradients = torch.is_grad_enabled()
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.set_grad_enabled(gradients)
        torch.use_deterministic_algorithms(strict, warn_only=warns)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def _start_method() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


@contextlib.contextmanager
def _modules_of(folder: Path, loaded_before: frozenset[str]) -> Iterator[None]:
    """Modules that lie in the script's folder: cells keep theirs, and so does the script."""
    importlib.invalidate_caches()
    before = _take_out(folder, loaded_before)
    try:
        yield
    finally:
        _take_out(folder, loaded_before)
        sys.modules.update(before)


def _take_out(folder: Path, loaded_before: frozenset[str]) -> dict[str, types.ModuleType]:
    """Remove the folder's modules, and what is in its packages, from those that are loaded."""
    modules = list(sys.modules.items())
    loaded = [each for each in modules if each[0].partition(".")[0] not in loaded_before]
    there = {name for name, module in loaded if _lies_in(folder, name, module)}
    return {name: sys.modules.pop(name) for name, _ in loaded if name.partition(".")[0] in there}


def _lies_in(folder: Path, name: str, module: types.ModuleType) -> bool:
    """True of a top-level module or package that is imported from the folder itself."""
    if "." in name:
        return False
    file = getattr(module, "__file__", None)
    packages = getattr(module, "__path__", ())
    files = [Path(file)] if file else [Path(package) / "_" for package in packages]
    return any(path.parent in (folder, folder / name) for path in files)
