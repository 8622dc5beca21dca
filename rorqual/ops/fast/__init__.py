"""Numba twins of the plain ops, bit-identical where the plain op's order of sums is fixed."""
