from __future__ import annotations

from importlib.util import find_spec

pytest_plugins = ["pytester", "tests.hook_leaks"]

# Named on the command line without MindSpore installed, these end as "no tests ran" and exit code 5, not as a pass.
collect_ignore = [] if find_spec("mindspore") else ["mindspore"]
