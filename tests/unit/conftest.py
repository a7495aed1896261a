"""Properties are tested on busy machines too: examples that come slowly are no defect."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ddp_notebook", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ddp_notebook")
