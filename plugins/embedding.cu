// Gathers rows of an embedding table. Launched by trt_kvcache/kernels/embedding_kernels.py.
// Grid: x along a row, y and then z over tokens.

#include "vector_copy.cuh"

// out[token] = table[ids[token]], rows of row_nbytes; zeros for an id that is not in the table.
extern "C" __global__ void __launch_bounds__(kThreads)
    embed(const unsigned char* table, long long vocab_size, long long row_nbytes, const int* ids, unsigned char* out,
          long long num_tokens) {
    const long long token = static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y;
    if (token >= num_tokens) return;
    const long long id = ids[token];
    unsigned char* to = out + token * row_nbytes;
    with_widest_vector(address_of(table) | address_of(out) | row_nbytes, [&](auto vector) {
        using Vector = decltype(vector);
        if (0 <= id && id < vocab_size) {
            copy_bytes<Vector>(to, table + id * row_nbytes, row_nbytes);
        } else {
            zero_bytes<Vector>(to, row_nbytes);
        }
    });
}
