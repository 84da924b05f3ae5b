import pytest

from trt_kvcache import errors

TREE = {
    "ConfigError": ValueError,
    "CheckpointError": ValueError,
    "RangeError": ValueError,
    "ShapeError": ValueError,
    "PlaceError": ValueError,
    "LayoutError": ValueError,
    "MappingError": ValueError,
    "SnapshotError": ValueError,
    "DTypeError": TypeError,
    "SlotError": IndexError,
    "LayerIndexError": IndexError,
    "SequenceError": KeyError,
    "CapacityError": RuntimeError,
    "BindingError": RuntimeError,
    "BuildError": RuntimeError,
    "EngineError": RuntimeError,
    "ProcessorError": RuntimeError,
    "QueueFullError": RuntimeError,
    "CaptureError": RuntimeError,
    "LengthsUnknown": RuntimeError,
    "ClosedError": RuntimeError,
    "ThreadError": RuntimeError,
    "CudaError": RuntimeError,
}


def test_the_table_has_every_error():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.KVCacheError)}
    assert defined == {"KVCacheError", *TREE}


@pytest.mark.parametrize("name", TREE)
def test_each_error_is_ours_and_the_builtin_that_a_caller_expects(name):
    error = getattr(errors, name)
    assert error.__bases__ == (errors.KVCacheError, TREE[name])
    assert str(error("slot 3: expected less than 2.")) == "slot 3: expected less than 2."


def test_the_root_is_no_builtin_error():
    assert errors.KVCacheError.__bases__ == (Exception,)


def test_sequence_error_reads_well_although_key_error_would_quote_it():
    assert str(errors.SequenceError("sequence 4 was destroyed.")) == "sequence 4 was destroyed."
    assert str(KeyError("sequence 4 was destroyed.")) == "'sequence 4 was destroyed.'"
    assert str(errors.SequenceError()) == ""
