"""What a decoder layer does between its matrix products, on the host, the emulated device and a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import ConfigError, DTypeError, LayoutError, ShapeError
from trt_kvcache.kernels import activated_mul, add_rms_norm, gelu_tanh_mul, qk_rms_norm, silu_mul
from trt_kvcache.memory.tensor import DeviceTensor

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
#: Half a unit in the last place, and what float32 sums in another order add.
ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7}


@pytest.fixture
def stream(memory):
    return memory.create_stream()


def rows(*shape, dtype, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(numpy_dtype(dtype))


def close(found, expected, dtype):
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=ROUNDING[dtype], atol=1e-6 * np.abs(expected).max())


def normed(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


ROWS = pytest.mark.parametrize(("count", "columns"), [(1, 2), (3, 40), (2, 896), (5, 2050), (1, 9000)])


@DTYPES
@pytest.mark.parametrize("offset", [{}, {"weight_offset": 1.0}])
@ROWS
def test_add_rms_norm(memory, stream, dtype, offset, count, columns):
    hidden, change = (rows(count, columns, dtype=dtype, seed=seed, scale=3) for seed in (1, 2))
    weight = rows(columns, dtype=dtype, seed=3)
    tensors = [memory.to_device(array, stream=stream) for array in (hidden, change, weight, np.full_like(hidden, np.nan))]
    add_rms_norm(*tensors[:3], out=tensors[3], eps=1e-5, **offset, stream=stream)
    total = (hidden.astype(np.float32) + change.astype(np.float32)).astype(hidden.dtype)
    np.testing.assert_array_equal(tensors[0].numpy(), total)
    np.testing.assert_array_equal(tensors[1].numpy(), change)
    wide = total.astype(np.float64)
    factor = weight.astype(np.float64) + sum(offset.values())
    close(tensors[3].numpy(), normed(wide, factor, 1e-5), dtype)


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("norms_change", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.7])
@pytest.mark.parametrize("scale", [None, 0.83])
@pytest.mark.parametrize("has_out", [False, True])
@ROWS
def test_add_rms_norm_of_a_change(memory, stream, dtype, offset, norms_change, factor, scale, has_out, count, columns):
    kind, rounding = numpy_dtype(dtype), ROUNDING[dtype]
    hidden, change = (rows(count, columns, dtype=dtype, seed=seed, scale=3) for seed in (1, 2))
    weight, change_weight = (rows(columns, dtype=dtype, seed=seed) for seed in (3, 4))
    arrays = (hidden, change, weight, change_weight, np.full_like(hidden, np.nan))
    total, added, last, first, out = (memory.to_device(array, stream=stream) for array in arrays)
    scales = None if scale is None else np.array([scale], kind)
    options = {"change_weight": first if norms_change else None, "change_factor": factor, "weight_offset": offset}
    options["scale"] = None if scales is None else memory.to_device(scales, stream=stream)
    add_rms_norm(total, added, last if has_out else None, out=out if has_out else None, eps=1e-5, **options, stream=stream)
    expected = change.astype(np.float64)
    if norms_change:
        expected = normed(expected, change_weight.astype(np.float64) + offset, 1e-5).astype(kind).astype(np.float64)
    expected, by = expected * factor, 1.0 if scales is None else float(scales[0])
    found, sums = total.numpy().astype(np.float64), hidden.astype(np.float64) + expected
    # These are rounded: the norm of the change, its product with the factor, the sum, and its product with the scale.
    assert (np.abs(found - by * sums) <= by * rounding * (2 * np.abs(expected) + 2 * np.abs(sums)) + 1e-6).all()
    if factor == 1 and not norms_change:
        of_floats = (hidden.astype(np.float32) + change.astype(np.float32)).astype(kind)
        np.testing.assert_array_equal(total.numpy(), (of_floats.astype(np.float32) * np.float32(by)).astype(kind))
    np.testing.assert_array_equal(added.numpy(), change)
    if has_out:
        close(out.numpy(), normed(found, weight.astype(np.float64) + offset, 1e-5), dtype)
    else:
        assert np.isnan(out.numpy().astype(np.float32)).all()


@DTYPES
@pytest.mark.parametrize("offset", [{}, {"weight_offset": 1.0}])
@pytest.mark.parametrize("of_all_heads", [False, True])
@pytest.mark.parametrize("v_eps", [None, 0.5])
@pytest.mark.parametrize("gap", [0, 6])
@pytest.mark.parametrize(
    ("count", "num_heads", "num_kv_heads", "head_dim"), [(1, 1, 1, 2), (3, 6, 2, 64), (2, 7, 1, 80), (9, 4, 4, 128), (2, 3, 1, 320)]
)
def test_qk_rms_norm(memory, stream, dtype, offset, of_all_heads, v_eps, gap, count, num_heads, num_kv_heads, head_dim):
    heads = num_heads + 2 * num_kv_heads
    wide = rows(count, heads * head_dim + gap, dtype=dtype, scale=3)
    weights = [rows(head_dim * (n if of_all_heads else 1), dtype=dtype, seed=n) for n in (num_heads, num_kv_heads)]
    given, *on_device = (memory.to_device(array, stream=stream) for array in (wide, *weights))
    qkv = DeviceTensor(
        given.allocation, shape=(count, heads, head_dim), dtype=dtype, strides=(wide.shape[1], head_dim, 1), offset=given.offset
    )
    counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    qk_rms_norm(qkv, *on_device, **counts, eps=1e-5, **offset, v_eps=v_eps, stream=stream)
    found, ends = given.numpy(), np.cumsum([0, num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim])
    kept = ends[2 if v_eps is None else 3]
    np.testing.assert_array_equal(found[:, kept:], wide[:, kept:], err_msg="v without a norm, and what is between the rows")
    if v_eps is not None:
        of_heads = wide[:, ends[2] : kept].astype(np.float64).reshape(count, num_kv_heads, head_dim)
        close(found[:, ends[2] : kept], normed(of_heads, 1, v_eps).reshape(count, -1), dtype)
    for first, end, weight in zip(ends[:2], ends[1:3], weights, strict=True):
        units = wide[:, first:end].astype(np.float64).reshape(count, -1, len(weight))
        expected = normed(units, weight.astype(np.float64) + sum(offset.values()), 1e-5)
        close(found[:, first:end], expected.reshape(count, -1), dtype)


def test_q_and_k_that_do_not_fit_are_refused(memory, stream):
    def tensor(*shape, dtype="float16"):
        return memory.to_device(rows(*shape, dtype=dtype), stream=stream)

    qkv, weight = tensor(2, 4, 6), tensor(6)
    before = qkv.numpy()
    apart = DeviceTensor(tensor(2, 8, 6).allocation, shape=(2, 4, 6), dtype="float16", strides=(48, 12, 1))
    overlapping = DeviceTensor(qkv.allocation, shape=(2, 3, 6), dtype="float16", strides=(6, 6, 1))
    for given, q_weight, error, text in (
        (tensor(2, 4, 5), tensor(5), ShapeError, r"qkv: expected \[up to 65535 rows, 3 heads or more, an even head_dim\], got "),
        (tensor(2, 2, 6), weight, ShapeError, r"qkv: expected .* 3 heads or more"),
        (apart, weight, LayoutError, "qkv: expected rows of dense heads that do not overlap, got "),
        (overlapping, weight, LayoutError, "qkv: expected rows of dense heads that do not overlap, got "),
        (qkv, tensor(18), ShapeError, r"q_weight: expected \[6\] for each head or \[12\] for all, got "),
        (qkv, tensor(6, dtype="bfloat16"), DTypeError, "q_weight: expected float16 or bfloat16, all of one dtype, got bfloat16"),
        (tensor(2, 4, 6, dtype="float32"), weight, DTypeError, "qkv: expected float16 or bfloat16"),
    ):
        with pytest.raises(error, match=text):
            qk_rms_norm(given, q_weight, weight, num_heads=2, num_kv_heads=1, eps=1e-5, stream=stream)
    with raises(ShapeError, "k_weight", expected="[6] for each head or [6] for all"):
        qk_rms_norm(qkv, weight, tensor(12), num_heads=2, num_kv_heads=1, eps=1e-5, stream=stream)
    with raises(ShapeError, "qkv", expected="5 heads or more"):
        qk_rms_norm(qkv, weight, weight, num_heads=1, num_kv_heads=2, eps=1e-5, v_eps=1e-5, stream=stream)
    np.testing.assert_array_equal(qkv.numpy(), before)


@DTYPES
@pytest.mark.parametrize("kernel", [silu_mul, gelu_tanh_mul])
@pytest.mark.parametrize(("count", "columns"), [(1, 2), (3, 40), (2, 4864), (5, 514)])
def test_gates(memory, stream, dtype, kernel, count, columns):
    gate_up = rows(count, 2 * columns, dtype=dtype, scale=4)
    given, out = (memory.to_device(array, stream=stream) for array in (gate_up, np.full((count, columns), np.nan, gate_up.dtype)))
    kernel(given, out=out, stream=stream)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    factor = 1 / (1 + np.exp(-gate)) if kernel is silu_mul else 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    close(out.numpy(), gate * factor * up, dtype)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("gap", [0, 6])
@pytest.mark.parametrize(("count", "columns"), [(1, 2), (3, 40), (5, 514)])
def test_activated_mul(memory, stream, dtype, activation, gap, count, columns):
    gate, wide = rows(count, columns, dtype=dtype, scale=4), rows(count, columns + gap, dtype=dtype, seed=1)
    given, factors, out = (memory.to_device(array, stream=stream) for array in (gate, wide, np.full_like(gate, np.nan)))
    factor = DeviceTensor(factors.allocation, shape=gate.shape, dtype=dtype, strides=(columns + gap, 1), offset=factors.offset)
    activated_mul(given, factor, activation=activation, out=out, stream=stream)
    exact = gate.astype(np.float64)
    by = 1 / (1 + np.exp(-exact)) if activation == "silu" else 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    # Two roundings. float32 has few bits of a GELU far below 0.
    np.testing.assert_allclose(out.numpy().astype(np.float64), exact * by * wide[:, :columns], rtol=2 * ROUNDING[dtype], atol=1e-5)
    np.testing.assert_array_equal(factors.numpy(), wide)


@DTYPES
def test_the_activation_is_rounded_before_the_product(memory, stream, dtype):
    gate, factor = rows(4, 64, dtype=dtype, scale=4), rows(4, 64, dtype=dtype, seed=1)
    given, by, out, activated, ones = (
        memory.to_device(array, stream=stream) for array in (gate, factor, *[np.full_like(gate, np.nan)] * 2, np.ones_like(gate))
    )
    activated_mul(given, ones, activation="gelu_tanh", out=activated, stream=stream)
    activated_mul(given, by, activation="gelu_tanh", out=out, stream=stream)
    expected = (activated.numpy().astype(np.float32) * factor.astype(np.float32)).astype(gate.dtype)
    np.testing.assert_array_equal(out.numpy(), expected)


def test_factors_that_do_not_fit_are_refused(memory, stream):
    def tensor(*shape, dtype="float16"):
        return memory.to_device(rows(*shape, dtype=dtype), stream=stream)

    gate, out = tensor(2, 6), tensor(2, 6)
    before, wide = out.numpy(), tensor(2, 12)
    strided, odd = (DeviceTensor(wide.allocation, shape=(2, 6), dtype="float16", strides=strides) for strides in ((12, 2), (7, 1)))
    for factor, error, text in (
        (tensor(2, 8), ShapeError, r"factor: expected shape \(2, 6\), got "),
        (tensor(2, 6, dtype="bfloat16"), DTypeError, "factor: expected float16 or bfloat16, all of one dtype, got bfloat16"),
        (strided, LayoutError, "factor: expected dense rows that begin at multiples of 4 bytes, got "),
        (odd, LayoutError, "factor: expected dense rows that begin at multiples of 4 bytes, got "),
    ):
        with pytest.raises(error, match=text):
            activated_mul(gate, factor, activation="silu", out=out, stream=stream)
    with raises(ConfigError, "activation", expected="silu, gelu_tanh", got="relu2"):
        activated_mul(gate, gate, activation="relu2", out=out, stream=stream)
    with raises(ShapeError, "gate", expected="an even number of columns"):
        activated_mul(tensor(2, 5), tensor(2, 5), activation="silu", out=tensor(2, 5), stream=stream)
    with raises(ShapeError, "out", expected="(2, 6)"):
        activated_mul(gate, gate, activation="silu", out=wide, stream=stream)
    np.testing.assert_array_equal(out.numpy(), before)


def test_what_does_not_fit_is_refused(memory, stream):
    def tensor(*shape, dtype="float16"):
        return memory.to_device(rows(*shape, dtype=dtype), stream=stream)

    hidden, weight = tensor(2, 6), tensor(6)
    before = hidden.numpy()
    every_other = DeviceTensor(tensor(2, 12).allocation, shape=(2, 6), dtype="float16", strides=(12, 2))
    for change, error, text in (
        (tensor(2, 8), ShapeError, r"change: expected shape \(2, 6\), got "),
        (tensor(2, 6, dtype="bfloat16"), DTypeError, "change: expected float16 or bfloat16, all of one dtype, got bfloat16"),
        (every_other, LayoutError, "change: expected a dense tensor, got "),
    ):
        with pytest.raises(error, match=text):
            add_rms_norm(hidden, change, weight, out=tensor(2, 6), eps=1e-5, stream=stream)
    with raises(ShapeError, "out", expected="None where weight is None, and nowhere else", got="DeviceTensor"):
        add_rms_norm(hidden, tensor(2, 6), None, out=tensor(2, 6), eps=1e-5, stream=stream)
    with raises(ShapeError, "change_weight", expected="(6,)"):
        add_rms_norm(hidden, tensor(2, 6), weight, out=tensor(2, 6), eps=1e-5, change_weight=tensor(8), stream=stream)
    with raises(ShapeError, "scale", expected="(1,)"):
        add_rms_norm(hidden, tensor(2, 6), weight, out=tensor(2, 6), eps=1e-5, scale=weight, stream=stream)
    with raises(ShapeError, "hidden", expected="even number of columns"):
        add_rms_norm(tensor(2, 5), tensor(2, 5), tensor(5), out=tensor(2, 5), eps=1e-5, stream=stream)
    with raises(ShapeError, "out", "(2, 2)"):
        silu_mul(tensor(2, 4), out=hidden, stream=stream)
    with raises(DTypeError, "gate_up", expected="float16 or bfloat16", got="float32"):
        silu_mul(tensor(2, 4, dtype="float32"), out=hidden, stream=stream)
    np.testing.assert_array_equal(hidden.numpy(), before)
