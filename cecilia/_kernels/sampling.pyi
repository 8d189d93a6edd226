# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

def argmax(logits: npt.NDArray[np.float32]) -> int: ...
def keep(
    logits: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    *,
    top_k: int,
    top_p: float,
    reach: float,
    temperature: float,
) -> int: ...
def draw(weights: npt.NDArray[np.float32], count: int, u: float) -> int: ...
