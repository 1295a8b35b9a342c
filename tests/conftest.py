"""How the tests run: offline, the same examples every time unless asked otherwise.

`pytest --hypothesis-profile=thorough` looks for new counterexamples, more of them and at random.
"""

import os

from hypothesis import HealthCheck, settings

# Set before any test imports transformers: no test may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=40,
    deadline=None,  # a first call starts threads; pytest-timeout bounds the test instead
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough", settings.get_profile("ci"), derandomize=False, max_examples=1000
)
settings.load_profile("ci")
