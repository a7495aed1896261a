"""A program for GPUs on the CPU (``--cpu``): what asks for CUDA gets the CPU, and nccl is gloo.

While a cell or a script runs, torch's functions that take a device are replaced, by the tables
below. `torch.device` stays as it is: a device "cuda:1" can be made, compared and printed, and means
the CPU where it is used. Streams and events exist in name only, and nothing is compiled. A name
that was imported before is not replaced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._device

from ddp_notebook.launch.out_of_memory import bytes_left
from ddp_notebook.rank import torch_private

AS_GPUS = "DDP_NOTEBOOK_AS_GPUS"
"""The variable that tells processes which a program starts how many GPUs there are in name."""
_CPU = torch.device("cpu")


def _device(value: Any) -> Any:
    """Return the CPU for a device of CUDA, and anything else as it is."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _numbered(value: Any) -> Any:
    """Return what `_device` does, and the CPU for a number, which is a GPU's."""
    return _CPU if type(value) is int else _device(value)


def _backend(value: Any) -> Any:
    return "gloo" if "nccl" in str(value or "").lower() else value


_GIVEN: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "torch:load": {"map_location": lambda value: value if callable(value) else "cpu"},
    "torch.amp:autocast.__init__": {"device_type": _device},
    "torch.amp:GradScaler.__init__": {"device": _device},
    "torch.utils._device:DeviceContext.__init__": {"device": _numbered},
    "torch.utils.data:DataLoader.__init__": {"pin_memory": lambda _: False},
    "torch.nn:Module.to_empty": {"device": _numbered},
    "torch.nn.parallel:DistributedDataParallel.__init__": dict.fromkeys(
        ("device_ids", "output_device"), lambda _: None
    ),
    "torch.distributed.fsdp:FullyShardedDataParallel.__init__": {"device_id": lambda _: _CPU},
    "torch.distributed.device_mesh:DeviceMesh.__init__": {"device_type": _device},
    "torch.distributed.device_mesh:init_device_mesh": {"device_type": _device},
    "torch.distributed:init_process_group": {"backend": _backend, "device_id": lambda _: None},
    "torch.distributed:new_group": {"backend": _backend, "device_id": lambda _: None},
    "torch.distributed:barrier": {"device_ids": lambda _: None},
    "torch.distributed:get_default_backend_for_device": {"device": _numbered},
}
"""Functions whose parameters may name GPUs, and what becomes of each."""


class _AtOnce(contextlib.nullcontext[None]):
    """A GPU, a stream or an event, where everything is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self._at_s = 0.0

    def record(self, *_: Any) -> None:
        self._at_s = time.perf_counter()

    def record_event(self, event: _AtOnce | None = None) -> _AtOnce:
        event = event or _AtOnce()
        event.record()
        return event

    def elapsed_time(self, later: _AtOnce) -> float:
        return (later._at_s - self._at_s) * 1000

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self, *_: Any) -> None:
        pass

    wait = wait_event = wait_stream = synchronize


_GENERATOR = torch.Generator


class _MakesGenerators(type):
    """The type of what takes the place of `torch.Generator`, a class in C that cannot be changed.

    Every generator is an instance of it, and it makes those of the CPU.
    """

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _GENERATOR(cuda_on_cpu.told(_numbered, device))

    def __instancecheck__(cls, it: object) -> bool:
        return isinstance(it, _GENERATOR)


class _Generator(metaclass=_MakesGenerators):
    pass


class CudaOnCpu:
    """Replaces and restores torch's functions; one of a process is on at a time."""

    def __init__(self) -> None:
        self._gpus = 0
        self._index = 0
        """The GPU that the program has chosen."""
        self._said = False
        self._undo = contextlib.ExitStack()

    def begin(self, gpus: int, *, said: bool = False) -> None:
        """Replace them, for as many `gpus` in name; `said` if the user was told already."""
        self._gpus, self._index, self._said = gpus, 0, said
        torch_private.forget_rules()
        self._undo.callback(torch_private.forget_rules)  # the last of all
        self._undo.callback(os.environ.pop, AS_GPUS, None)
        os.environ[AS_GPUS] = str(gpus)
        for place, parameters in _GIVEN.items():
            of, name = re.split(r"[:.](?=\w+$)", place)
            owner = pkgutil.resolve_name(of)
            if hasattr(owner, name):  # in this torch
                self._replace(owner, name, self._giving(getattr(owner, name), parameters))
        made = (getattr(f, "__name__", "") for f in torch.utils._device._device_constructors())
        for name in {*made, *(name for name in dir(torch) if name.endswith("_like"))}:
            self._replace_call(torch, name)
        for name in ("to", *(name for name in dir(torch.Tensor) if name.startswith("new_"))):
            self._replace_call(torch.Tensor, name, name == "to")
        self._replace_call(torch.nn.Module, "to", True)
        self._replace(torch.nn.Module, "cuda", lambda it, *_, **__: self._itself(it))
        for name in ("cuda", "pin_memory"):
            self._replace(torch.Tensor, name, lambda it, *_, **__: self._itself(it))
        self._replace(torch.Tensor, "record_stream", lambda *_: None)
        self._replace(torch, "Generator", _Generator)
        # The compiler asks torch for streams of its own: what it would compile runs as it is.
        self._replace(torch, "compile", lambda f=None, **_: (lambda g: g) if f is None else f)
        self._replace(torch.nn.Module, "compile", lambda *_, **__: None)
        for gpus_module, functions in (
            (torch.cuda, self._cuda()),
            (torch.accelerator, self._accelerator()),
        ):
            for name in functions.keys() & vars(gpus_module).keys():
                # torch's compiler wants another object for each name.
                function = functions[name]
                own = function if inspect.isclass(function) else functools.partial(function)
                self._replace(gpus_module, name, own)
        parallel = sys.modules["torch.nn.parallel.data_parallel"]
        if hasattr(parallel, "_get_available_device_type"):  # DataParallel's own question
            self._replace(parallel, "_get_available_device_type", lambda: None)

    def end(self) -> None:
        """Restore them."""
        self._undo.close()

    # -- how one is replaced -----------------------------------------------------------

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        """Make `function` what `owner` has there; of torch's modules all that have the same."""
        original = inspect.getattr_static(owner, name)
        places = [owner]
        if inspect.ismodule(owner) and (home := sys.modules.get(f"{original.__module__}")):
            places += [home] if vars(home).get(name) is original else []
        for place in places:
            own = name in vars(place)  # a method of a base class comes back by itself
            setattr(place, name, function)
            self._undo.callback(
                *((setattr, place, name, original) if own else (delattr, place, name))
            )

    def _replace_call(self, owner: Any, name: str, first: bool = False) -> None:
        """Replace a function by one with another ``device=``, or the `first` of its arguments."""
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            __tracebackhide__ = True  # IPython leaves the frame out of the user's traceback
            if "device" in named:
                named["device"] = self.told(_numbered, named["device"])
            if first and len(args) > 1:
                args = (args[0], self.told(_numbered, args[1]), *args[2:])
            return original(*args, **named)

        self._replace(owner, name, call)

    def _giving(self, original: Any, parameters: Mapping[str, Callable[[Any], Any]]) -> Any:
        """Return `original` with other values of these `parameters`."""
        signature = inspect.signature(original)
        known = {name: signature.parameters[name].default for name in signature.parameters}
        defaults = {
            name: becomes(known[name])
            for name, becomes in parameters.items()
            if known.get(name, inspect.Parameter.empty) is not inspect.Parameter.empty
        }

        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            try:
                bound = signature.bind(*args, **named)
            except TypeError:
                return original(*args, **named)  # torch says what is wrong
            for name, default in defaults.items():
                if default != known[name]:
                    bound.arguments.setdefault(name, default)
            for name in parameters.keys() & bound.arguments.keys():
                bound.arguments[name] = self.told(parameters[name], bound.arguments[name])
            return original(*bound.args, **bound.kwargs)

        return call

    def told(self, becomes: Callable[[Any], Any], value: Any) -> Any:
        """Return what `value` becomes; where it changes, report that to the user, once."""
        other = becomes(value)
        if other is not value and other != value:
            self._say()
        return other

    def _say(self) -> None:
        if not self._said:
            self._said = True
            sys.stderr.write(
                "--cpu: this program asks for CUDA and gets the CPU, with gloo for nccl "
                f"({self._gpus} GPUs in name).\n"
            )

    def _itself(self, it: Any) -> Any:
        self._say()
        return it

    # -- what modules of torch have in place of GPUs -------------------------------------

    def _count(self) -> int:
        self._say()
        return self._gpus

    def _choose(self, device: Any) -> None:
        self._say()
        device = torch.device(device) if isinstance(device, str) else device
        self._index = int(getattr(device, "index", device) or 0)

    def _accelerator(self) -> dict[str, Any]:
        """The functions of `torch.accelerator`, which `torch.cuda` has too, and more."""
        return {
            "is_available": lambda: self._count() > 0,
            "device_count": self._count,
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            **dict.fromkeys(("set_device_index", "set_device_idx", "set_device"), self._choose),
            **dict.fromkeys(
                ("current_device_index", "current_device_idx", "current_device"),
                lambda: self._index,
            ),
            **dict.fromkeys(
                ("stream", "current_stream", "default_stream"), lambda *_, **__: _AtOnce()
            ),
            **dict.fromkeys(("device", "device_index"), _AtOnce),  # torch's are classes, too
            **dict.fromkeys(
                ("synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats"),
                lambda *_, **__: None,
            ),
        }

    def _cuda(self) -> dict[str, Any]:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        properties = SimpleNamespace(
            name="CPU", total_memory=memory, major=0, minor=0, multi_processor_count=1
        )
        return {
            **self._accelerator(),
            **dict.fromkeys(("Event", "Stream"), _AtOnce),
            "is_bf16_supported": lambda *_, **__: True,
            "is_current_stream_capturing": lambda: False,
            "get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "get_rng_state_all": list,
            "initial_seed": torch.initial_seed,
            "memory_summary": lambda *_, **__: "",
            "mem_get_info": lambda *_, **__: (bytes_left(), memory),
            "get_device_name": lambda *_: "CPU",
            "get_device_capability": lambda *_: (0, 0),
            "get_device_properties": lambda *_: properties,
            **dict.fromkeys(
                (
                    *("init", "manual_seed", "manual_seed_all", "set_rng_state"),
                    *("set_rng_state_all", "ipc_collect", "set_per_process_memory_fraction"),
                ),
                lambda *_, **__: None,
            ),
        }


cuda_on_cpu = CudaOnCpu()
"""Of this process."""


def begin_as_told() -> None:
    """In a process that a program with ``--cpu`` has started: do the same."""
    gpus = os.environ.get(AS_GPUS, "")
    if gpus.isdecimal():
        cuda_on_cpu.begin(int(gpus), said=True)
