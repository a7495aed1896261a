"""Whether DDP can work here, looked at before anything starts.

    examination.py  all checks, in order: what `%ddp_doctor` calls
    variables.py    environment variables left over, wrong or known to bite
    network.py      ports, host names, interfaces
    software.py     versions, backends, whether the ranks agree
    gpus.py         which GPUs there are, and whether ranks can have them
    machine.py      memory, processes, cores, clock, folders
    facts.py        asks the system and a fresh Python
    containers.py   limits of the container

A check is a function of facts: it gets what is so and returns a `Check`. Only facts.py and
containers.py look at the machine.
"""

from ddp_notebook.doctor.examination import examine

__all__ = ["examine"]
