"""Calls of each verb, and what each is for; its page of help shows them."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "ddp": (
        ("%%ddp", "the cell on all ranks"),
        ("%%ddp --ranks 0,2-3", "on these only"),
        ("%%ddp --detach", "a long one: the notebook stays free"),
    ),
    "ddp_abort": (
        ("%ddp_abort", "frees the ranks that are blocked; they keep their variables"),
        ("%ddp_abort --ranks 1", "ends what runs there; with the group gone, all are freed"),
    ),
    "ddp_bench": (
        ("%ddp_bench", "all_reduce from 4 bytes up, in about 15 s"),
        ("%ddp_bench --op broadcast,all_gather --max 4M", "other collectives, smaller"),
        ("%ddp_bench --model cnn --batch 8,32,128", "a training step against its batch size"),
    ),
    "ddp_doctor": (
        ("%ddp_doctor", "can DDP work here?"),
        ("%ddp_doctor --world-size 8 --backend nccl", "for the job you mean to start"),
    ),
    "ddp_fault": (
        ("%ddp_fault", "the list of faults"),
        ("%ddp_fault duplicate-rank", "two processes say that they are the same rank"),
        ("%ddp_fault --repair", "the remedy of the last one"),
    ),
    "ddp_init": (
        ("%ddp_init --world-size 4", "four ranks, ready for %%ddp cells"),
        ("%ddp_init --world-size 4 --step", "stage by stage: go on with %ddp_step"),
        ("%ddp_init --set 1:MASTER_PORT=23457", "with a mistake of your own on rank 1"),
    ),
    "ddp_output": (
        ("%ddp_output --ranks 0", "the last lines that rank 0 wrote"),
        ("%ddp_output --ranks 1 --log", "what C code wrote there beside Python"),
    ),
    "ddp_pull": (
        ("%ddp_pull loss", "loss = {0: ..., 1: ...}, a value per rank"),
        ("%ddp_pull loss --ranks 0 --as first_loss", "rank 0's own, under another name"),
    ),
    "ddp_push": (
        ("%ddp_push batch", "the notebook's batch, on all ranks"),
        ("%ddp_push batch lr --ranks 1", "two variables, on rank 1"),
    ),
    "ddp_replay": (
        ("%ddp_replay run.json", "the board and the diagnosis of a run that was saved"),
        ("replay = %ddp_replay run.json", "as a value: replay.at(-5) is 5 seconds before its end"),
    ),
    "ddp_restart": (
        ("%ddp_restart --ranks 1", "a new process for rank 1; the others keep theirs"),
        ("%ddp_restart", "new processes for all ranks"),
    ),
    "ddp_run": (
        ("%ddp_run train.py --epochs 2", "a script, as torchrun would"),
        ("%ddp_run --step collective train.py", "stopping before each collective"),
    ),
    "ddp_save": (
        ("%ddp_save run.json", "what is known of this session, for a bug report"),
        ("%ddp_save run.json --output", "with what the ranks wrote"),
    ),
    "ddp_shutdown": (
        ("%ddp_shutdown", "ends the ranks"),
        ("%unload_ext ddp_notebook", "ends them and takes the magics away"),
    ),
    "ddp_status": (
        ("%ddp_status", "the board"),
        ("board = %ddp_status", "as a value: board.snapshot.ready"),
    ),
    "ddp_step": (
        ("%ddp_step", "all ranks one stage, or one collective, on"),
        ("%ddp_step --ranks 1", "rank 1 alone; watch the others wait"),
        ("%ddp_step --to verified", "through to the end of set-up"),
    ),
    "ddp_tour": (
        ("%ddp_tour", "five things to try"),
        ("%ddp_init?", "any magic's own page of help"),
    ),
    "ddp_wait": (
        ("%ddp_wait", "waits for the run that was detached"),
        ("%ddp_wait --timeout 10", "for ten seconds at most"),
    ),
    "ddp_where": (
        ("%ddp_where", "all ranks' stacks, merged into one tree"),
        ("%ddp_where --locals", "with their variables"),
    ),
    "ddp_why": (
        ("%ddp_why", "what is wrong, whose doing it is, what to type"),
        ("%ddp_why --json", "the same for a program"),
    ),
    "ddp_wrap": (
        ("%ddp_wrap model", "a model on the ranks becomes DDP, stage by stage"),
        ("%ddp_wrap model --buckets", "after a step: the buckets, and the order gradients came in"),
    ),
}
"""By the name of the magic: calls, and what each is for."""
