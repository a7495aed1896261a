"""Brings torch.distributed up on this rank, one visible stage at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.agent import beacon, cells, torch_private
from ddp_notebook.model import Stage, StageFailed, StageFinished, StageStarted, name_ranks

GROUP_TIMEOUT = timedelta(hours=24)
"""Time-out of collectives: long, because when torch's time-out fires the group is dead, and a
blocked cell can be interrupted instead."""


class StageError(Exception):
    """A stage failed: why, and what to type."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


@dataclass
class Plan:
    """What every rank is told; the same on all but for `rank`."""

    rank: int
    world_size: int
    backend: str
    device: str
    init_method: str
    master_addr: str
    master_port: int
    store_path: str
    generation: int
    timeout_s: float
    threads: int

    @property
    def timeout(self) -> timedelta:
        """How long set-up may wait in one stage."""
        return timedelta(seconds=self.timeout_s)


def bring_up(plan: Mapping[str, Any]) -> bool:
    """Go through the stages after the launch; False when one failed (the session was told)."""
    steps = Bringup(Plan(**plan))
    cells.attach()
    torch_private.forget_groups()
    for stage, step, waiting_for in (
        (Stage.ENVIRONMENT, steps.check_environment, ""),
        (Stage.STORE, steps.reach_store, steps.store_address),
        (Stage.RENDEZVOUS, steps.join_rendezvous, "the other ranks to join"),
        (Stage.PROCESS_GROUP, steps.make_group, "the other ranks to connect"),
        (Stage.VERIFIED, steps.verify, "an all_reduce of all ranks"),
    ):
        if not _run_stage(stage, step, waiting_for, steps.plan):
            torch_private.forget_groups()
            return False
    steps.publish_names()
    return True


def _run_stage(stage: Stage, step: Callable[[], str], waiting_for: str, plan: Plan) -> bool:
    voice = beacon.current()
    voice.emit(StageStarted, stage=stage, waiting_for=waiting_for)
    try:
        detail = step()
    except StageError as error:
        voice.emit(StageFailed, stage=stage, cause=error.cause, remedy=error.remedy)
        return False
    except (RuntimeError, ValueError, OSError, KeyboardInterrupt) as error:
        # torch's own errors are RuntimeErrors; what they say goes to the user as it is.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = f"More in the rank's log: %ddp_output --ranks {plan.rank} --log"
        voice.emit(StageFailed, stage=stage, cause=text[:500], remedy=remedy)
        return False
    voice.emit(StageFinished, stage=stage, detail=detail, device=plan.device, pid=os.getpid())
    return True


class Bringup:
    """The stages of one bring-up. Each method passes one stage and returns what it found."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.store: dist.Store | None = None

    @property
    def store_address(self) -> str:
        """Where the store is."""
        if self.plan.init_method == "file":
            return self.plan.store_path
        return f"{self.plan.master_addr}:{self.plan.master_port}"

    def check_environment(self) -> str:
        """The variables torch reads are what they must be; the device and the backend exist."""
        plan = self.plan
        for name, wanted in (("RANK", plan.rank), ("WORLD_SIZE", plan.world_size)):
            found = os.environ.get(name, "")
            if not re.fullmatch(r"\d+", found) or int(found) != wanted:
                raise StageError(
                    f"{name} is {found or 'not set'}, but this is rank {plan.rank} of "
                    f"{plan.world_size}.",
                    f"Something changed {name} on this rank: %ddp_restart --ranks {plan.rank}",
                )
        if plan.init_method != "file":
            os.environ["MASTER_ADDR"] = plan.master_addr
            os.environ["MASTER_PORT"] = str(plan.master_port)
        if "nccl" in plan.backend and not dist.is_nccl_available():
            raise StageError("This torch was built without NCCL.", "%ddp_init --backend gloo")
        torch.set_num_threads(plan.threads)
        self._claim_device()
        return f"RANK={plan.rank} WORLD_SIZE={plan.world_size}"

    def _claim_device(self) -> None:
        if not self.plan.device.startswith("cuda"):
            return
        if not torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
            raise StageError(
                f"No CUDA device is usable (CUDA_VISIBLE_DEVICES={visible}).",
                "%ddp_init --device cpu, or check the GPU with nvidia-smi",
            )
        torch.cuda.set_device(torch.device(self.plan.device))

    def reach_store(self) -> str:
        """The store answers."""
        plan = self.plan
        if plan.init_method == "file":
            self.store = dist.FileStore(plan.store_path, plan.world_size)
        else:
            self.store = dist.TCPStore(
                plan.master_addr,
                plan.master_port,
                None,
                is_master=False,
                timeout=plan.timeout,
                wait_for_workers=False,
            )
        self.store.set_timeout(plan.timeout)
        self.store = dist.PrefixStore(f"ddp_notebook/{plan.generation}", self.store)
        return self.store_address

    def join_rendezvous(self) -> str:
        """Every rank has written its key."""
        assert self.store is not None
        plan = self.plan
        self.store.set(f"join/{plan.rank}", str(os.getpid()))
        keys = [f"join/{rank}" for rank in range(plan.world_size)]
        try:
            self.store.wait(keys, plan.timeout)
        except RuntimeError as error:
            absent = [r for r, key in enumerate(keys) if not self.store.check([key])]
            who = name_ranks(absent) if absent else "a rank"
            raise StageError(
                f"{who.capitalize()} did not join within {plan.timeout_s:g} s.",
                "%ddp_status shows where they are; %ddp_init --timeout allows more time",
            ) from error
        return f"{plan.world_size} of {plan.world_size} ranks"

    def make_group(self) -> str:
        """torch's default process group exists on this rank."""
        assert self.store is not None
        plan = self.plan
        dist.init_process_group(
            backend=plan.backend,
            store=self.store,
            rank=plan.rank,
            world_size=plan.world_size,
            timeout=plan.timeout,
        )
        return dist.get_backend()

    def verify(self) -> str:
        """One all_reduce gives, on this rank, the sum it must give."""
        plan = self.plan
        value = torch.full((1024,), float(plan.rank + 1), device=plan.device)
        dist.all_reduce(value)
        expected = plan.world_size * (plan.world_size + 1) / 2
        if not bool((value == expected).all()):
            raise StageError(
                f"The all_reduce gave {value[0].item():g}, not {expected:g}.",
                "%ddp_restart; if it happens again, the backend or the network corrupts data",
            )
        torch_private.set_group_timeout(GROUP_TIMEOUT)
        return f"all_reduce gave {expected:g}"

    def publish_names(self) -> None:
        """The names every cell finds."""
        plan = self.plan
        cells.publish(
            rank=plan.rank,
            world_size=plan.world_size,
            device=torch.device(plan.device),
            torch=torch,
            dist=dist,
            DDP=torch.nn.parallel.DistributedDataParallel,
        )
