from typing import Any

import numpy as np
import numpy.typing as npt

def batch_distance(
    a: npt.NDArray[Any],
    a_offsets: npt.NDArray[np.int64],
    b: npt.NDArray[Any],
    b_offsets: npt.NDArray[np.int64],
    cutoffs: npt.NDArray[np.int64] | None,
    num_threads: int,
    isa: str = "",
    engine: str = "",
) -> npt.NDArray[np.int64]: ...
def batch_align(
    a: npt.NDArray[Any],
    a_offsets: npt.NDArray[np.int64],
    b: npt.NDArray[Any],
    b_offsets: npt.NDArray[np.int64],
    num_threads: int,
    isa: str = "",
    engine: str = "",
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.int64]]: ...
def read_ints(list: list[Any]) -> npt.NDArray[np.int64] | None: ...
def supported_isas() -> list[str]: ...
