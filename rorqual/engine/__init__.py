"""Running a model: sequences, sampling, generation. Schedulers and pools build on the same step (DESIGN 5)."""
