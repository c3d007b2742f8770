"""The parts of every tensor that each rank holds, and assembly of whole tensors from them."""
