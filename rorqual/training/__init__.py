"""Training: data, the learner and its losses, optimisers, the loop, export."""
