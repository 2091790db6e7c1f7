import os

from tests.device.backend import VARIABLE


# Tests that need the device in their own process: `test_device.py` runs them.
collect_ignore = [] if VARIABLE in os.environ else ["inside"]
