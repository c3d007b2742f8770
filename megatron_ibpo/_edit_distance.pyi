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
