"""Checks of software: versions, torch, its backends, whether ranks agree, environment variables."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_notebook.model import name_ranks, verb
from ddp_notebook.model.doctor import Check, Verdict

Facts = Mapping[str, Any]
"""What `rank.inspect.facts.gather` returned in one process."""

OLDEST = {"python": "3.11", "torch": "2.8", "ipyparallel": "9.0", "ipykernel": "6.29"}
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
    """Return the leading numbers of a version: ``2.6.0+cpu`` is 2, 6, 0."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


# --------------------------------------------------------------------------- between ranks


def check_ranks(rank_facts: Mapping[int, Facts]) -> tuple[Check, ...]:
    """The ranks run the same software with the same settings, and each has its own RANK."""
    if not rank_facts:
        return ()
    all_same = f"{name_ranks(rank_facts)}: all the same"
    environments = {rank: facts.get("environment") or {} for rank, facts in rank_facts.items()}
    versions = {
        label: {rank: str(facts.get(key) or "") for rank, facts in rank_facts.items()}
        for key, label in _COMPARED.items()
    }
    names = sorted({name for of_rank in environments.values() for name in of_rank} - {*_OWN})
    variables = {
        name: {rank: of_rank.get(name, "") for rank, of_rank in environments.items()}
        for name in names
    }
    checks = []
    if found := _differing(versions):
        remedy = "Install the same everywhere, then start new processes: %ddp_init --replace"
        checks.append(Check.failure("versions on ranks", "; ".join(found.values()), remedy))
    else:
        checks.append(Check.ok("versions on ranks", all_same))
    numbers = {rank: of_rank.get("RANK", "unset") for rank, of_rank in environments.items()}
    wrong = {rank: number for rank, number in numbers.items() if number != str(rank)}
    if wrong:
        text = ", ".join(f"RANK is {number} on rank {rank}" for rank, number in wrong.items())
        text += ": a process group built from the environment would wait forever"
        remedy = "Code on the rank changed it. Start new processes: %ddp_restart --ranks "
        checks.append(Check.failure("RANK on ranks", text, remedy + ",".join(map(str, wrong))))
    else:
        checks.append(Check.ok("RANK on ranks", "each rank has its own number"))
    if found := _differing(variables):
        verdict = Verdict.FAILURE if found.keys() & {*_ALIKE} else Verdict.WARNING
        remedy = "Set the same on all ranks (%%ddp, os.environ), or start new ones: %ddp_restart"
        checks.append(Check("variables on ranks", verdict, "; ".join(found.values()), remedy))
    else:
        checks.append(Check.ok("variables on ranks", all_same))
    return tuple(checks)


def _differing(named: Mapping[str, Mapping[int, str]]) -> dict[str, str]:
    """Return of what differs between ranks which have which, the fewest ranks first.

    As ``torch: rank 2 has 2.5.1, ranks 0-1,3 have 2.6.0``.
    """
    texts = {}
    for name, values in named.items():
        groups = [(v, [rank for rank in values if values[rank] == v]) for v in set(values.values())]
        groups.sort(key=lambda group: (len(group[1]), group[1]))
        shown = (f"{verb(ranks, 'has', 'have')} {value or 'none'}" for value, ranks in groups)
        if len(groups) > 1:
            texts[name] = f"{name}: {', '.join(shown)}"
    return texts


# --------------------------------------------------------------------------- variables

_RENDEZVOUS = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)
_NUMBERS = ("MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def check_rendezvous(environment: Mapping[str, str]) -> Check:
    """The rendezvous variables are not set in the environment that ranks are started from.

    `%ddp_init` sets them for its ranks, but a script that is started here reads these. It is a
    failure when no process group can be built with them.
    """
    name = "rendezvous variables"
    left = [v for v in _RENDEZVOUS if v in environment]
    if not left:
        return Check.ok(name, "none is set")
    remedy = f"Before Jupyter starts: unset {' '.join(left)}. In the notebook: import os; "
    remedy += f'os.environ.pop("{left[0]}")' + ", and likewise the others" * (len(left) > 1)
    wrong = list(_mistakes(environment))
    if wrong:
        found = f"{'; '.join(wrong)}. No script started here can build a process group"
        return Check.failure(name, found, remedy)
    shown = " ".join(f"{name}={environment[name]}" for name in left)
    in_job = "TORCHELASTIC_RUN_ID" in environment
    whose = "set by torchrun, which started this process" if in_job else "left over"
    return Check.warning(
        name,
        f"{whose}: {shown}. %ddp_init sets them anew for its ranks; a script started here reads "
        "these",
        remedy,
    )


def port_of(environment: Mapping[str, str]) -> int:
    """MASTER_PORT as a number; 0 when it is not set or not a port."""
    text = environment.get("MASTER_PORT", "").strip()
    return int(text) if re.fullmatch(r"\d{1,5}", text) and int(text) <= 65535 else 0


def _mistakes(environment: Mapping[str, str]) -> Iterator[str]:
    """What cannot work, a clause for each mistake."""
    if not environment.get("MASTER_ADDR", "here").strip():
        yield "MASTER_ADDR is empty"
    numbers: dict[str, int] = {}
    for name in _NUMBERS:
        text = environment.get(name)
        if text is None:
            continue
        if not re.fullmatch(r"\s*\d+\s*", text):
            yield f"{name}={text} is not a number of 0 or more"
        else:
            numbers[name] = int(text)
    if not 1 <= numbers.get("MASTER_PORT", 1) <= 65535:
        yield f"MASTER_PORT={numbers['MASTER_PORT']} is not a port (1 to 65535)"
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if numbers.get(name) == 0:
            yield f"{name} must be at least 1, not 0"
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if 0 < numbers.get(size, 0) <= numbers.get(rank, 0):
            last = numbers[size] - 1
            yield f"{rank}={numbers[rank]} with {size}={numbers[size]}: ranks are 0 to {last}"


_OLD_NAME = "the old name of TORCH_{0}: torch warns of it and will stop reading it"
_PINS = "every rank binds its threads to the same cores, and the other cores stay idle"
_TROUBLES = {
    "TORCH_DISTRIBUTED_DEBUG": (
        "DDP on gloo crashes with it (segmentation fault), and small collectives take several "
        "times as long",
        "Set it to INFO or unset it.",
    ),
    "TORCHELASTIC_USE_AGENT_STORE": (
        "left over from a torchrun job: rank 0 of a script started here opens no store, and "
        "all ranks wait for one",
        "Unset it. %ddp_init sets it for its ranks, because the session hosts their store.",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        "every CUDA kernel runs synchronously: communication cannot overlap with computation, "
        "and timings mean nothing",
        "Unset it unless you are looking for the line of a CUDA error.",
    ),
    **dict.fromkeys(
        ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"),
        (_OLD_NAME, "Set TORCH_{0} instead and unset {0}."),
    ),
    **dict.fromkeys(("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"), (_PINS, "Unset {0}.")),
}
"""Variables that make trouble while they are set: what happens then, and what to do."""


def check_known_trouble(environment: Mapping[str, str]) -> tuple[Check, ...]:
    """A warning for each variable that is known to make trouble; a single ok if there is none."""
    warnings = []
    for name, (effect, remedy) in _TROUBLES.items():
        value = environment.get(name, "").strip()
        if name == "TORCH_DISTRIBUTED_DEBUG":
            makes_trouble = value.upper() == "DETAIL"
        elif name == "TORCHELASTIC_USE_AGENT_STORE":
            makes_trouble = value == "True"  # torch compares with exactly this text
        elif name.startswith("NCCL_"):
            makes_trouble = name in environment
        else:
            makes_trouble = value.lower() not in ("", "0", "false", "disabled", "none")
        if makes_trouble:
            found = f"{environment[name]}: {effect.format(name)}"
            warnings.append(Check.warning(name, found, remedy.format(name)))
    return tuple(warnings) or (Check.ok("other variables", "none that is known to make trouble"),)
