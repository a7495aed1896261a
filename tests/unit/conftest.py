"""Properties are tested on the same examples each time, also on machines that are busy."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ddp_notebook",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ddp_notebook")
