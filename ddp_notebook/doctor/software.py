"""Checks of software: versions, torch and its backends, whether the ranks agree."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddp_notebook.model import name_ranks
from ddp_notebook.model.doctor import Check

Facts = Mapping[str, Any]
"""What `agent.facts.gather` found in one process."""

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
"""Facts that must be the same on every rank, and what they are called."""

_HARMLESS = {"test", "this", "antigravity", "idlelib", "turtledemo", "lib2to3"}
"""Names of Python's own modules that nobody imports, so that a file may have them."""

_ALIKE = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
"""Variables without which ranks do not meet unless they are equal."""
_OWN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES")
"""Variables of which each rank has its own."""


def check_version(distribution: str, found: str) -> Check:
    """`distribution` is here in a supported version; `found` is empty when it is absent."""
    name = "Python" if distribution == "python" else distribution
    oldest = OLDEST[distribution]
    install = f'{sys.executable} -m pip install "{distribution}>={oldest}"'
    if distribution == "python":
        install = f"Make a virtual environment with Python {oldest} or newer."
    if not found:
        return Check.failure(name, "not installed", install)
    if _number(found) < _number(oldest):
        return Check.failure(name, f"{found} is older than {oldest}, the oldest supported", install)
    return Check.ok(name, found)


def check_torch(facts: Facts) -> Check:
    """torch can be imported, is new enough and has torch.distributed."""
    if facts.get("torch_error"):
        return Check.failure(
            "torch",
            f"cannot be imported: {facts['torch_error']}",
            f"See all of it: {sys.executable} -c 'import torch'. "
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
    """torch has the backend that is asked for; with auto, those it would take.

    `on_gpus` says whether ranks would get a GPU each.
    """
    name = f"backend {backend}"
    there = [each for each in ("gloo", "nccl") if facts.get(each)]
    shown = f"torch has {' and '.join(there) or 'neither gloo nor nccl'}"
    if facts.get("nccl_version"):
        shown += f" {facts['nccl_version']}"
    install = f"Install a build from pytorch.org: {sys.executable} -m pip install torch"
    if backend != "auto" and backend not in there:
        use = there[0] if there else ""
        remedy = f"Use what it has: --backend {use}. Or: {install}" if use else install
        return Check.failure(name, f"{shown}, not {backend}", remedy)
    if not there or (backend == "auto" and "gloo" not in there and not on_gpus):
        return Check.failure(name, f"{shown}; ranks on CPUs need gloo", install)
    if backend == "auto" and len(there) == 1 and on_gpus:
        return Check.warning(
            name,
            f"{shown}; on GPUs %ddp_init wants both (cpu:gloo,cuda:nccl)",
            f"Ask for the one there is: --backend {there[0]}. Or: {install}",
        )
    return Check.ok(name, shown)


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.6.0+cpu`` is 2, 6, 0."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


# --------------------------------------------------------------------------- between ranks


def check_ranks(rank_facts: Mapping[int, Facts]) -> tuple[Check, ...]:
    """The ranks run the same software, with the same settings, and each knows its number."""
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
    for key, called in _COMPARED.items():
        said = {rank: str(facts.get(key) or "") for rank, facts in rank_facts.items()}
        if len(set(said.values())) > 1:
            differing.append(f"{called}: {_odd_ones(said)}")
    if differing:
        return Check.failure(
            name,
            "; ".join(differing),
            "Install the same everywhere, then start new processes: %ddp_shutdown, then %ddp_init",
        )
    return Check.ok(name, f"{who}: all the same")


def _own_numbers(rank_facts: Mapping[int, Facts]) -> Check:
    """RANK on each rank is that rank."""
    name = "RANK on ranks"
    said = {rank: _variables(facts).get("RANK", "unset") for rank, facts in rank_facts.items()}
    wrong = {rank: value for rank, value in said.items() if value != str(rank)}
    if wrong:
        found = ", ".join(f"RANK is {value} on rank {rank}" for rank, value in wrong.items())
        numbers = ",".join(str(rank) for rank in wrong)
        return Check.failure(
            name,
            f"{found}: a group built from the environment would wait for somebody who never comes",
            f"Something changed it there. New processes: %ddp_restart --ranks {numbers}",
        )
    return Check.ok(name, "each rank has its own number")


def _same_variables(rank_facts: Mapping[int, Facts]) -> Check:
    """What ranks must agree on in their environment is equal."""
    name = "variables on ranks"
    environments = {rank: _variables(facts) for rank, facts in rank_facts.items()}
    names = {each for environment in environments.values() for each in environment} - set(_OWN)
    differing = {
        each: _odd_ones({rank: env.get(each, "") for rank, env in environments.items()})
        for each in sorted(names)
        if len({env.get(each) for env in environments.values()}) > 1
    }
    if not differing:
        return Check.ok(name, f"{name_ranks(rank_facts)}: all the same")
    found = "; ".join(f"{each}: {odd}" for each, odd in differing.items())
    remedy = "Set them alike on all ranks (%%ddp, os.environ), or start anew: %ddp_restart"
    if any(each in _ALIKE for each in differing):
        return Check.failure(name, found, remedy)
    return Check.warning(name, found, remedy)


def _variables(facts: Facts) -> Mapping[str, str]:
    environment: Mapping[str, str] = facts.get("environment") or {}
    return environment


def _odd_ones(said: Mapping[int, str]) -> str:
    """Which rank has what, the odd ones first: ``rank 2 has 2.5.1, ranks 0-1,3 have 2.6.0``.

    Without a majority nobody is odd: the order is then that of the ranks.
    """
    counts = Counter(said.values())
    groups = [(value, [r for r, v in said.items() if v == value]) for value in counts]
    groups.sort(key=lambda group: (len(group[1]), group[1]))
    return ", ".join(f"{_who_has(ranks)} {value or 'none'}" for value, ranks in groups)


def _who_has(ranks: Collection[int]) -> str:
    """``rank 2 has``, ``ranks 0-1,3 have``."""
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


# --------------------------------------------------------------------------- names of files


def check_shadowing(files: Iterable[str], needed: Collection[str]) -> Check:
    """No file of the working folder stands before a module of the same name.

    `files` are module names that the working folder offers (``torch`` for torch.py), and
    `needed` those of installed packages that a rank imports.
    """
    name = "file names"
    here = set(files)
    ours = sorted(here & set(needed))
    if ours:
        return Check.failure(
            name,
            f"{', '.join(ours)} in this folder is imported instead of the package of that name",
            f"Give it another name: mv {ours[0]}.py my_{ours[0]}.py",
        )
    standard = sorted((here & sys.stdlib_module_names) - _HARMLESS)
    if standard:
        return Check.warning(
            name,
            f"{', '.join(standard)} in this folder may be imported instead of Python's own",
            f"Give it another name: mv {standard[0]}.py my_{standard[0]}.py",
        )
    return Check.ok(name, "no file here hides a module")
