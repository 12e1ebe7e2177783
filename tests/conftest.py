"""Settings for all tests."""

import os

from hypothesis import HealthCheck, Phase, settings

# Read by libraries, not by Shoal: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

settings.register_profile(
    "shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# For bisecting: the first failure as it is, without minutes of shrinking.
settings.register_profile("quick", settings.get_profile("shoal"), phases=[Phase.generate])
settings.load_profile("shoal")
