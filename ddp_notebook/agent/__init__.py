"""Inside each rank. Standard library, torch and pyzmq (and the IPython the rank runs in) only.

    beacon.py   publishes events, from its own thread
    relay.py    what the user's code prints and displays
    where.py    where the main thread is, in the user's words
    stages.py   brings torch.distributed up one stage at a time
    cells.py    runs a cell on the rank
    keeper.py   the process that hosts the session's store

The observer never hurts the observed: nothing here raises into the user's code.
"""
