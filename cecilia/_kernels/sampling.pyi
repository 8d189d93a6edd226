# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

def argmax(logits: npt.NDArray[np.float32]) -> int: ...
def keep(
    logits: npt.NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    ids: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
) -> int: ...
def draw(weights: npt.NDArray[np.float32], count: int, u: float) -> int: ...
