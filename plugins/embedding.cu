// Rows of an embedding table. Launched by trt_kvcache/kernels/cuda/embedding.py.
// Grid: x along a row, y and then z over tokens.

#include "units.cuh"

// out[token] = table[ids[token]], rows of row_nbytes; zeros for an id that is not in the table.
extern "C" __global__ void __launch_bounds__(kThreads) embed(const unsigned char* table, long long vocab, long long row_nbytes,
                                                             const int* ids, unsigned char* out, long long tokens) {
    const long long token = static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y;
    if (token >= tokens) return;
    const long long id = ids[token];
    unsigned char* into = out + token * row_nbytes;
    with_widest_unit(address(table) | address(out) | row_nbytes, [&](auto unit) {
        using Unit = decltype(unit);
        if (0 <= id && id < vocab) {
            copy_run<Unit>(into, table + id * row_nbytes, row_nbytes);
        } else {
            zero_run<Unit>(into, row_nbytes);
        }
    });
}
