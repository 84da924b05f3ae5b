"""The tensors of a captured slot: where they lie."""

from trt_kvcache.memory.saved_tensors import allocate_tensors


def test_each_tensor_starts_at_a_multiple_of_256_bytes_of_one_allocation(memory, stream):
    tensors = allocate_tensors(memory, [(3, 5), (2, 128), (1,)], "float16", stream=stream)
    assert [tensor.offset for tensor in tensors] == [0, 256, 768]
    assert [tensor.ptr % 256 for tensor in tensors] == [0, 0, 0]
    assert {id(tensor.allocation) for tensor in tensors} == {id(tensors[0].allocation)}
    assert [(tensor.shape, tensor.dtype, tensor.is_contiguous) for tensor in tensors] == [
        ((3, 5), "float16", True),
        ((2, 128), "float16", True),
        ((1,), "float16", True),
    ]


def test_nothing_is_held_without_tensors(memory, stream):
    assert allocate_tensors(memory, [], "float16", stream=stream) == []
    assert memory.live_nbytes == 0
