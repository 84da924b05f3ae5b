// New tokens of a slot.
#pragma once

// New tokens of a slot that fit into the cache. new_lengths may be null: `width` for all.
__device__ __forceinline__ int count_new_tokens(const int* lengths, const int* new_lengths, long long slot,
                                                long long width, long long max_sequence_length) {
    const long long past = lengths[slot],
                    wanted = new_lengths ? min(static_cast<long long>(new_lengths[slot]), width) : width;
    return past < 0 ? 0 : static_cast<int>(max(min(wanted, max_sequence_length - past), 0LL));
}
