"""Brings torch.distributed up on this rank, one visible stage at a time.

A stage reads the rank's own environment when it begins, as torch does, so that mistakes there have
the same effect: see `settings.py`. Between two calls of `advance` the rank is idle and can be
inspected.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.launch.process_ids import own_process_id
from ddp_notebook.model import (
    InitArguments,
    Stage,
    StageFailed,
    StageFinished,
    StagePaused,
    StageStarted,
)
from ddp_notebook.rank import gpu, torch_private
from ddp_notebook.rank.calls import SetUpPlan
from ddp_notebook.rank.collectives.time_limits import wait_long
from ddp_notebook.rank.component import Lifecycle
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.main_thread import Failure
from ddp_notebook.rank.setup import rendezvous, settings
from ddp_notebook.rank.setup.connecting import StoreClient
from ddp_notebook.rank.setup.errors import StageError
from ddp_notebook.rank.setup.settings import Settings
from ddp_notebook.rank.watched import Watched

STAGES = tuple(Stage)[1:]
"""The stages after the launch, which a rank passes itself."""


class SetUp:
    """The setups of this rank, one after the other.

    `verified` is called with the names that cells find, once a setup has passed all stages.
    """

    def __init__(
        self,
        life: Lifecycle,
        events: EventSender,
        watched: Watched,
        verified: Callable[[dict[str, Any]], None],
    ) -> None:
        self._life = life
        self._events = events
        self._watched = watched
        self._main_thread = watched.main_thread
        self._verified = verified
        self._settings = Settings()
        self._bring_up: BringUp | None = None

    def bring_up(self, plan: SetUpPlan) -> bool:
        """Pass the stages after the launch; False if one failed (the session was told)."""
        self._begin(plan)
        return self.advance(Stage.VERIFIED)

    def prepare(self, plan: SetUpPlan) -> None:
        """Begin a setup, and pause before its first stage."""
        self._begin(plan)
        self._pause_before(STAGES[0])

    def _begin(self, plan: SetUpPlan) -> None:
        """Begin a setup, after removing everything of an earlier one."""
        self._life.setup_begins()
        if self._bring_up is not None:
            # A traceback and its frames refer to each other, and the group in them has sockets and
            # threads: without this, each `%ddp_abort` left some until Python's next collection.
            with torch_private.impatient_loaders():
                gc.collect()
        self._bring_up = BringUp(plan, self._watched, self._settings)

    def advance(self, to: Stage) -> bool:
        """Continue through stage `to`; False if one failed (the session was told)."""
        bring_up = self._bring_up
        if bring_up is None:
            raise RuntimeError("setup was not prepared")
        main_thread, events, plan = self._main_thread, self._events, bring_up.plan
        main_thread.paused_before = ""
        while bring_up.left and bring_up.left[0].number <= to.number:
            stage, failed = bring_up.left[0], None
            pass_stage, waiting_for = bring_up.step(stage)
            events.emit(StageStarted, stage=stage, waiting_for=waiting_for)
            main_thread.running, main_thread.doing = True, ""
            try:
                detail = pass_stage()
            except StageError as error:
                failed = error
            except (RuntimeError, ValueError, OSError, KeyboardInterrupt) as error:
                # torch's own errors are RuntimeErrors; their text is shown to the user unchanged.
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                remedy = f"More in the rank's log: %ddp_output --ranks {plan.rank} --log"
                failed = StageError(text[:500], remedy)
            finally:
                main_thread.running, main_thread.waiting_in, main_thread.doing = False, "", ""
            if failed is not None:
                aborted = main_thread.abort.is_set()
                cause = "aborted (%ddp_abort)" if aborted else failed.cause
                category, remedy = failed.category, failed.remedy
                main_thread.error = Failure("StageError", cause, category, remedy)
                events.emit(StageFailed, stage=stage, cause=cause, remedy=remedy, category=category)
                self._watched.init_calls.calls.inside = False
                self._watched.sockets.setup_ended()
                return False
            device, pid = plan.device, own_process_id()
            events.emit(StageFinished, stage=stage, detail=detail, device=device, pid=pid)
            bring_up.left.pop(0)
        if bring_up.left:
            self._pause_before(bring_up.left[0])
        else:
            self._verified(bring_up.names())
        return True

    def _pause_before(self, stage: Stage) -> None:
        self._main_thread.paused_before = stage.value
        self._events.emit(StagePaused, stage=stage)


class BringUp:
    """The stages of one setup. Each method passes one stage and returns what it found."""

    def __init__(self, plan: SetUpPlan, watched: Watched, own_settings: Settings) -> None:
        self.plan = plan
        self.left = list(STAGES)
        """The stages not passed yet."""
        self._watched = watched
        self._store_client = StoreClient(watched.main_thread, watched.resolver)
        self._settings = own_settings
        self._store: dist.Store | None = None
        self._arguments = InitArguments()
        """The init arguments of this rank, by its environment."""

    def step(self, stage: Stage) -> tuple[Callable[[], str], str]:
        """Return the method that passes `stage`, and what a rank may have to wait for in it."""
        return {
            Stage.ENVIRONMENT: (self.check_environment, ""),
            Stage.STORE: (self.reach_store, self.store_address),
            Stage.RENDEZVOUS: (self.join_rendezvous, "the other ranks to join"),
            Stage.PROCESS_GROUP: (self.make_group, "the other ranks to connect"),
            Stage.VERIFIED: (self.verify, "an all_reduce of all ranks"),
        }[stage]

    @property
    def store_address(self) -> str:
        """Where the store is, by this rank's arguments."""
        if self.plan.init_method == "file":
            return self._arguments.path or self.plan.store_path
        port = self._arguments.master_port or self.plan.master_port
        return f"{self._arguments.master_addr or self.plan.master_addr}:{port}"

    @property
    def world_size(self) -> int:
        """The world size, by this rank's arguments."""
        return self._arguments.world_size or self.plan.world_size

    def check_environment(self) -> str:
        """The variables torch reads can work; the device and the backend exist."""
        plan = self.plan
        self._settings.apply(plan)
        self._read_arguments()
        if "nccl" in self._arguments.backend and not dist.is_nccl_available():
            raise StageError(
                "This build of torch has no NCCL.", "Use gloo: %ddp_init --backend gloo"
            )
        torch.set_num_threads(plan.threads)
        if plan.device.startswith("cuda"):
            if not torch.cuda.is_available():
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
                raise StageError(
                    f"No CUDA device is usable (CUDA_VISIBLE_DEVICES={visible}).",
                    "Run on CPUs: %ddp_init --device cpu. Or check the GPU with nvidia-smi.",
                )
            torch.cuda.set_device(torch.device(plan.device))
        return f"RANK={self._arguments.rank} WORLD_SIZE={self._arguments.world_size}"

    def _read_arguments(self) -> None:
        self._arguments = settings.read(self.plan)
        settings.check(self._arguments, self.plan)
        self._watched.init_calls.enter(self._arguments)

    def reach_store(self) -> str:
        """The store answers. Its address is read again: it may have been corrected."""
        plan = self.plan
        self._read_arguments()
        store = self._store_client.open_store(self._arguments, plan)
        store.set_timeout(plan.timeout)
        # The store outlives a setup. What ranks wrote in an earlier one must not count in this.
        self._store = dist.PrefixStore(f"ddp_notebook/{plan.generation}", store)
        return self.store_address

    def join_rendezvous(self) -> str:
        """Every rank has written its key."""
        assert self._store is not None
        size = self.world_size
        self._store.set(f"join/{self._arguments.rank}", f"{os.getpid()}")
        keys = [f"join/{rank}" for rank in range(size)]
        self._store_client.await_keys(self._store, keys, self.plan)
        return f"{size} of {size} ranks"

    def make_group(self) -> str:
        """torch's default process group exists on this rank."""
        assert self._store is not None
        self._watched.main_thread.waiting_in = "process-group"
        # Not the function that records calls: `_read_arguments` has recorded this one, with what
        # the environment says and not with the store that is passed here.
        rendezvous.original()(
            backend=self._arguments.backend,
            store=self._store,
            rank=self._arguments.rank,
            world_size=self.world_size,
            timeout=self.plan.timeout,
        )
        self._watched.init_calls.leave()
        self._watched.sockets.setup_ended()
        return dist.get_backend()

    def verify(self) -> str:
        """One all_reduce gives the right sum on this rank."""
        self._watched.main_thread.waiting_in = "collective"
        value = torch.full((1024,), float(dist.get_rank() + 1), device=self.plan.device)
        dist.all_reduce(value)
        gpu.await_work(self._watched.main_thread.awaits_gpu)
        expected = self.world_size * (self.world_size + 1) / 2
        if not bool((value == expected).all()):
            raise StageError(
                f"The all_reduce returned {value[0].item():g} instead of {expected:g}.",
                "Restart the ranks: %ddp_restart. If it happens again, the backend or the network "
                "corrupts data.",
            )
        # The all_reduce above had the timeout of the setup. From here on the session finds out what
        # hangs, and a timeout of torch's would only end what the user wants to look at.
        wait_long(dist.group.WORLD)
        assert self._store is not None
        again = self._watched.subgroups.make_again(self._store, dist.get_rank(), self.world_size)
        return " · ".join(filter(None, (f"all_reduce gave {expected:g}", again)))

    def names(self) -> dict[str, Any]:
        """The names that every cell finds."""
        return {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "device": torch.device(self.plan.device),
            "torch": torch,
            "dist": dist,
            "DDP": torch.nn.parallel.DistributedDataParallel,
        }
