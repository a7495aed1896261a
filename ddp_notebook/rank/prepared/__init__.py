"""Ranks of external jobs: with DDP_NOTEBOOK=1 they prepare themselves to answer questions.

attached.py    The runtime in such a rank, from its first `init_process_group` on; also in ranks
               that a script of `%ddp_run` starts itself.
early.py       Before that: its folder, its identity, and where its main thread is.
ending.py      Writes how it ended, and its state after a long wait, for later.
job_folder.py  The files of prepared ranks that other processes read: a folder per process.
processes.py   A rank's process as the system knows it: its launch parameters, who started it.
"""
