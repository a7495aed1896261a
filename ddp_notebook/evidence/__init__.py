"""What jobs that have ended leave behind, read as a case: no torch, no code of theirs is run.

Files come from others: sizes are bounded, control characters are removed, nothing is believed that
has another form than it must have.

gathered.py         Dumps and logs joined into one case, and what each rank is known by.
folder.py           Which of the files that were given hold what; bounded.
flight_recorder.py  torch's flight recorder, pickle or JSON, as collectives of one rank.
frames.py           Stack frames of torch's dumps as lines of the user's code.
logs.py             What ranks and torchrun's agent wrote, as errors and exits of ranks.
connects.py         Connections that ranks could not make in set-up.
nccl.py             What NCCL's watchdogs gave up on, and how far each rank had come.
plain_pickle.py     Pickles of plain values, read without running what they name.
"""
