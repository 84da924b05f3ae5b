import pytest

from trt_kvcache import errors

TREE = {
    ValueError: "ConfigError CheckpointError RangeError ShapeError PlaceError LayoutError MappingError SnapshotError",
    TypeError: "DTypeError",
    IndexError: "SlotError LayerIndexError",
    KeyError: "SequenceError",
    RuntimeError: "CapacityError BindingError BuildError EngineError CaptureError LengthsUnknown ClosedError CudaError",
}


def test_the_table_has_every_error():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.KVCacheError)}
    assert defined == {"KVCacheError", *" ".join(TREE.values()).split()}
    assert errors.KVCacheError.__bases__ == (Exception,)


@pytest.mark.parametrize(("builtin", "name"), [(builtin, name) for builtin, names in TREE.items() for name in names.split()])
def test_each_error_is_ours_and_the_builtin_that_a_caller_expects_and_reads_well(builtin, name):
    error = getattr(errors, name)
    assert error.__bases__ == (errors.KVCacheError, builtin)
    assert str(error("slot 3: expected less than 2.")) == "slot 3: expected less than 2.", "a KeyError would quote it"
    assert str(error()) == ""
