"""Images: how many positions one takes (`grid`, no torch), its patches (`image`), its embeddings (`tower`)."""
