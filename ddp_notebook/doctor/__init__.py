"""Whether DDP can work here, checked before anything starts.

examine.py    makes all checks in order: what `%ddp_doctor` calls
facts.py      what the checks need to know, asked of the system and of a fresh Python
gpus.py       checks of GPUs: which there are, and whether ranks can have them
machine.py    checks of memory, processes, cores, folders
network.py    checks of ports, host names, interfaces
software.py   checks of versions, backends, and whether the ranks agree
schema.json   the form of the report as JSON
variables.py  checks of environment variables: left over, wrong, or known to make trouble

A check is a function of facts that returns a `Check` (model/doctor.py), so a test needs no broken
machine. Only facts.py looks at the machine.
"""

from ddp_notebook.doctor.examine import examine

__all__ = ["examine"]
