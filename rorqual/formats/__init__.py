"""Number formats: what a packed row is (`spec`, no torch), element codes (`fp4`, `fp8`), rows (`codec`), weights."""
