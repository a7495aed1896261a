"""Reads the files of ended jobs as a case; needs no torch and runs none of their code.

Files are not trusted: sizes are bounded, control characters are removed, and anything malformed is
ignored.

gathered.py         Joins dumps and logs into one case, with the evidence for each rank.
folder.py           Sorts the given files into dumps, logs and saved runs; bounded.
flight_recorder.py  torch's flight recorder, pickle or JSON, as collectives of one rank.
frames.py           Stack frames of torch's dumps as lines of the user's code.
logs.py             Reads ranks' errors and exits from their logs and torchrun's.
marks.py            Marks of launchers and schedulers before lines, and which rank they name.
connects.py         Connections that ranks could not make in set-up.
nccl.py             The collectives on which NCCL's watchdogs timed out, and each rank's progress.
plain_pickle.py     Pickles of plain values, read without running what they name.
"""
