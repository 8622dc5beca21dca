"""Benchmarks: kernels and models against their plain twins in the same run, and what a model keeps resident.

timing      samples, interleaved A B A B
roofline    what this machine can read and multiply, measured in the same run
machine     what it ran on, and how busy the machine was with other things
report      rows, bars, and the one JSON document
kernels, cases   every op;  model   a checkpoint end to end
memory, resident, fresh   peak memory of a fresh process
context     what a long context costs: long_decode, stack, clocked a token at 1M;  workspace   a long prefill's memory
"""
