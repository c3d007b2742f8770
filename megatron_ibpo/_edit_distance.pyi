from typing import Any

import numpy as np
import numpy.typing as npt

def batch_distance(
    a: npt.NDArray[Any],
    a_offsets: npt.NDArray[np.int64],
    b: npt.NDArray[Any],
    b_offsets: npt.NDArray[np.int64],
    num_threads: int,
) -> npt.NDArray[np.int64]: ...
def distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int: ...
def read_ints(list: list[Any]) -> npt.NDArray[np.int64] | None: ...
