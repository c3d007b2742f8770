"""Which rank holds which part of every tensor, and the whole tensors from those parts."""
