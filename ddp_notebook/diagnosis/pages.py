"""A page of help for each category: what torch prints, what it means, how to correct it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_notebook.model import Category


@dataclass(frozen=True, slots=True)
class Page:
    """The text of a page, a sentence or two for each question."""

    prints: str
    """The message or the behaviour of torch alone."""
    means: str
    found: str
    """The evidence that the finding rests on."""
    correction: str


_HANGS = "Nothing: the ranks wait until the group's timeout (30 minutes by default)."
_SILENT = "Nothing: the run ends well and its result is wrong."

PAGES: Mapping[Category, Page] = {
    # -- setup ------------------------------------------------------------------------------
    Category.ENV_MISMATCH: Page(
        "«The client socket has timed out … while trying to connect to (host, port)», or nothing.",
        "Ranks were told other values of MASTER_ADDR, MASTER_PORT, WORLD_SIZE or of the backend, "
        "or gave a store with another prefix (PrefixStore), so they do not meet.",
        "The arguments of init_process_group on each rank are compared.",
        "Give every rank the same values. Let one place, the launcher, choose the port.",
    ),
    Category.ENV_INVALID: Page(
        "«environment variable RANK expected, but not set», «rank < size», or a ValueError.",
        "A value cannot work on any job: a port above 65535, RANK not below WORLD_SIZE, no number.",
        "The rank's own values are checked.",
        "Start the script with %ddp_run or torchrun, which set them.",
    ),
    Category.PORT_IN_USE: Page(
        "«The server socket has failed to listen … EADDRINUSE».",
        "Another process holds MASTER_PORT on the host of rank 0.",
        "The error of rank 0, and which process listens on the port.",
        "End that process, or give the job a port of its own (torchrun --standalone).",
    ),
    Category.PORT_EXHAUSTED: Page(
        "«no free port» of your launcher.",
        "No port is free in the range in which one was looked for.",
        "The error of the rank.",
        "Widen the range. Or have one process ask the system for a port (bind to port 0) and give "
        "its number to all ranks as MASTER_PORT; MASTER_PORT=0 itself cannot work.",
    ),
    Category.DUPLICATE_RANK: Page(
        "«wait timeout …, keys: /default_pg/0//cpu//0/2» on all ranks.",
        "Two processes have one RANK, and another rank does not exist.",
        "RANK of every process is compared.",
        "Take RANK from the launcher's environment on every process.",
    ),
    Category.MISSING_RANK: Page(
        "«1/2 clients joined», or nothing until the timeout.",
        "The others wait for a rank that never called what they wait in.",
        "The code that each rank runs: none, other code, or another branch.",
        "Run the code on every rank, or use a group of the ranks that run it.",
    ),
    Category.WORLD_SIZE_MISMATCH: Page(
        "«2/4 clients joined».",
        "WORLD_SIZE is not the number of processes that there are.",
        "WORLD_SIZE of the ranks beside the number of processes.",
        "Take WORLD_SIZE from the launcher, not from the number of devices.",
    ),
    Category.STRAGGLER: Page(
        "Nothing, unless the group's timeout is shorter than the delay.",
        "Ranks wait for one that still computes, loads or is paused. It will come: no mistake.",
        "The stack and the CPU time of the rank that is waited for.",
        "Wait, make that part faster, or give init_process_group a longer timeout=.",
    ),
    Category.STALE_STORE: Page(
        "«Gloo connectFullMesh failed … Connect timeout», after 40 s.",
        "The file of a file:// rendezvous holds addresses of an earlier run.",
        "The addresses in the file are counted, and whose they are.",
        "Delete the file before the start, or use a new path for each run (or env://).",
    ),
    Category.STORE_GONE: Page(
        "«Broken pipe» or «Connection reset by peer» in a store call, or «failed to recv».",
        "The process that hosts the store, rank 0 as a rule, left while others still need it; or "
        "the file of a file:// rendezvous was deleted while ranks join or make groups.",
        "The end of the store's host, and who is in a call to the store; what each rank wrote into "
        "the file, and is not in it any more.",
        "Let all ranks reach a barrier before rank 0 leaves. Delete the file before any rank is "
        "started.",
    ),
    Category.UNREACHABLE_MASTER: Page(
        "«The client socket has timed out after … while trying to connect».",
        "No process answers at MASTER_ADDR:MASTER_PORT.",
        "Each rank tries to connect there.",
        "Start rank 0 first, and check address, port and firewall.",
    ),
    Category.FIREWALL: Page(
        "«connectFullMesh failed» after 40 s on some ranks, while rank 0 waits.",
        "The store can be reached, but the ports by which ranks talk to each other cannot.",
        "Each rank tries to connect to the others where they listen.",
        "Open the ports between the hosts (gloo takes any free one).",
    ),
    Category.HOSTNAME_LOOPBACK: Page(
        "«Connection refused» to 127.x from another host.",
        "A rank's host name resolves to its own loopback, and it tells others that address.",
        "The address at which the rank listens.",
        "Correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that the others reach.",
    ),
    Category.WRONG_INTERFACE: Page(
        "«Unable to find address for: bond1».",
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that the host does not have.",
        "The error of the rank, and the host's interfaces.",
        "Name an interface that exists there (ip link), or unset the variable.",
    ),
    Category.DOUBLE_INIT: Page(
        "«trying to initialize the default process group twice!».",
        "init_process_group was called, and the rank has a group already.",
        "The rank's error.",
        "Call it once, or dist.destroy_process_group() before. In a cell the ranks have a group: "
        "ask for that one, or leave the call out.",
    ),
    Category.NOTEBOOK_LAUNCH: Page(
        "«Can't get attribute 'main' on <module '__main__'>» from mp.spawn; ports in use, or "
        "nothing, where a launcher starts ranks within ranks.",
        "A cell starts ranks (mp.spawn, notebook_launcher, torchrun, mpirun), and it runs on ranks "
        "already.",
        "The call itself, before it starts anything.",
        "Call the function that would have run on each rank: main(rank, world_size). Or put the "
        "program into a file: %ddp_run for one that torchrun starts, %ddp_run --python for one "
        "that starts its ranks itself.",
    ),
    Category.VERSION_MISMATCH: Page(
        "Anything: a hang, a wrong message size, an error of the store.",
        "Ranks run other versions of torch, Python or NCCL.",
        "The versions of every rank.",
        "Install the same versions on every host.",
    ),
    # -- collectives -------------------------------------------------------------------------
    Category.CONDITIONAL_COLLECTIVE: Page(
        _HANGS,
        "Only some ranks call a collective, mostly under `if rank == 0`. Some calls are "
        "collectives that do not look so: full_tensor, state_dict of a sharded model, dcp.save, "
        "clip_grad_norm_, distribute_tensor.",
        "The collectives of all ranks side by side, and the test in your code before that line.",
        "Call it on every rank of the group, and keep only the printing or writing in the `if`.",
    ),
    Category.DIVERGENT_CONTROL_FLOW: Page(
        _HANGS,
        "Ranks took another way through a loop: a step skipped, repeated, or ended early, decided "
        "by data of their own.",
        "The collectives of all ranks side by side: who has an iteration more, less or another.",
        "Let the ranks decide together: all_reduce the condition, then branch on the result.",
    ),
    Category.MISMATCHED_ORDER: Page(
        "Nothing: a hang, or numbers of other things added up.",
        "Ranks call the same collectives in another order, or use their groups in another order. "
        "Threads, and tasks of an event loop, run in any order.",
        "The same calls, moved; or ranks that wait for each other in a ring; or the code, where "
        "two tasks of one event loop call them.",
        "Loop over names in one order on every rank: sorted(). Await one task after the other.",
    ),
    Category.SHAPE_MISMATCH: Page(
        "A process is aborted (SIGABRT) where a message is larger than its buffer; or wrong sums.",
        "In one collective ranks bring tensors of other shapes.",
        "Shapes are compared before anything is sent; what does not match is refused.",
        "Exchange the sizes first, pad to the largest, cut afterwards.",
    ),
    Category.DTYPE_MISMATCH: Page(
        _SILENT,
        "In one collective ranks bring tensors of other dtypes.",
        "The dtypes are compared before anything is sent.",
        "Convert the tensor to one dtype on every rank.",
    ),
    Category.OP_MISMATCH: Page(
        "Nothing: a hang, or wrong numbers.",
        "Where one collective was meant ranks call others, or with another op= or src=.",
        "Operation, ReduceOp and root are compared before anything is sent.",
        "Call the same operation, with the same arguments, on every rank at this point.",
    ),
    Category.SPLIT_MISMATCH: Page(
        "The process is aborted: «Received data size doesn't match expected size».",
        "In an all_to_all what a rank sends to a peer is not what the peer makes room for.",
        "The splits of all ranks are compared, the row of one with the column of the other.",
        "Send the counts after what changes them (capacity, dropped tokens), and use those counts.",
    ),
    Category.P2P_MISMATCH: Page(
        _HANGS,
        "A send has no recv, both sides send first, or tag, size or peer differ.",
        "Sends and receives are paired in order; the waits make a ring or a dead end.",
        "Let one side receive first, or use batch_isend_irecv; name the right peer on both sides.",
    ),
    Category.UNSET_KEY: Page(
        "Nothing until the store's timeout, then «wait timeout».",
        "A rank waits for a key of a store that no rank has set, or will set.",
        "The key, and that no rank is left that could set it.",
        "Set the key on the rank that should, under the same prefix and name.",
    ),
    Category.SUBGROUP_MISUSE: Page(
        "Nothing: a hang in new_group, or messages that go to the wrong group. Or «Global rank 0 "
        "is not part of group».",
        "torch tells groups apart by counting calls of new_group. Ranks gave other lists in their "
        "k-th call, or some did not call it. Or src= or dst= counts in the group, where torch "
        "counts in the whole job.",
        "The lists that each rank gave, compared call by call; torch's own error.",
        "Call new_group on every rank, members or not, with the same lists in the same order. For "
        "a rank of the group there are group_src= and group_dst=.",
    ),
    Category.MESH_MISMATCH: Page(
        "Nothing: a hang while the mesh is made or used, or sums over the wrong ranks.",
        "Ranks make a DeviceMesh of other ranks, of another shape or in another order.",
        "A mesh makes groups: their lists are compared call by call.",
        "Give init_device_mesh or DeviceMesh the same arguments on every rank.",
    ),
    Category.REPLICA_INPUT_MISMATCH: Page(
        _SILENT,
        "Ranks that hold parts of one model (a tensor-parallel group) are fed other samples each. "
        "Each layer then adds up parts of the outputs for different samples.",
        "Hashes of the first inputs of the model on each rank of the group, and that a tensor "
        "which DTensor was told to be the same there is not, or that the losses differ.",
        "Divide the data among the ranks of the data-parallel dimension only: "
        "DistributedSampler(data, num_replicas=mesh['dp'].size(), "
        "rank=mesh['dp'].get_local_rank()); seed by that number too.",
    ),
    Category.SHARDING_MISMATCH: Page(
        "Nothing: a hang, or an error about shapes.",
        "Ranks shard, wrap or place the same module in another way: fully_shard on other modules, "
        "another reshard_after_forward, another plan of parallelize_module.",
        "The collectives of all ranks side by side, in calls of the same module.",
        "Decide the wrapping from the configuration that all ranks share, not from a rank's own.",
    ),
    Category.SCHEDULE_MISMATCH: Page(
        _HANGS,
        "Pipeline stages disagree about the stage number, the number of micro-batches or the "
        "schedule.",
        "The sends and receives between neighbouring stages, counted.",
        "Give stage and schedule the same numbers on every rank; each stage belongs to one rank.",
    ),
    Category.UNEVEN_INPUTS: Page(
        _HANGS,
        "A rank ran out of batches and left the loop; the others wait in the next step.",
        "How often each rank was at that line, and that it is past the loop.",
        "DistributedSampler with drop_last=True, the same number of steps for all, or Join.",
    ),
    Category.ASYNC_MISUSE: Page(
        _SILENT,
        "A tensor is changed, or used as a gradient, while a collective on it still runs.",
        "Works that no code waited for in time, and tensors that were changed, or used by an "
        "optimizer's step, before that. What was only read leaves no trace.",
        "Call work.wait() (or wait_tensor) before the tensor is used.",
    ),
    Category.BARRIER_MISUSE: Page(
        _HANGS,
        "Not all ranks reach a barrier, or it is a barrier of another group.",
        "Who waits in which barrier of which group.",
        "Let every rank of the group reach it, or give the barrier the smaller group: group=.",
    ),
    # -- DDP ---------------------------------------------------------------------------------
    Category.UNUSED_PARAMS: Page(
        "«Expected to have finished reduction in the prior iteration before starting a new one», "
        "or a hang where only one rank skips them.",
        "A parameter got no gradient, so its bucket was never reduced.",
        "Which buckets were reduced, and which parameters had no gradient.",
        "Use every parameter in forward, or DistributedDataParallel(find_unused_parameters=True).",
    ),
    Category.CHECKPOINT_REENTRANT: Page(
        "«Expected to mark a variable ready only once».",
        "A parameter takes part in more than one backward pass of one forward: reentrant "
        "checkpointing, or one module used in two checkpointed parts.",
        "torch's error, and the parameter that it names.",
        "checkpoint(..., use_reentrant=False), or DistributedDataParallel(static_graph=True) where "
        "the graph is the same in each step.",
    ),
    Category.PARAM_MISMATCH: Page(
        "«DDP expects same model across all ranks», or a hang in the constructor.",
        "Ranks built models with other parameters.",
        "Number, shapes and dtypes of the parameters per rank.",
        "Build the model from what all ranks share: the same configuration and vocabulary.",
    ),
    Category.DDP_BYPASS: Page(
        _SILENT,
        "The forward whose loss is trained went through .module, or a method of it: gradients are "
        "not reduced.",
        "The backward passes that DDP did not see.",
        "Call the DDP object itself in training.",
    ),
    Category.PARAMS_OUTSIDE_DDP: Page(
        _SILENT,
        "Trained parameters are not known to DDP: added or unfrozen after wrapping.",
        "The optimizer's parameters beside those of DDP.",
        "Add and unfreeze before wrapping, or wrap again.",
    ),
    Category.NO_SYNC_MISUSE: Page(
        _SILENT,
        "no_sync (or set_requires_gradient_sync(False)) covers the backward before the step, or "
        "only some ranks have it on.",
        "The reductions of gradients in the backward before each optimizer step.",
        "Have it on for all but the last micro-batch: (i + 1) % accumulate != 0.",
    ),
    Category.BUFFER_SYNC: Page(
        _SILENT,
        "Buffers, such as running statistics, differ between the replicas.",
        "Digests of the buffers by name, and of running statistics when an evaluation begins.",
        "broadcast_buffers=True, SyncBatchNorm, or a broadcast before evaluation.",
    ),
    Category.REPLICA_DIVERGENCE: Page(
        _SILENT,
        "Replicas that must be equal are not: parameters or optimizer state.",
        "Digests of parameters and states of every rank.",
        "Load and change them in the same way on every rank, or broadcast them from one.",
    ),
    Category.NAN_ON_ONE_RANK: Page(
        "Nothing, or loss=nan on all ranks a step later.",
        "One rank's loss or gradients were NaN or infinite first; the all_reduce spread it.",
        "The first parameter and step with NaN, per rank, before the reduction.",
        "Look at that rank's batch of that step.",
    ),
    Category.LOCAL_STATISTIC: Page(
        _SILENT,
        "A norm was taken of a rank's own shard, or of its gradients before they were averaged, so "
        "each rank scales its gradients differently.",
        "The factors of a few gradients of each rank between backward and step.",
        "torch.nn.utils.clip_grad_norm_ after the average, or all_reduce the sum of squares before "
        "the root.",
    ),
    Category.METRIC_MISAGGREGATION: Page(
        _SILENT,
        "Each rank evaluates its own part, and one reports its figure as that of the whole.",
        "Other inputs on each rank, no collective afterwards, and only one rank that prints.",
        "all_reduce the counts, and divide afterwards.",
    ),
    Category.WEIGHT_TYING_LOST: Page(
        _SILENT,
        "Two weights that the code makes one tensor have become two, and are trained apart.",
        "Parameters that were equal when the model was wrapped, and the line that ties them.",
        "Tie them again after load_state_dict(assign=True) and the like, before wrapping.",
    ),
    Category.RNG_MISMATCH: Page(
        _SILENT,
        "Ranks were given one seed, so noise and the like is the same for their different samples; "
        "or ranks of one tensor-parallel group, which need the same, were given one each.",
        "The state of torch's generator before each training forward, and the code that draws, or "
        "the dropout in the model.",
        "torch.manual_seed(seed + dist.get_rank()) once the model is made; within a "
        "tensor-parallel group the same seed on all.",
    ),
    Category.NUMERICS_MISMATCH: Page(
        _SILENT,
        "Ranks compute with another precision: autocast, TF32 or the default dtype differ.",
        "The settings of every rank after a run in which it trained.",
        "The same setting on every rank.",
    ),
    Category.SAMPLER_MISUSE: Page(
        _SILENT,
        "Ranks train on the same samples, or on all in one order: no DistributedSampler, one "
        "without set_epoch, with another seed or with overlapping shards; an IterableDataset "
        "that does not divide its data among ranks.",
        "The samplers' state on every rank; hashes of the first batches that models got.",
        "sampler.set_epoch(epoch) in each epoch; the same seed; num_replicas and rank of the job. "
        "In an IterableDataset: every world-size-th sample, from dist.get_rank() on.",
    ),
    Category.DATALOADER_DEADLOCK: Page(
        _HANGS,
        "A worker process of a DataLoader waits for a lock that was held when it was forked.",
        "The worker does not run, and all its threads wait for locks.",
        "multiprocessing_context='spawn', or start no threads before the workers.",
    ),
    Category.DATALOADER_SHM: Page(
        "«DataLoader worker (pid …) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory».",
        "The workers of a DataLoader pass batches through /dev/shm, and it was full: a container "
        "has 64 MB by default.",
        "The rank's error.",
        "A larger /dev/shm (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir in "
        "memory), smaller batches, or fewer workers.",
    ),
    Category.CHECKPOINT_MISUSE: Page(
        _SILENT,
        "A state was loaded on some ranks only, after the model was wrapped, or into an optimizer, "
        "whose state DDP does not send.",
        "How often load_state_dict was called on each rank, and that replicas, or the states of "
        "optimizers, differ at the end.",
        "Load the state on every rank, with map_location.",
    ),
    Category.OPTIMIZER_DETACHED: Page(
        _SILENT,
        "The optimizer holds other tensors than those that are trained: of a copy, of an earlier "
        "model, of parameters that were replaced.",
        "No tensor of the optimizer had a gradient in any of its steps, while a model with as "
        "many parameters of the same sizes was trained and no optimizer that steps holds them. Or "
        "some had none, and no optimizer holds as many parameters of the model that had one.",
        "Make the optimizer last, of the parameters of the model that is trained.",
    ),
    # -- processes ---------------------------------------------------------------------------
    Category.MISSING_DESTROY: Page(
        "«Connection closed by peer» on the other ranks.",
        "A rank destroyed its group, or ended, before a peer had done its last communication.",
        "Who has a group, and who waits for it in what.",
        "dist.barrier() before destroy_process_group().",
    ),
    Category.EXCEPTION_ON_ONE_RANK: Page(
        "Its traceback, and «Connection closed by peer» or a hang on the others.",
        "One rank raised an error; the others wait for it.",
        "Its error, or that of a thread on which its way depends, and that the others' errors only "
        "say that it is gone.",
        "Correct that error. Errors that a rank may meet have to be agreed on: all_reduce a flag.",
    ),
    Category.EXCEPTION: Page(
        "The same traceback on every rank.",
        "All ranks raised: no rank differs from the others.",
        "The errors of all ranks.",
        "Correct the error as in a program of one process.",
    ),
    Category.RANK_DIED: Page(
        "«Connection closed by peer» on the others, or «exitcode: -9» of the launcher.",
        "A process was killed or crashed; the others' errors follow from that.",
        "Its exit code or signal, and which process ended first.",
        "By signal 9: look for lack of memory. By 11 or 6: look at native code it was in.",
    ),
    Category.EARLY_EXIT: Page(
        "«Connection closed by peer» on the others, or a hang.",
        "A rank finished, or left by sys.exit, while others still need it, in a collective or in "
        "rpc.shutdown().",
        "Its end, and what the others wait in.",
        "Let all ranks leave together.",
    ),
    Category.OOM_ON_ONE_RANK: Page(
        "«CUDA out of memory», «can't allocate memory» or MemoryError, on that rank alone.",
        "A rank ran out of memory, of the device or of the host.",
        "Its error.",
        "A smaller batch there, or longest sequences spread over the ranks.",
    ),
    Category.RESOURCE_STARVED: Page(
        "«Too many open files», «No space left on device», or nothing.",
        "Memory, CPU, file descriptors or /dev/shm are used up.",
        "The figures of the host.",
        "Raise the limit, or use less: fewer workers, persistent_workers=True.",
    ),
    Category.FILESYSTEM: Page(
        "FileExistsError, FileNotFoundError or the like on some ranks.",
        "Ranks make, move or delete one path at the same time, or one uses it before another has "
        "made it, or after another has deleted it.",
        "The ranks' errors and their paths, whether the path is there by now, and which rank wrote "
        "or removed it.",
        "Let one rank make it, then a barrier, then the others use it; a barrier before it goes.",
    ),
    Category.WRONG_PATH_ON_RANK: Page(
        "FileNotFoundError on some ranks.",
        "Ranks make up one path each for what is one file: from a clock, a temporary folder, the "
        "name of the host.",
        "The path that was not found, and the one path under which a rank wrote a file of that "
        "name.",
        "Make the path on rank 0, and dist.broadcast_object_list it.",
    ),
    Category.GPU_MAPPING: Page(
        "«Duplicate GPU detected», «invalid device ordinal», or a training that is slow.",
        "Two ranks use one GPU, or a rank chooses one that it does not see.",
        "The device of each rank.",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else.",
    ),
    Category.BACKEND_DEVICE_MISMATCH: Page(
        "«No backend type associated with device type cpu», «Found no NVIDIA driver on your "
        "system», «Torch not compiled with CUDA enabled».",
        "A tensor is on a device for which the group has no backend; or the program asks for a GPU "
        "on a machine without one.",
        "The error, and the line that asks.",
        "Move the tensor, or init_process_group('cpu:gloo,cuda:nccl'). A program for GPUs runs on "
        "CPUs as it is with %ddp_run --cpu, or %%ddp --cpu for a cell.",
    ),
    Category.UNDECIDED: Page(
        "Whatever it is.",
        "The ranks make no progress, and the evidence does not say why.",
        "That nothing has moved for long.",
        "%ddp_where shows where each rank is. %ddp_abort frees them, with their variables.",
    ),
}


def text(category: Category) -> str:
    """A page as text."""
    page = PAGES[category]
    return (
        f"{category.value}\n\n"
        f"What torch prints   {page.prints}\n"
        f"What it means       {page.means}\n"
        f"How it is found     {page.found}\n"
        f"How to correct it   {page.correction}"
    )
