"""Settings for all tests."""

import os

from hypothesis import HealthCheck, Phase, settings

# Read by libraries, not by Shoal: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Triton's kernels are interpreted, on the CPU. It is read when Triton is first imported, which
# torch may do in any test. Where it is 0, on a machine with a GPU, they are compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# For bisecting: the first failure as it is, without minutes of shrinking.
settings.register_profile("quick", settings.get_profile("shoal"), phases=[Phase.generate])
settings.load_profile("shoal")
