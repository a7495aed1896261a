"""Brings torch.distributed up on this rank, one visible stage at a time.

A stage reads the rank's own environment when it begins, as torch does, so that what is
wrong there goes wrong here: see `settings.py`. Between two calls of `advance` the rank
runs nothing and can be looked at.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.model import (
    InitArguments,
    Stage,
    StageFailed,
    StageFinished,
    StagePaused,
    StageStarted,
)
from ddp_notebook.rank import control, events, state, torch_private
from ddp_notebook.rank.cells import runner as cells
from ddp_notebook.rank.collectives import observer
from ddp_notebook.rank.inspect import data_workers
from ddp_notebook.rank.setup import connecting, rendezvous, rescue, settings, sockets, subgroups
from ddp_notebook.rank.setup.errors import StageError
from ddp_notebook.rank.training import hooks

GROUP_TIMEOUT = timedelta(hours=24)
"""Time-out of collectives: long, because when torch's time-out fires the group is dead, and a
blocked cell can be interrupted instead."""
STAGES = tuple(Stage)[1:]
"""Those that a rank goes through itself; it is launched."""


@dataclass
class Plan:
    """What a rank is told. `settings` is what its environment has beyond what torchrun sets.

    `store` is session, or rank0: the rank whose RANK is 0 hosts it. `patient`: no stage
    times out, because somebody steps through them.
    """

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
    store: str = "session"
    patient: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def timeout(self) -> timedelta:
        """How long set-up may wait in one stage."""
        return GROUP_TIMEOUT if self.patient else timedelta(seconds=self.timeout_s)


_bringup: Bringup | None = None


def bring_up(plan: Mapping[str, Any]) -> bool:
    """Go through the stages after the launch; False when one failed (the session was told)."""
    prepare(plan, paused=False)
    return advance(Stage.VERIFIED.value)


def prepare(plan: Mapping[str, Any], paused: bool = True) -> None:
    """Begin a set-up anew: nothing of an earlier one is left. With `paused`, say it waits."""
    global _bringup
    runner = cells.attach()
    control.attach(getattr(runner.shell, "kernel", None))
    rendezvous.watch()
    observer.attach()
    hooks.attach()
    data_workers.attach()
    subgroups.before_all_are_forgotten()
    torch_private.forget_groups()
    # A traceback and the frames it shows hold each other, and the group in them its sockets and
    # threads: without this each `%ddp_abort` left some until Python happened to look for them.
    with torch_private.impatient_loaders():
        gc.collect()
    rescue.drop_stand_ins()
    state.current.give_up.clear()
    state.current.error = None
    rendezvous.begin_run()
    sockets.setup_begins()
    _bringup = Bringup(Plan(**plan))
    if paused:
        _hold(STAGES[0])


def advance(to: str) -> bool:
    """Go on through stage `to`; False when one failed (the session was told)."""
    if _bringup is None:
        raise RuntimeError("set-up was not prepared")
    state.current.held = ""
    while _bringup.left and _bringup.left[0].number <= Stage(to).number:
        if not _run_stage(_bringup.left[0], _bringup):
            rendezvous.log.inside = False
            return False
        _bringup.left.pop(0)
    if _bringup.left:
        _hold(_bringup.left[0])
    else:
        _bringup.publish_names()
    return True


def _hold(stage: Stage) -> None:
    state.current.held = stage.value
    events.current().emit(StagePaused, stage=stage)


def _run_stage(stage: Stage, steps: Bringup) -> bool:
    voice = events.current()
    voice.emit(StageStarted, stage=stage, waiting_for=steps.waiting_for(stage))
    failed: StageError | None = None
    state.current.running, state.current.doing = True, ""
    try:
        detail = steps.of(stage)()
    except StageError as error:
        failed = error
    except (RuntimeError, ValueError, OSError, KeyboardInterrupt) as error:
        # torch's own errors are RuntimeErrors; what they say goes to the user as it is.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = f"More in the rank's log: %ddp_output --ranks {steps.plan.rank} --log"
        failed = StageError(text[:500], remedy)
    finally:
        state.current.running, state.current.waiting_in, state.current.doing = False, "", ""
    if failed is not None:
        cause = failed.cause
        if state.current.give_up.is_set():
            cause = "given up (%ddp_abort)"
        state.current.error = state.Failure("StageError", cause, failed.category, failed.remedy)
        voice.emit(
            StageFailed, stage=stage, cause=cause, remedy=failed.remedy, category=failed.category
        )
        return False
    voice.emit(StageFinished, stage=stage, detail=detail, device=steps.plan.device, pid=os.getpid())
    return True


class Bringup:
    """The stages of one bring-up. Each method passes one stage and returns what it found."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.store: dist.Store | None = None
        self.left = list(STAGES)
        """The stages that were not passed yet."""
        self.came = InitArguments()
        """With what this rank came to the rendezvous."""

    def of(self, stage: Stage) -> Callable[[], str]:
        """What passes `stage`."""
        return {
            Stage.ENVIRONMENT: self.check_environment,
            Stage.STORE: self.reach_store,
            Stage.RENDEZVOUS: self.join_rendezvous,
            Stage.PROCESS_GROUP: self.make_group,
            Stage.VERIFIED: self.verify,
        }[stage]

    def waiting_for(self, stage: Stage) -> str:
        """On what a rank may have to wait in `stage`."""
        return {
            Stage.STORE: self.store_address,
            Stage.RENDEZVOUS: "the other ranks to join",
            Stage.PROCESS_GROUP: "the other ranks to connect",
            Stage.VERIFIED: "an all_reduce of all ranks",
        }.get(stage, "")

    @property
    def store_address(self) -> str:
        """Where the store is, as far as this rank knows."""
        if self.plan.init_method == "file":
            return self.came.path or self.plan.store_path
        port = self.came.master_port or self.plan.master_port
        return f"{self.came.master_addr or self.plan.master_addr}:{port}"

    def check_environment(self) -> str:
        """The variables torch reads can work; the device and the backend exist."""
        plan = self.plan
        settings.apply(plan)
        backend = settings.backend(plan)
        self.came = settings.read(plan, backend)
        settings.check(self.came, plan)
        rendezvous.enter(self.came)
        if "nccl" in backend and not dist.is_nccl_available():
            raise StageError("This torch was built without NCCL.", "%ddp_init --backend gloo")
        torch.set_num_threads(plan.threads)
        self._claim_device()
        return f"RANK={self.came.rank} WORLD_SIZE={self.came.world_size}"

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
        """The store answers. Its address is read again: it may have been mended meanwhile."""
        plan = self.plan
        self.came = settings.read(plan, self.came.backend)
        settings.check(self.came, plan)
        rendezvous.enter(self.came)
        store = connecting.open_store(self.came, plan)
        store.set_timeout(plan.timeout)
        self.store = dist.PrefixStore(f"ddp_notebook/{plan.generation}", store)
        return self.store_address

    def join_rendezvous(self) -> str:
        """Every rank has written its key."""
        assert self.store is not None
        size = self.world_size
        self.store.set(f"join/{self.came.rank}", f"{os.getpid()}")
        connecting.await_keys(self.store, [f"join/{rank}" for rank in range(size)], self.plan)
        return f"{size} of {size} ranks"

    @property
    def world_size(self) -> int:
        """The number of ranks that this rank believes in."""
        return self.came.world_size or self.plan.world_size

    def make_group(self) -> str:
        """torch's default process group exists on this rank."""
        assert self.store is not None
        state.current.waiting_in = "process-group"
        rendezvous.original()(
            backend=self.came.backend,
            store=self.store,
            rank=self.came.rank,
            world_size=self.world_size,
            timeout=self.plan.timeout,
        )
        rendezvous.leave()
        sockets.setup_ended()
        return dist.get_backend()

    def verify(self) -> str:
        """One all_reduce gives, on this rank, the sum it must give."""
        plan = self.plan
        state.current.waiting_in = "collective"
        value = torch.full((1024,), float(dist.get_rank() + 1), device=plan.device)
        dist.all_reduce(value)
        expected = self.world_size * (self.world_size + 1) / 2
        if not bool((value == expected).all()):
            raise StageError(
                f"The all_reduce gave {value[0].item():g}, not {expected:g}.",
                "%ddp_restart; if it happens again, the backend or the network corrupts data",
            )
        torch_private.set_group_timeout(GROUP_TIMEOUT)
        assert self.store is not None
        again = subgroups.make_again(self.store, dist.get_rank(), self.world_size)
        return " · ".join(filter(None, (f"all_reduce gave {expected:g}", again)))

    def publish_names(self) -> None:
        """The names every cell finds; DDP objects that are left go on with the new group."""
        hooks.reattach()
        cells.publish(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=torch.device(self.plan.device),
            torch=torch,
            dist=dist,
            DDP=torch.nn.parallel.DistributedDataParallel,
        )
