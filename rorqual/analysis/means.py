"""A mean and how sure it is."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


def mean_and_error(samples: ArrayLike) -> tuple[float, float | None]:
    """Mean of one or more numbers [n] and its standard error, None of a single one.

    The error is that of independent samples: where they share something, the truth is larger.
    """
    values = np.asarray(samples, np.float64)
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), error
