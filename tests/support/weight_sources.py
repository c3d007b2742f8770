from megatron_ibpo.weights.layout.regions import Region, TensorMeta, full_box


def cut(tensor, box):
    return tensor[tuple(slice(start, stop) for start, stop in box)]


class DividedWeights:
    def __init__(self, tensors, rank, size, axes=None):
        """`axes`: those of some tensors, by name; None: whole everywhere. The others are divided by rows."""
        self.tensors, self.rank, self.size, self.axes = tensors, rank, size, axes or {}

    def metadata(self):
        return [TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def regions(self):
        everyone = tuple(range(self.size))
        return [
            (Region(full_box(tensor.shape), everyone),)
            if self.axes.get(name, 0) is None
            else tuple(Region(self.box(name, rank), (rank,)) for rank in everyone)
            for name, tensor in self.tensors.items()
        ]

    def local(self):
        for name, tensor in self.tensors.items():
            box = self.box(name, self.rank)
            yield {box: cut(tensor, box)}

    def box(self, name, rank):
        shape, axis = self.tensors[name].shape, self.axes.get(name, 0)
        bounds = list(full_box(shape))
        if axis is not None:
            bounds[axis] = (shape[axis] * rank // self.size, shape[axis] * (rank + 1) // self.size)
        return tuple(bounds)
