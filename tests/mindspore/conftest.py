"""MindSpore for tests: its warnings at import kept out of ours, its operations run where they are called."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # MindSpore's own modules use deprecated names; what tenterhook causes must still be an error.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    import mindspore

mindspore.set_context(mode=mindspore.PYNATIVE_MODE, pynative_synchronize=True)
