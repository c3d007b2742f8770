"""Parts of every tensor that each rank holds, and the whole tensors from those parts."""
