"""Whether DDP can work here, checked before anything starts.

examine.py    makes all checks in order: what `%ddp_doctor` calls
facts.py      the facts that the checks need, from the system and a new Python process
gpus.py       checks of GPUs: which exist, and whether ranks can use them
machine.py    checks of memory, processes, cores, folders
network.py    checks of ports, host names, interfaces
software.py   checks of versions, backends, and whether the ranks agree
schema.json   the form of the report as JSON
variables.py  checks of environment variables: left over, wrong, or known to cause problems

A check is a function of facts that returns a `Check` (model/doctor.py), so a test needs no broken
machine. Only facts.py inspects the machine.
"""

from ddp_notebook.doctor.examine import examine

__all__ = ["examine"]
