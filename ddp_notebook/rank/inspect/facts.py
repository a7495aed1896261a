"""The facts that `%ddp_doctor` needs of a rank: versions, backends, the environment.

It never raises for facts that it cannot find out. On a rank it does not initialise CUDA: forked
processes of the rank could not use it then.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

VARIABLES = (
    *("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK"),
    *("TORCH", "NCCL_", "GLOO_", "TP_SOCKET", "CUDA_", "OMP_", "KMP_", "GOMP_", "MKL_"),
)
"""The prefixes of the variables that distributed training reads."""

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def gather(probe_cuda: bool = False) -> dict[str, Any]:
    """Facts about this process, as a dict that JSON can hold.

    Versions are text, empty if a package is missing. `distributed`, `gloo` and `nccl` say whether
    this torch has them. `torch_error` says why torch cannot be imported. `devices` is the number of
    GPUs that torch can use, None without `probe_cuda`; `cuda_error` says why it can use none.
    """
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "executable": sys.executable,
        "python": platform.python_version(),
        "ipyparallel": _version_of("ipyparallel"),
        "ipykernel": _version_of("ipykernel"),
        "cuda_driver": driver_version(_DRIVER_FILE),
        "environment": excerpt(os.environ),
        "torch": "",
        "torch_error": "",
        "distributed": False,
        "gloo": False,
        "nccl": False,
        "nccl_version": "",
        "cuda_build": "",
        "devices": None,
        "cuda_error": "",
    }
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError, AttributeError) as error:  # no torch, a library of it, or a sham
        facts["torch_error"] = _brief(error)
        return facts
    facts["torch"] = str(getattr(torch, "__version__", ""))
    facts["cuda_build"] = torch.version.cuda or ""
    facts["distributed"] = dist.is_available()
    if dist.is_available():
        facts["gloo"], facts["nccl"] = dist.is_gloo_available(), dist.is_nccl_available()
    if facts["nccl"]:
        nccl: Any = import_module("torch.cuda.nccl")
        # It may be built without it, and the version's form has changed before.
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            facts["nccl_version"] = ".".join(str(part) for part in nccl.version())
    if probe_cuda:
        cuda: Any = import_module("torch.cuda")
        try:
            cuda.init()
            facts["devices"] = cuda.device_count()
        except (RuntimeError, AssertionError, OSError) as error:
            facts["devices"], facts["cuda_error"] = 0, _brief(error)
    return facts


def excerpt(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that distributed training reads."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(VARIABLES)}


def driver_version(path: Path) -> str:
    """The NVIDIA driver's version by its file in /proc; empty without one.

    The file's first line: ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …``.
    """
    try:
        words = path.read_text().partition("\n")[0].split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _brief(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
