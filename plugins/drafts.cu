// Drafts of a small model or a head that stay on the device: the rows that verify them, the tokens that are accepted,
// and the rows of the next draft. Launched by trt_kvcache/kernels/draft_kernels.py. Arrays of slots are int32 [slots]
// of the large model, unless they are said to be of the drafter.

#include "sampling/rows.cuh"
#include "vector_copy.cuh"

__device__ __forceinline__ long long global_thread() {
    return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// The parameters of a row whose token comes `offset` tokens later.
__device__ __forceinline__ RowParams later(RowParams params, long long offset) {
    params.counter += static_cast<unsigned long long>(offset);
    return params;
}

// Rows that verify drafts, a thread for each of ids [slots, width]. Token 0 of a slot is pending[slot], token i the one
// that the drafter chose in its step i - 1: drafts [steps, draft_slots], at sources[slot]. asked[slot]: tokens of its
// draft, -1 for an idle slot. lengths[slot]: the tokens before the first error. Other tokens are 0, and idle.
extern "C" __global__ void place_drafts(const RowResult* drafts, long long draft_slots, const int* asked,
                                        const int* sources, const int* pending, const RowParams* params, int* lengths,
                                        int* ids, RowParams* rows, long long slots, long long width) {
    const long long row = global_thread(), slot = row / width, place = row % width;
    if (slot >= slots) return;
    const RowResult* const draft = drafts + sources[slot];
    int length = 0;
    while (length < asked[slot] && draft[length * draft_slots].error == kNoError) length++;
    const bool runs = asked[slot] >= 0 && place <= length;
    ids[row] = !runs ? 0 : place == 0 ? pending[slot] : draft[(place - 1) * draft_slots].token;
    rows[row] = runs ? later(params[slot], place) : RowParams{};
    if (place == 0) lengths[slot] = length;
}

// The first tokens of a draft that equal the chosen ones are accepted. A thread for each slot: counts[slot] is 1 plus
// these, 0 for an idle slot; starts[slot] and the counter of params[slot] go on by it; pending[slot] is the last chosen
// token, or 0 if that is an error. An error has token -1, which equals no id. ids, chosen [slots, width].
extern "C" __global__ void accept_drafts(const int* ids, const RowResult* chosen, long long width, const int* asked,
                                         const int* lengths, int* starts, int* counts, int* pending, RowParams* params,
                                         long long slots) {
    const long long slot = global_thread();
    if (slot >= slots) return;
    if (asked[slot] < 0) {
        counts[slot] = 0;
        return;
    }
    const long long first = slot * width;
    int equal = 0;
    while (equal < lengths[slot] && chosen[first + equal].token == ids[first + equal + 1]) equal++;
    counts[slot] = equal + 1;
    starts[slot] += equal + 1;
    pending[slot] = max(chosen[first + equal].token, 0);
    params[slot] = later(params[slot], equal + 1);
}

// The first rows of the drafter in the next draft: the accepted tokens and the one chosen after them. A thread for each
// of ids [draft_slots, draft_width]. targets[d]: slot of the large model whose draft slot d of the drafter generates, or
// -1. The rows of d begin at starts[targets[d]] - counts[targets[d]] + offsets[d]; those of a slot without a target at
// lengths[d], with nothing to take. takes[d]: number of these tokens; last[d]: index of the last one, 0 for none.
// chosen [slots, width].
extern "C" __global__ void feed_drafter(const RowResult* chosen, long long width, const int* counts, const int* starts,
                                        const RowParams* params, const int* targets, const int* offsets,
                                        const int* lengths, int* ids, int* draft_starts, int* takes, int* last,
                                        RowParams* rows, long long draft_slots, long long draft_width) {
    const long long row = global_thread(), slot = row / draft_width, place = row % draft_width;
    if (slot >= draft_slots) return;
    const int target = targets[slot], count = target < 0 ? 0 : counts[target];
    ids[row] = place < count ? max(chosen[target * width + place].token, 0) : 0;
    if (place > 0) return;
    draft_starts[slot] = target < 0 ? lengths[slot] : starts[target] - count + offsets[slot];
    takes[slot] = count;
    last[slot] = max(count - 1, 0);
    rows[slot] = target < 0 ? RowParams{} : params[target];
}

// Copies rows i = 0, 1, ... of each slot: from row slot * from_stride + from_offsets[slot] + i to row
// places[slot] * to_stride + to_offsets[slot] + i. Without places, the place of a slot is the slot itself; without
// offsets, offsets are 0.
// Grid: x along a row, y over the rows of a slot, z over slots.
extern "C" __global__ void __launch_bounds__(kThreads)
    copy_slot_rows(unsigned char* to, const int* places, long long to_stride, const int* to_offsets,
                   const unsigned char* from, long long from_stride, const int* from_offsets, long long row_nbytes) {
    const long long slot = blockIdx.z, row = blockIdx.y;
    const long long to_row = (places ? places[slot] : slot) * to_stride + (to_offsets ? to_offsets[slot] : 0) + row,
                    from_row = slot * from_stride + (from_offsets ? from_offsets[slot] : 0) + row;
    with_widest_vector(address_of(to) | address_of(from) | row_nbytes, [&](auto vector) {
        copy_bytes<decltype(vector)>(to + to_row * row_nbytes, from + from_row * row_nbytes, row_nbytes);
    });
}
