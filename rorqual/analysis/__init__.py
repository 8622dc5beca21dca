"""The lab: traces, verification against stored tensors, comparison of dumps."""
