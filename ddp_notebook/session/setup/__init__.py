"""Sets ranks up, sets them up again, steps them and unblocks them.

bring_up.py   Takes the ranks through the stages of set-up, all at once or step by step.
limits.py     How many ranks fit: memory, cores, GPUs, and limits of processes and open files.
messages.py   What set-up says of ranks that run already, were replaced, or did not start.
package_changes.py  Whether this package was changed since the notebook's kernel loaded it.
set_up.py     Brings ranks up, sets them up again, and frees them: init, restart and abort.
shadowing.py  Which file beside the notebook Python loads in place of a module that the ranks need.
stepping.py   Steps paused ranks: one stage of set-up or of DDP's construction, or one collective.
"""
