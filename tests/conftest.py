from __future__ import annotations

import os
import random
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import settings

# CI asks the same questions each time; elsewhere new ones are asked. Time limits say more of the machine than of the code.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if "CI" in os.environ else "dev")

pytest_plugins = ["pytester", "tests.hook_leaks"]

# Named on the command line without MindSpore installed, these end as "no tests ran" and exit code 5, not as a pass.
collect_ignore = [] if find_spec("mindspore") else ["mindspore"]


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Have each test draw the same random numbers, whichever others run before it."""
    random.seed(0)
    np.random.seed(0)
    for framework, seed in (("torch", "manual_seed"), ("mindspore", "set_seed")):
        if framework in sys.modules:
            getattr(sys.modules[framework], seed)(0)
