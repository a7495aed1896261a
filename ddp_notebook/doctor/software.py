"""Checks of software: versions, torch and its backends, whether the ranks agree."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddp_notebook.model import name_ranks, verb
from ddp_notebook.model.doctor import Check

Facts = Mapping[str, Any]
"""What `rank.inspect.facts.gather` returned in one process."""

OLDEST = {"python": "3.11", "torch": "2.6", "ipyparallel": "9.0", "ipykernel": "6.29"}
"""The oldest versions that are supported."""

_COMPARED = {
    "python": "Python",
    "torch": "torch",
    "ipyparallel": "ipyparallel",
    "ipykernel": "ipykernel",
    "nccl_version": "NCCL",
    "cuda_build": "torch's CUDA",
    "cuda_driver": "the CUDA driver",
}
"""Facts that must be the same on every rank, and their names for people."""

_HARMLESS = {"test", "this", "antigravity", "idlelib", "turtledemo", "lib2to3"}
"""Standard modules that hardly any program imports, so that a file may have their names."""

_ALIKE = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
"""Variables that must be equal, or the ranks do not meet."""
_OWN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES")
"""Variables that may differ between ranks."""


def check_version(distribution: str, version: str) -> Check:
    """The installed `version` of `distribution` is supported; empty when it is not installed."""
    name = "Python" if distribution == "python" else distribution
    oldest = OLDEST[distribution]
    install = f'{sys.executable} -m pip install "{distribution}>={oldest}"'
    if distribution == "python":
        install = f"Make a virtual environment with Python {oldest} or newer."
    if not version:
        return Check.failure(name, "not installed", install)
    if _number(version) < _number(oldest):
        text = f"{version} is older than {oldest}, the oldest supported"
        return Check.failure(name, text, install)
    return Check.ok(name, version)


def check_torch(facts: Facts) -> Check:
    """torch can be imported, is new enough and has torch.distributed."""
    if facts.get("torch_error"):
        return Check.failure(
            "torch",
            f"cannot be imported: {facts['torch_error']}",
            f"See the whole error: {sys.executable} -c 'import torch'. "
            f"Install it: {sys.executable} -m pip install torch",
        )
    version = check_version("torch", str(facts.get("torch", "")))
    if version.remedy:
        return version
    if not facts.get("distributed"):
        return Check.failure(
            "torch",
            f"{facts['torch']} was built without torch.distributed (USE_DISTRIBUTED=0)",
            f"Install a build from pytorch.org: {sys.executable} -m pip install torch",
        )
    build = f"for CUDA {facts['cuda_build']}" if facts.get("cuda_build") else "without CUDA"
    driver = f", driver {facts['cuda_driver']}" if facts.get("cuda_driver") else ""
    return Check.ok("torch", f"{facts['torch']}, built {build}{driver}")


def check_backend(facts: Facts, backend: str, on_gpus: bool) -> Check:
    """torch has the backend that is asked for; with auto, those that `%ddp_init` would choose.

    `on_gpus` says whether ranks would get a GPU each.
    """
    name = f"backend {backend}"
    available = [name for name in ("gloo", "nccl") if facts.get(name)]
    shown = f"torch has {' and '.join(available) or 'neither gloo nor nccl'}"
    if facts.get("nccl_version"):
        shown += f" {facts['nccl_version']}"
    install = f"Install a build from pytorch.org: {sys.executable} -m pip install torch"
    if backend != "auto" and backend not in available:
        use = available[0] if available else ""
        remedy = f"Use what it has: --backend {use}. Or: {install}" if use else install
        return Check.failure(name, f"{shown}, not {backend}", remedy)
    if not available or (backend == "auto" and "gloo" not in available and not on_gpus):
        return Check.failure(name, f"{shown}; ranks on CPUs need gloo", install)
    if backend == "auto" and len(available) == 1 and on_gpus:
        return Check.warning(
            name,
            f"{shown}; on GPUs %ddp_init needs both (cpu:gloo,cuda:nccl)",
            f"Use the one it has: --backend {available[0]}. Or: {install}",
        )
    return Check.ok(name, shown)


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.6.0+cpu`` is 2, 6, 0."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


# --------------------------------------------------------------------------- between ranks


def check_ranks(rank_facts: Mapping[int, Facts]) -> tuple[Check, ...]:
    """The ranks run the same software with the same settings, and each has its own RANK."""
    if not rank_facts:
        return ()
    return (
        _same_versions(rank_facts),
        _own_numbers(rank_facts),
        _same_variables(rank_facts),
    )


def _same_versions(rank_facts: Mapping[int, Facts]) -> Check:
    name, who = "versions on ranks", name_ranks(rank_facts)
    differing = []
    for key, label in _COMPARED.items():
        values = {rank: str(facts.get(key) or "") for rank, facts in rank_facts.items()}
        if len(set(values.values())) > 1:
            differing.append(f"{label}: {_minority_first(values)}")
    if differing:
        return Check.failure(
            name,
            "; ".join(differing),
            "Install the same everywhere, then start new processes: %ddp_init --replace",
        )
    return Check.ok(name, f"{who}: all the same")


def _own_numbers(rank_facts: Mapping[int, Facts]) -> Check:
    """RANK on each rank is that rank's number."""
    name = "RANK on ranks"
    values = {rank: _variables(facts).get("RANK", "unset") for rank, facts in rank_facts.items()}
    wrong = {rank: value for rank, value in values.items() if value != str(rank)}
    if wrong:
        found = ", ".join(f"RANK is {value} on rank {rank}" for rank, value in wrong.items())
        numbers = ",".join(str(rank) for rank in wrong)
        return Check.failure(
            name,
            f"{found}: a process group built from the environment would wait for ever",
            f"Code on the rank changed it. Start new processes: %ddp_restart --ranks {numbers}",
        )
    return Check.ok(name, "each rank has its own number")


def _same_variables(rank_facts: Mapping[int, Facts]) -> Check:
    """Variables of distributed training are the same on all ranks."""
    name = "variables on ranks"
    environments = {rank: _variables(facts) for rank, facts in rank_facts.items()}
    names = {name for environment in environments.values() for name in environment} - set(_OWN)
    differing = {
        variable: _minority_first({r: env.get(variable, "") for r, env in environments.items()})
        for variable in sorted(names)
        if len({env.get(variable) for env in environments.values()}) > 1
    }
    if not differing:
        return Check.ok(name, f"{name_ranks(rank_facts)}: all the same")
    found = "; ".join(f"{variable}: {ranks}" for variable, ranks in differing.items())
    remedy = "Set the same on all ranks (%%ddp, os.environ), or start new ones: %ddp_restart"
    if any(variable in _ALIKE for variable in differing):
        return Check.failure(name, found, remedy)
    return Check.warning(name, found, remedy)


def _variables(facts: Facts) -> Mapping[str, str]:
    environment: Mapping[str, str] = facts.get("environment") or {}
    return environment


def _minority_first(values: Mapping[int, str]) -> str:
    """Which ranks have which value: ``rank 2 has 2.5.1, ranks 0-1,3 have 2.6.0``.

    Groups of the same size are in the order of their ranks.
    """
    groups = [(v, [rank for rank in values if values[rank] == v]) for v in set(values.values())]
    groups.sort(key=lambda group: (len(group[1]), group[1]))
    return ", ".join(f"{verb(ranks, 'has', 'have')} {value or 'none'}" for value, ranks in groups)


# --------------------------------------------------------------------------- names of files


def check_shadowing(files: Iterable[str], needed: Collection[str]) -> Check:
    """No file of the working folder hides a module of the same name.

    `files` are the module names of the working folder (``torch`` for torch.py), `needed` those
    of installed packages that a rank imports.
    """
    name = "file names"
    here = set(files)
    ours = sorted(here & set(needed))
    if ours:
        return Check.failure(
            name,
            f"{', '.join(ours)} in this folder is imported instead of the package of that name",
            f"Rename it: mv {ours[0]}.py my_{ours[0]}.py",
        )
    standard = sorted((here & sys.stdlib_module_names) - _HARMLESS)
    if standard:
        return Check.warning(
            name,
            f"{', '.join(standard)} in this folder may be imported instead of Python's own",
            f"Rename it: mv {standard[0]}.py my_{standard[0]}.py",
        )
    return Check.ok(name, "no file here hides a module")
