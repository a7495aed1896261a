"""Inside each rank. Standard library, torch and pyzmq (and the IPython the rank runs in) only.

    boot.py            the first call in a rank's process
    beacon.py          publishes events, from its own thread
    relay.py           what the user's code prints and displays
    progressbars.py    progress bars as text
    where.py           where the main thread is, in the user's words
    state.py           what this rank is at, for those who ask while main is blocked
    stages.py          brings torch.distributed up one stage at a time
    settings.py        the variables that torch reads: set, changed, checked
    connecting.py      opens the store and waits for its keys, so that it can be given up
    problems.py        what a stage raises when it cannot be passed
    rendezvous.py      notes each call of init_process_group
    control.py         answers the session's questions while main is blocked
    evidence.py        what this rank knows about its own set-up
    stacks.py          the main thread's stack, from the user's first frame on
    glimpse.py         values as short texts, without running anything of theirs
    facts.py           versions, backends and environment, for the doctor
    sockets.py         which sockets are torch's, and where they listen
    place.py           on which host the main thread is
    probing.py         whom this rank can reach, and what names mean here
    rescue.py          frees the main thread when it is blocked in torch
    ddp.py             DDP's construction, and what DDP knows later
    wrap_stage.py      what a stage of that construction runs in
    celltree.py        a cell as one module
    cells.py           runs a cell on the rank
    scripts.py         runs a training script on the rank
    tasks.py           long tasks of ours, with progress
    values.py          variables on their way to the notebook
    keeper.py          the process that hosts a store of the session
    torch_private.py   every use of torch's private API but DDP's, which is in ddp.py
    engine_private.py  every use of ipykernel's

The observer never hurts the observed: nothing here raises into the user's code.
"""
