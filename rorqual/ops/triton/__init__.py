"""Triton kernels for CUDA devices; an optional extra (`triton`), imported by nothing but `dispatch.triton_ops`."""
