"""The native kernel; built where there is a compiler."""

from typing import Any, final

api: Any

def variants() -> tuple[str, ...]: ...
def set_threads(count: int, /) -> None: ...
def threads() -> int: ...

@final
class Rows:
    def __new__(
        cls,
        kernel: str,
        capacity: int,
        statistics: int,
        sketches: int,
        digests: int,
        valid: int,
        codes: dict[str, int],
        owner: object,
        /,
    ) -> Rows: ...
    def measure_flat(self, row: int, address: int, dtype_code: int, numel: int, offset: int = 0, /) -> bool: ...
    def measure(
        self,
        row: int,
        address: int,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
        /,
    ) -> bool: ...
