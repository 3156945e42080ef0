"""The name for arrays of 64-bit floats in signatures; docstrings give their shapes."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
