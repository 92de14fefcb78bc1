"""Operations of ours on MindSpore tensors, kept from graphs and from the dispatch modes that watch operations.

MindSpore can switch its dispatch modes off for newer kernels only; older ones go to the modes in every case, and what runs while
a mode is being told of an operation may end the process. So where a mode is on (:func:`may_compute`), we compute nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mindspore._c_expression import _DispatchGuardStack
from mindspore.graph.api import _no_grad

__all__ = ["may_compute", "unseen"]


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Keep operations of ours from graphs."""
    with _no_grad():
        yield


def may_compute() -> bool:
    """Whether nobody would see operations of ours: no dispatch mode is on in this thread."""
    return not _DispatchGuardStack.has_dispatch_guard()
