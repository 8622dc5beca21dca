"""Text in, packed sequences out: sources, tokenizer, token shards, packing, order.

`rorqual.training.data.prepare.TrainingData` is the one door.
"""
