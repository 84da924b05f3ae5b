// Depthwise causal convolution over the new tokens of each slot. Launched by
// trt_kvcache/kernels/causal_conv1d_kernels.py.
//
// A thread owns kChannels channels of a slot and walks over a tile of tokens, with the last inputs in registers. The
// state of a channel is its last kWidth inputs, oldest first. The threads of the first tile read the past state and
// write the present one, each of its own channels: so the two may be at one address, and no other thread looks at
// either.

#include "dependent_launch.cuh"
#include "recurrent/elements.cuh"
#include "recurrent/functions.cuh"

using Element = ELEMENT;
using State = STATE;

// trt_kvcache/kernels/causal_conv1d_kernels.py has the first three numbers.
constexpr int kConvThreads = 128;
constexpr int kConvBlocksPerSm = 4;
constexpr int kTokensInFlight = 4;  // tokens that are loaded together
constexpr int kUpdateBlocksPerSm = 7;

struct ConvParams {
    Tokens x, gate_in, gate_out;  // the gates may be null
    const void* weight;           // [channels, kWidth]
    const void* bias;             // [channels], or null
    const void* past;             // [B, channels, kWidth]
    void* present;
    const int* new_lengths;
    long long width, channels, silu, tile_tokens;
    void* out;  // [B, width, channels]
};

// Input of the convolution at a token: x, or its product with the gate, rounded as the state keeps it.
template <int kChannels, bool kGated>
struct Input {
    Fetched<Element, kChannels> x, gate;

    __device__ __forceinline__ void fetch(const ConvParams& params, long long slot, long long token,
                                          long long channel) {
        x.fetch(params.x.row(slot, token), channel);
        if (kGated && params.gate_in.data) gate.fetch(params.gate_in.row(slot, token), channel);
    }
    __device__ __forceinline__ void unpack_to(const ConvParams& params, float (&values)[kChannels]) const {
        x.unpack_to(values);
        if (!kGated || !params.gate_in.data) return;
        float gates[kChannels];
        gate.unpack_to(gates);
#pragma unroll
        for (int c = 0; c < kChannels; c++) values[c] = rounded(Element{}, values[c] * gates[c]);
    }
};

template <bool kGated, int kChannels>
__device__ __forceinline__ void load_input(const ConvParams& params, long long slot, long long token, long long channel,
                                           float (&values)[kChannels]) {
    Input<kChannels, kGated> input;
    input.fetch(params, slot, token, channel);
    input.unpack_to(params, values);
}

// The present state: the last kWidth of past inputs and `count` new ones.
template <int kWidth, int kChannels, bool kGated>
__device__ __forceinline__ void store_state(const ConvParams& params, long long slot, long long channel, int count,
                                            const float (&past)[kChannels * kWidth], const float (&first)[kChannels]) {
    const long long index = (slot * params.channels + channel) * kWidth;
    if (count == 0) {  // bit for bit, NaN too
        if (params.past == params.present) return;
        copy_elements<State, kChannels * kWidth>(params.present, params.past, index);
        return;
    }
    float state[kChannels * kWidth];
#pragma unroll
    for (int column = 0; column < kWidth; column++) {
        float input[kChannels] = {};
        const int token = count - kWidth + column;
        if (token > 0) load_input<kGated>(params, slot, token, channel, input);
#pragma unroll
        for (int c = 0; c < kChannels; c++) {
            float kept = token == 0 ? first[c] : input[c];
#pragma unroll
            for (int shift = 1; shift < kWidth; shift++) {
                if (column + shift < kWidth)
                    kept = shift == count ? past[c * kWidth + min(column + shift, kWidth - 1)] : kept;
            }
            state[c * kWidth + column] = kept;
        }
    }
    store_elements(State{}, params.present, index, state);
}

template <int kWidth, int kChannels, bool kGated>
__device__ __forceinline__ void convolve(const ConvParams& params) {
    const long long channel = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * kChannels,
                    slot = blockIdx.z;
    if (channel >= params.channels) return;
    const long long first = static_cast<long long>(blockIdx.y) * params.tile_tokens,
                    end = min(first + params.tile_tokens, params.width);
    float weights[kChannels * kWidth], bias[kChannels] = {};
    load_elements(Element{}, params.weight, channel * kWidth, weights);
    if (params.bias) load_elements(Element{}, params.bias, channel, bias);
    grid_dependency_wait();
    float window[kWidth - 1][kChannels] = {};  // the inputs before the token, oldest first
    Input<kChannels, kGated> inputs[kTokensInFlight];
    Fetched<Element, kChannels> gates_out[kTokensInFlight];
    const auto fetch = [&](int i, long long token) {
        inputs[i].fetch(params, slot, token, channel);
        if (kGated && params.gate_out.data) gates_out[i].fetch(params.gate_out.row(slot, token), channel);
    };
    fetch(0, first);  // before it is known whether it is new
    int count;
    if (first == 0) {
        float past[kChannels * kWidth], input[kChannels];
        load_elements(State{}, params.past, (slot * params.channels + channel) * kWidth, past);
        count = count_new(params.new_lengths, slot, params.width);
        inputs[0].unpack_to(params, input);
        store_state<kWidth, kChannels, kGated>(params, slot, channel, count, past, input);
#pragma unroll
        for (int i = 0; i < kWidth - 1; i++) {
#pragma unroll
            for (int c = 0; c < kChannels; c++) window[i][c] = past[c * kWidth + i + 1];
        }
    } else {
        count = count_new(params.new_lengths, slot, params.width);
        if (first < count) {
#pragma unroll
            for (int i = 0; i < kWidth - 1; i++)
                load_input<kGated>(params, slot, first - (kWidth - 1) + i, channel, window[i]);
        }
    }
    for (long long group = first; group < end; group += kTokensInFlight) {
#pragma unroll
        for (int i = 0; i < kTokensInFlight; i++) {
            if (group + i != first && group + i < min(end, static_cast<long long>(count))) fetch(i, group + i);
        }
#pragma unroll
        for (int i = 0; i < kTokensInFlight; i++) {
            if (group + i >= end) continue;
            float input[kChannels], gates[kChannels], sums[kChannels];
            inputs[i].unpack_to(params, input);
            gates_out[i].unpack_to(gates);
#pragma unroll
            for (int c = 0; c < kChannels; c++) {
                float sum = bias[c] + input[c] * weights[c * kWidth + kWidth - 1];
#pragma unroll
                for (int j = 0; j < kWidth - 1; j++) sum += window[j][c] * weights[c * kWidth + j];
                if (params.silu) sum = silu(sum);
                if (kGated && params.gate_out.data) sum *= gates[c];
                sums[c] = group + i < count ? sum : 0.0f;
#pragma unroll
                for (int j = 0; j < kWidth - 2; j++) window[j][c] = window[j + 1][c];
                window[kWidth - 2][c] = input[c];
            }
            store_elements(Element{}, params.out, (slot * params.width + group + i) * params.channels + channel, sums);
        }
    }
}

// One new token of each slot. A thread issues all its loads before it computes anything, and before it knows whether the
// slot has a new token.
template <int kWidth, int kChannels, bool kGated>
__device__ __forceinline__ void update(const ConvParams& params) {
    const long long channel = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * kChannels,
                    slot = blockIdx.z;
    if (channel >= params.channels) return;
    const long long index = slot * params.channels + channel;
    float weights[kChannels * kWidth], bias[kChannels] = {}, state[kChannels * kWidth], input[kChannels],
                                       gates[kChannels], sums[kChannels] = {};
    load_elements(Element{}, params.weight, channel * kWidth, weights);
    if (params.bias) load_elements(Element{}, params.bias, channel, bias);
    grid_dependency_wait();
    load_elements(State{}, params.past, index * kWidth, state);
    load_input<kGated>(params, slot, 0, channel, input);
    if (kGated && params.gate_out.data) load_elements(Element{}, params.gate_out.row(slot, 0), channel, gates);
    if (count_new(params.new_lengths, slot, 1) > 0) {
#pragma unroll
        for (int c = 0; c < kChannels; c++) {
            const int first = c * kWidth, last = first + kWidth - 1;
            float sum = bias[c] + input[c] * weights[last];
#pragma unroll
            for (int j = first; j < last; j++) {
                state[j] = state[j + 1];
                sum += state[j] * weights[j];
            }
            state[last] = input[c];
            if (params.silu) sum = silu(sum);
            if (kGated && params.gate_out.data) sum *= gates[c];
            sums[c] = sum;
        }
        store_elements(State{}, params.present, index * kWidth, state);
    } else if (params.past != params.present) {
        copy_elements<State, kChannels * kWidth>(params.present, params.past, index * kWidth);  // bit for bit, NaN too
    }
    store_elements(Element{}, params.out, index, sums);
}

// The channels of a thread: a vector in a prefill. In a decode step fewer, so that more threads are resident, as long
// as states are vectors.
constexpr int kVectorChannels = kPerVector<Element>;
template <int kWidth>
constexpr int kUpdateChannels = kWidth == 3 ? kVectorChannels : kVectorChannels / 2;

template <int kNumber>
struct Constant {
    static constexpr int value = kNumber;
};

// Calls `run` with the width of the kernel, and whether there are gates.
template <class Run>
__device__ __forceinline__ void choose(const ConvParams& params, long long kernel_width, Run run) {
    const auto choose_gates = [&](auto width) {
        if (params.gate_in.data || params.gate_out.data) {
            run(width, Constant<true>{});
        } else {
            run(width, Constant<false>{});
        }
    };
    if (kernel_width == 2) {
        choose_gates(Constant<2>{});
    } else if (kernel_width == 3) {
        choose_gates(Constant<3>{});
    } else {
        choose_gates(Constant<4>{});
    }
}
template <int kChannels>
__device__ __forceinline__ void convolve(const ConvParams& params, long long kernel_width) {
    choose(params, kernel_width, [&](auto width, auto gates) {
        convolve<decltype(width)::value, kChannels, decltype(gates)::value>(params);
    });
}
__device__ __forceinline__ void update(const ConvParams& params, long long kernel_width) {
    choose(params, kernel_width, [&](auto width, auto gates) {
        update<decltype(width)::value, kUpdateChannels<decltype(width)::value>, decltype(gates)::value>(params);
    });
}

#define PARAMETERS \
    const unsigned char *x, long long x_slot, long long x_token, const unsigned char *gate_in, long long gate_in_slot, \
        long long gate_in_token, const unsigned char *gate_out, long long gate_out_slot, long long gate_out_token, \
        const void *weight, const void *bias, const void *past, void *present, const int *new_lengths, \
        long long width, long long channels, long long kernel_width, long long silu, long long tile_tokens, void *out
#define ARGUMENTS \
    {{x, x_slot, x_token}, \
     {gate_in, gate_in_slot, gate_in_token}, \
     {gate_out, gate_out_slot, gate_out_token}, \
     weight, \
     bias, \
     past, \
     present, \
     new_lengths, \
     width, \
     channels, \
     silu, \
     tile_tokens, \
     out}

// Grid: x over channels, y over tiles of tokens, z over slots. Channels in vectors of 16 bytes.
extern "C" __global__ void __launch_bounds__(kConvThreads, kConvBlocksPerSm) causal_conv1d(PARAMETERS) {
    convolve<kVectorChannels>(ARGUMENTS, kernel_width);
}
// The same, with one new token.
extern "C" __global__ void __launch_bounds__(kConvThreads, kUpdateBlocksPerSm) causal_conv1d_update(PARAMETERS) {
    update(ARGUMENTS, kernel_width);
}
// The same, one channel a thread: for any number of channels and any strides.
extern "C" __global__ void __launch_bounds__(kConvThreads) causal_conv1d_any(PARAMETERS) {
    convolve<1>(ARGUMENTS, kernel_width);
}
