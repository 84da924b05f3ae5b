"""The wrappers of instructions in ``plugins/attention``: the CPU halves on the emulated device, the PTX on a GPU, both against NumPy."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.simt import run
from tests.simt.standin import need_cuda_memory
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.sources import source_folder

need_cuda_memory()

SOURCE = Path(__file__).with_name("ptx.cu")
DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4 * 2  # of what a lane has of a matrix of 8 rows
WORDS = 64  # warps' worth of single values


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    from cuda.core import Device, ObjectCode, Program, ProgramOptions

    arch = f"sm_{''.join(map(str, Device(0).compute_capability))}"
    if arch == run.ARCH:
        made = tmp_path_factory.mktemp("ptx") / "kernels"
        run.build_kernels(SOURCE, made, "none", macros={"WARPGROUPS": "1"})
        return ObjectCode.from_cubin(made.read_bytes())
    own = {"arch": "sm_90a", "define_macro": "WARPGROUPS"} if arch == "sm_90" else {"arch": arch}
    options = ProgramOptions(name=SOURCE.name, std="c++17", include_path=str(source_folder()), **own)
    return Program(SOURCE.read_text(), "c++", options).compile("cubin")


@pytest.fixture
def call(code, memory, stream):
    """Launches a kernel over arrays and numbers, and returns the first arrays afterwards."""

    def call(name, *arguments, blocks=1, threads=32, shared_nbytes=2048):
        from cuda.core import LaunchConfig, launch

        given = [memory.to_device(x.view(np.uint8), stream=stream) if isinstance(x, np.ndarray) else x for x in arguments]
        config = LaunchConfig(grid=blocks, block=threads, shmem_size=shared_nbytes)
        launch(stream, config, code.get_kernel(name), *[getattr(x, "ptr", x) for x in given])
        memory.synchronize(stream)
        return [x.numpy().view(before.dtype) for x, before in zip(given[:2], arguments, strict=False)]

    return call


@pytest.fixture
def random():
    return np.random.default_rng(7)


def bits(random, *shape):
    return random.integers(0, 2**32, shape, dtype=np.uint32)


def same(got, expected):
    """Whether each is the same number; NaN is NaN."""
    return np.array_equal(got.astype(np.float32), expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mma(call, random, dtype):
    a, b = (random.standard_normal(shape) * 2.0 ** random.integers(-6, 7, shape) for shape in ((16, 16), (16, 8)))
    a, b, sums = a.astype(dtype), b.astype(dtype), random.standard_normal((16, 8)).astype(np.float32)
    rows, columns = ROW[:, None] + [0, 8, 0, 8], COLUMN[:, None] + [0, 0, 8, 8]
    left = np.stack([a[rows, columns], a[rows, columns + 1]], -1)
    right = np.stack([b[COLUMN[:, None] + [0, 8], ROW[:, None]], b[COLUMN[:, None] + [1, 9], ROW[:, None]]], -1)
    rows, columns = ROW[:, None] + [0, 0, 8, 8], COLUMN[:, None] + [0, 1, 0, 1]
    words = [np.ascontiguousarray(x).view(np.uint32) for x in (left, right)]
    got, _ = call("multiply", sums[rows, columns], *words, int(dtype != np.float16))
    a, b = a.astype(np.float64), b.astype(np.float64)
    expected, size = (sums + a @ b)[rows, columns], (np.abs(sums) + np.abs(a) @ np.abs(b))[rows, columns]
    assert (np.abs(got - expected) <= 2.0**-19 * size).all()


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("columns", "transposed"), [(32, 0), (64, 0), (64, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_warpgroup_mma(call, random, memory, dtype, columns, transposed, part):
    if memory.arch not in ("sm_90", run.ARCH):
        pytest.skip("only sm_90 has them")
    a, b = ((random.standard_normal((64, 64)) * 2.0 ** random.integers(-6, 7, (64, 64))).astype(dtype) for _ in range(2))
    sums = random.standard_normal((64, 64)).astype(np.float32)
    got, _ = call(
        *("panel_products", sums, a.view(np.uint16), b.view(np.uint16), part, transposed, columns, int(dtype != np.float16)),
        **{"threads": 128, "shared_nbytes": 2 * 8192},
    )
    taken = slice(16 * part, 16 * part + 16)
    a, b = a.astype(np.float64)[:, taken], b.astype(np.float64)
    b = b[taken] if transposed else b[:columns, taken].T
    expected, size = sums[:, :columns] + a @ b, np.abs(sums[:, :columns]) + np.abs(a) @ np.abs(b)
    assert (np.abs(got[:, :columns] - expected) <= 2.0**-19 * size).all()
    assert np.array_equal(got[:, columns:], sums[:, columns:])


@pytest.mark.parametrize("transposed", [0, 1])
def test_ldmatrix(call, random, transposed):
    rows, places = bits(random, 32, 4), random.permutation(32).astype(np.uint32)
    got, _ = call("matrices", np.zeros((32, 4), np.uint32), rows, places, transposed)
    matrices = rows.view(np.uint16)[places].reshape(4, 8, 8)
    matrices = matrices.swapaxes(1, 2) if transposed else matrices
    expected = np.stack([matrices[:, ROW, COLUMN].T, matrices[:, ROW, COLUMN + 1].T], -1)
    assert np.array_equal(got.view(np.uint16).reshape(32, 4, 2), expected)


def test_transposed_matrix(call, random):
    words = bits(random, 32)
    got, _ = call("transposed_matrix", np.zeros(32, np.uint32), words)
    assert np.array_equal(got.view(np.uint16).reshape(8, 8), words.view(np.uint16).reshape(8, 8).T)


def test_cp_async(call, random):
    rows, valid = bits(random, 64, 4), random.integers(0, 2, 64, dtype=np.uint32)
    got, _ = call("copies", np.ones_like(rows), rows, valid)
    assert np.array_equal(got, rows * valid[:, None])


def test_load_once(call, random):
    rows, valid = bits(random, 64, 4), random.integers(0, 2, 64, dtype=np.uint32)
    got, _ = call("loads", np.ones_like(rows), rows, valid, threads=64)
    assert np.array_equal(got, rows * valid[:, None])


def test_load_once_if(call, random):
    rows = bits(random, 32, 4)
    got, _ = call("loads_if", np.ones_like(rows), rows)
    assert np.array_equal(got[:16], rows[:16])
    assert np.array_equal(got[16:], np.ones_like(rows[16:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_and_unpack(call, random, dtype):
    halves = np.arange(2**16, dtype=np.uint16).view(dtype)  # all there are
    values = bits(random, 2**16).view(np.float32)
    values = np.where(np.isnan(values), np.float32(np.nan), values)  # one that is quiet
    values[::2] = random.standard_normal(2**15) * 2.0 ** random.integers(-26, 17, 2**15)
    with np.errstate(invalid="ignore"):
        values[::8] = (halves[::8].astype(np.float64) + halves[1::8].astype(np.float64)) / 2  # between two
    packed, unpacked = call(
        "convert", np.zeros(2**15, np.uint32), np.zeros(2**16, np.float32), values, halves, int(dtype != np.float16), blocks=2**10
    )
    with np.errstate(over="ignore", invalid="ignore"):
        assert same(packed.view(dtype), values.astype(dtype))
        assert same(unpacked, halves)


#: What K and V are stored as: its number in ptx.cu. The last one is by integer operations.
CODES = {"int8": 0, "float8_e4m3fn": 1, "float8_e4m3fn by bits": 2}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*CODES, "float8_e4m3fn in order"])
def test_widen(call, random, kind, dtype):
    quantized = np.concatenate([np.arange(256), random.integers(0, 256, 768)]).astype(np.uint8)
    if kind.endswith("bits"):
        quantized[quantized & 0x7F == 0x7F] = 0
    number = CODES.get(kind, 3)
    got, _ = call("widen_quantized", np.zeros((256, 4), np.uint16), quantized, number, int(dtype != np.float16), blocks=8)
    stored = quantized.view(numpy_dtype(kind.split()[0])).reshape(256, 4)[:, [0, 1, 2, 3] if number == 3 else [0, 2, 1, 3]]
    assert same(got.view(dtype), stored)


@pytest.mark.parametrize("kind", list(CODES))
def test_quantize(call, random, kind):
    stored = numpy_dtype(kind.split()[0])
    largest = 127 if kind == "int8" else 448
    levels = np.arange(256, dtype=np.uint8).view(stored).astype(np.float32)
    levels = np.sort(levels[np.abs(levels) <= largest])
    between = (levels[1:] + levels[:-1]) / 2
    special = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1e30, -3e38, 1e-45, 2.0**-10, largest + 0.5, -largest - 16], np.float32)
    values = np.concatenate(
        [levels, between, np.nextafter(between, np.float32(np.inf)), np.nextafter(between, np.float32(-np.inf)), special]
    )
    values = np.concatenate([values, (random.standard_normal(2048 - len(values)) * 2.0 ** random.integers(-12, 9)).astype(np.float32)])
    scales = np.where(np.arange(512) < 300, 1, random.uniform(1e-3, 3, 512)).astype(np.float32)
    got, _ = call("quantize_values", np.zeros((512, 4), np.uint8), values, scales, CODES[kind], blocks=16)
    with np.errstate(over="ignore"):
        quotients = np.clip(values.reshape(512, 4) / scales[:, None], -largest, largest)
    if kind == "int8":
        expected = np.rint(np.nan_to_num(quotients)).astype(np.int8)
    else:
        expected = quotients.astype(stored)
        expected[np.isnan(quotients)] = np.nan
    assert np.array_equal(got, expected.view(np.uint8))


def test_functions(call, random):
    exponents = np.concatenate([random.uniform(-160, 127.9, 2040), [0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan, -3e38]])
    values = bits(random, 2048).view(np.float32)
    values[np.abs(values) < 2.0**-126] = 0
    exponents = exponents.astype(np.float32)
    zeros = np.zeros(2048, np.float32)
    got = call("functions", zeros, zeros.copy(), exponents, values, blocks=64)
    with np.errstate(all="ignore"):
        expected = np.exp2(exponents.astype(np.float64)), 1 / values.astype(np.float64)
    for one, right in zip(got, expected, strict=True):
        finite = np.isfinite(right) & (np.abs(right) < 2.0**128)
        assert same(one[~finite], right[~finite])
        one, right = one[finite], right[finite]
        assert (np.abs(one - right) <= 2.0**-21 * np.abs(right) + 2.0**-126).all()


@pytest.mark.parametrize("size", [1.0, 3e-38, 1e38])
def test_packed_values_of_a_quad(call, random, size):
    values = (random.standard_normal((4, 8, 32)) * 10.0 ** random.integers(-3, 1, (4, 8, 32)) * size / 8).astype(np.float32)
    values[1, 2], values[3, 1, :3], values[0, 3, 5] = 0, 0, size
    larger, unpacked = call("pack_values", np.zeros((4, 32), np.float32), np.zeros_like(values), values, blocks=4)
    pairs = values.reshape(4, 32, 8)[..., :2]
    assert np.array_equal(larger, pairs.max(-1))
    largest = np.abs(values).max(-1, keepdims=True)
    assert (np.abs(unpacked.astype(np.float64) - values) <= largest * 2.0**-15.9 + 1e-34).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_packed_values_beside_one_that_is_no_number(call, random, bad):
    values = random.standard_normal((4, 8, 32)).astype(np.float32)
    values[2, 5, 8] = bad
    larger, unpacked = call("pack_values", np.zeros((4, 32), np.float32), np.zeros_like(values), values, blocks=4)
    assert np.array_equal(larger, values.reshape(4, 32, 8)[..., :2].max(-1), equal_nan=True)
    finite = np.isfinite(unpacked).all(-1)
    assert not np.isfinite(unpacked[2, 5]).any()
    assert finite.sum() == 31


def test_warp_reductions(call, random):
    values = random.integers(-(2**25), 2**25, 4 * 32, dtype=np.int32)
    sums, maxima = call("warp_reductions", np.zeros(4 * 32, np.int32), np.zeros(4 * 32, np.int32), values, blocks=4)
    assert np.array_equal(sums, values.reshape(4, 32).sum(1).repeat(32))
    assert np.array_equal(maxima, values.reshape(4, 32).max(1).repeat(32))


def test_a_block_publishes_vectors_for_the_next(call, random):
    values = bits(random, 8, 32, 4).view(np.float32)
    values.reshape(-1)[::7], values.reshape(-1)[1::7] = 0, -0.0
    received, places = (
        x.view(np.uint32).reshape(8, 32, 4) for x in call("publish", np.zeros_like(values), np.zeros_like(values), values, blocks=8)
    )
    published = values.view(np.uint32).copy()
    published[..., 3][values[..., 3] == 0] = 1 << 31
    assert np.array_equal(received[1:], published[:-1])
    assert not places[:-1, :, 3].any()
    assert np.array_equal(places[-1], published[-1])
