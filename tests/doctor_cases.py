"""What the checks of the doctor are given, and are expected to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_notebook.model.doctor import Check, Verdict

OK, WARNING, FAILURE = Verdict.OK, Verdict.WARNING, Verdict.FAILURE

MIB, GIB = 2**20, 2**30

Look = Callable[[], Check | Iterable[Check]]


def expect(look: Look, verdict: Verdict, found: str, remedy: str = "") -> None:
    """The one check that `look` gives has this verdict, and says these things."""
    made = look()
    checks = [made] if isinstance(made, Check) else list(made)
    assert len(checks) == 1, checks
    (check,) = checks
    assert (check.verdict, found in check.found) == (verdict, True), check
    assert remedy in check.remedy, check
    assert bool(check.remedy) is (verdict is not OK), "what is wrong has a remedy"
    assert "\n" not in check.found + check.remedy


TORCH: Mapping[str, Any] = {
    "python": "3.12.1",
    "torch": "2.8.0+cu126",
    "torch_error": "",
    "ipyparallel": "9.0.1",
    "ipykernel": "6.30.0",
    "distributed": True,
    "gloo": True,
    "nccl": True,
    "nccl_version": "2.26.2",
    "cuda_build": "12.6",
    "cuda_driver": "560.35.03",
    "devices": 2,
    "cuda_error": "",
    "environment": {},
}

CPU_TORCH = {**TORCH, "torch": "2.8.0+cpu", "nccl": False, "nccl_version": "", "cuda_build": ""}


def ranks(number: int, **odd: Any) -> dict[int, dict[str, Any]]:
    """Facts of `number` ranks that agree; the last has `odd` instead."""
    made = {
        rank: {**TORCH, "environment": {"RANK": str(rank), "WORLD_SIZE": str(number)}}
        for rank in range(number)
    }
    made[number - 1].update(odd)
    return made


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)
