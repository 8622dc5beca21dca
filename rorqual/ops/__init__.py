"""Op families: plain torch in `reference`, Numba twins of the same signature in `fast`."""
