"""Jobs that were not prepared, seen from outside: stacks by py-spy, and what the system knows.

job.py              Two looks at a job, and what they prove together.
pyspy.py            Python stacks of running processes, read by py-spy.
recorder.py         torch's flight recorder of ranks that run, where they give it away.
reports.py          What a rank does, by its Python stacks.
system.py           State, CPU time and sockets of a process, by /proc.
target.py           A job that was not prepared, as what `why`, `where` and the board look at.
"""
