"""Settings of all tests."""

from hypothesis import settings

# No test may depend on how fast the machine is just now.
settings.register_profile("mdsp", deadline=None, print_blob=True)
settings.load_profile("mdsp")
