"""A rank that nobody of ours started: with DDP_NOTEBOOK=1 it prepares itself to be asked.

attached.py   The runtime in such a rank, from its first `init_process_group` on.
children.py   Ranks that a script starts by itself, with torch.multiprocessing: told, and prepared.
early.py      Before that: its folder, who it is, where its main thread is when it is asked.
ending.py     How it ended, and what it did when it had long waited: written, for later.
job_folder.py Where prepared ranks leave what others read: a folder for each process.
"""
