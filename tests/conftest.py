from hypothesis import HealthCheck, settings

# Nothing is asserted about time: a busy machine is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
