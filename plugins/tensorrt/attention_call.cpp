#include "attention_call.hpp"

#include <cstring>

#include "text.hpp"

namespace trt_kvcache {
namespace {

constexpr int64_t kWarp = 32, kAppendThreads = 256, kElementNbytes = 2, kChunk = 8;  // elements that a thread appends
constexpr double kLog2E = 1.4426950408889634;

// Arguments of a kernel: each has 64 bits (plugins/README.md).
class Arguments {
public:
    void add(void const* address) { store(address); }
    void add(double number) { store(number); }
    void add(int64_t number) { store(number); }
    template <typename... Values>
    void add_all(Values... values) {
        (add(values), ...);
    }
    void** pointers() { return pointers_; }

private:
    static constexpr int kCapacity = 40;

    template <typename Value>
    void store(Value value) {
        static_assert(sizeof(value) == sizeof(uint64_t));
        std::memcpy(&values_[count_], &value, sizeof(value));
        pointers_[count_] = &values_[count_];
        count_++;
    }

    uint64_t values_[kCapacity];
    void* pointers_[kCapacity];
    int count_ = 0;
};

// Address, strides in floats, and whether each token has a scale.
void add_scales(Arguments& arguments, AttentionAttributes const& attributes, void* scales, int64_t slot_scales) {
    if (!attributes.quantized()) return;
    int64_t const heads = attributes.num_kv_heads;
    if (attributes.kv_scales == kPerToken) {
        arguments.add_all(scales, slot_scales, slot_scales / 2, slot_scales / (2 * heads), int64_t{1});
    } else {
        arguments.add_all(scales, int64_t{0}, heads, int64_t{1}, int64_t{0});
    }
}

// The two factors of ScoreTransform (plugins/attention/softmax_state.cuh), and the address of attention sinks.
void add_score_factors(Arguments& arguments, AttentionAttributes const& attributes) {
    double const scale = attributes.score_scale(), softcap = attributes.softcap;
    arguments.add_all(kLog2E * (softcap != 0 ? softcap : scale), softcap != 0 ? scale / softcap : 0.0);
    arguments.add(static_cast<void const*>(nullptr));  // the plugin has no attention sinks
}

}  // namespace

AttentionCall::AttentionCall(AttentionAttributes const& attributes, AttentionSizes const& sizes, char const* dtype,
                             Gpu const& gpu)
    : attributes_(attributes),
      shape_{sizes.batch,        sizes.width,         sizes.tokens,          attributes.num_kv_heads,
             attributes.group(), attributes.head_dim, attributes.quantized()},
      kernels_(&find_kernels(gpu.arch, gpu.shared_nbytes, dtype, attributes.head_dim, attributes.stored_dtype())) {
    if (gpu.multiprocessors > kMaxMultiprocessors) {
        throw_failure("the GPU: expected at most ", kMaxMultiprocessors, " multiprocessors, got ", gpu.multiprocessors,
                      ".");
    }
    kv_nbytes_ = shape_.num_kv_heads * shape_.tokens * shape_.head_dim * (shape_.quantized ? 1 : kElementNbytes);
    slot_nbytes_ = 2 * kv_nbytes_;
    slot_scales_ = attributes.kv_scales == kPerToken ? 2 * shape_.num_kv_heads * sizes.scales : 0;
    own_partials_ = flagged_rows(gpu.multiprocessors, shape_.group) * row_nbytes_of_partials(shape_.head_dim);
    flagged_nbytes_ = 0;
    is_decode_ = false;
    if (shape_.batch == 0) return;
    int64_t flagged = 0;
    is_decode_ = plan_decode(*kernels_, shape_, gpu.multiprocessors, decode_plan_);
    if (is_decode_) {
        plan_decode_launch(decode_plan_, gpu);
        flagged = flagged_rows_of(decode_plan_, shape_, gpu.multiprocessors);
    } else {
        prefill_plan_ = plan_prefill(*kernels_, shape_, gpu.multiprocessors);
        plan_prefill_launches(prefill_plan_, gpu);
        flagged = flagged_rows_of(prefill_plan_, *kernels_);
    }
    flagged_nbytes_ = flagged * row_nbytes_of_partials(shape_.head_dim);
}

CUkernel AttentionCall::load(unsigned char const* code, char const* name, Gpu const& gpu, int32_t shared_nbytes) const {
    std::string const image =
        text_of(kernels_->is_ptx ? "PTX" : "machine code", " of sm_", kernels_->arch, ", for a GPU of sm_", gpu.arch);
    return load_kernel({code, image}, name, gpu.device, shared_nbytes);
}

void AttentionCall::plan_decode_launch(DecodePlan const& plan, Gpu const& gpu) {
    std::string const name = text_of("attention_decode_", plan.few ? "few_" : "", kDecodeRows[plan.row_index]);
    unsigned char const* const image = plan.few ? kernels_->few_image : kernels_->decode_image;
    main_.kernel = load(image, name.c_str(), gpu, plan.shared_nbytes);
    main_.grid_x = static_cast<unsigned>(plan.blocks);
    main_.threads = static_cast<unsigned>(kWarp * plan.warps);
    main_.shared_nbytes = static_cast<unsigned>(plan.shared_nbytes);
    main_.cooperative = plan.blocks > 1;
}

void AttentionCall::plan_prefill_launches(PrefillPlan const& plan, Gpu const& gpu) {
    std::string const name = text_of("attention_prefill_", kPrefillNames[plan.variant]);
    main_.kernel = load(kernels_->prefill_image, name.c_str(), gpu, plan.shared_nbytes);
    main_.grid_x = static_cast<unsigned>(plan.blocks);
    main_.threads = static_cast<unsigned>(kWarp * plan.warps);
    main_.shared_nbytes = static_cast<unsigned>(plan.shared_nbytes);
    main_.cooperative = plan.splits();
    if (plan.appends) return;
    // A thread for each chunk of elements; for a quantized cache a warp for each row.
    int64_t const threads = shape_.width * shape_.num_kv_heads * (shape_.quantized ? kWarp : shape_.head_dim / kChunk);
    append_.kernel = load(kernels_->prefill_image, "attention_append", gpu, 0);
    append_.grid_x = static_cast<unsigned>((threads + kAppendThreads - 1) / kAppendThreads);
    append_.grid_y = static_cast<unsigned>(shape_.batch);
    append_.threads = kAppendThreads;
}

int64_t AttentionCall::nbytes_of(Input input) const {
    int64_t const slot = input == Input::kCache ? slot_nbytes_ : slot_scales_ * static_cast<int64_t>(sizeof(float));
    return shape_.batch * slot;
}

void AttentionCall::run(AttentionAddresses const& addresses, CUstream stream) const {
    if (shape_.batch == 0) return;
    if (flagged_nbytes_) {
        CudaDriver const& driver = CudaDriver::get();
        auto const workspace = reinterpret_cast<CUdeviceptr>(addresses.workspace);
        driver.check(driver.cuMemsetD8Async(workspace, 0, static_cast<size_t>(flagged_nbytes_), stream),
                     "cuMemsetD8Async");
    }
    if (is_decode_) return decode(addresses, stream);
    if (!prefill_plan_.appends) append(addresses, stream);
    prefill(addresses, stream);
}

// Arguments in the order of plugins/attention/decode.cu and decode_few.cu. Tensors of TensorRT are contiguous.
void AttentionCall::decode(AttentionAddresses const& addresses, CUstream stream) const {
    int64_t const row = shape_.head_dim * kElementNbytes, kv_token = shape_.num_kv_heads * row,
                  q_token = shape_.group * kv_token;
    Arguments arguments;
    arguments.add_all(addresses.lengths, addresses.new_lengths, shape_.tokens, int64_t{attributes_.window});
    arguments.add_all(shape_.batch, shape_.num_kv_heads, decode_plan_.splits_per_head, decode_plan_.heads_per_block,
                      shape_.group);
    if (decode_plan_.few) arguments.add(shape_.width);
    arguments.add_all(static_cast<void const*>(addresses.cache), slot_nbytes_, kv_nbytes_);
    auto const add_rows = [&](void const* rows, int64_t token) {
        arguments.add_all(rows, shape_.width * token);
        if (decode_plan_.few) arguments.add(token);
    };
    add_rows(addresses.q, q_token);
    add_rows(addresses.k, kv_token);
    add_rows(addresses.v, kv_token);
    arguments.add_all(addresses.cos_sin, int64_t{attributes_.rotary_dim});
    add_score_factors(arguments, attributes_);
    auto const* const partials = static_cast<char const*>(addresses.workspace);
    arguments.add_all(static_cast<void const*>(addresses.out), static_cast<void const*>(partials),
                      static_cast<void const*>(partials + own_partials_));
    add_scales(arguments, attributes_, addresses.kv_scales, slot_scales_);
    launch(main_, arguments.pointers(), stream);
}

// Of attention_append in plugins/attention/prefill.cu.
void AttentionCall::append(AttentionAddresses const& addresses, CUstream stream) const {
    int64_t const token = shape_.num_kv_heads * shape_.head_dim * kElementNbytes, slot = shape_.width * token;
    Arguments arguments;
    arguments.add_all(addresses.k, addresses.v, slot, slot, token, token);
    arguments.add_all(static_cast<void const*>(addresses.cache), slot_nbytes_, kv_nbytes_, shape_.tokens);
    arguments.add_all(addresses.lengths, addresses.new_lengths, addresses.cos_sin, int64_t{attributes_.rotary_dim});
    arguments.add_all(shape_.width, shape_.num_kv_heads);
    add_scales(arguments, attributes_, addresses.kv_scales, slot_scales_);
    launch(append_, arguments.pointers(), stream);
}

// Of the prefill kernels in plugins/attention/prefill.cu.
void AttentionCall::prefill(AttentionAddresses const& addresses, CUstream stream) const {
    int64_t const row = shape_.head_dim * kElementNbytes, kv_token = shape_.num_kv_heads * row,
                  q_token = shape_.group * kv_token;
    Arguments arguments;
    arguments.add_all(addresses.lengths, addresses.new_lengths, shape_.tokens, int64_t{attributes_.window});
    arguments.add_all(shape_.batch, shape_.num_kv_heads, shape_.group, shape_.width, prefill_plan_.row_blocks,
                      int64_t{prefill_plan_.order});
    arguments.add_all(static_cast<void const*>(addresses.cache), slot_nbytes_, kv_nbytes_);
    arguments.add_all(addresses.q, shape_.width * q_token, q_token);
    arguments.add_all(addresses.k, shape_.width * kv_token, kv_token);
    arguments.add_all(addresses.v, shape_.width * kv_token, kv_token);
    arguments.add_all(addresses.cos_sin, int64_t{attributes_.rotary_dim});
    add_score_factors(arguments, attributes_);
    arguments.add_all(static_cast<void const*>(addresses.out), static_cast<void const*>(addresses.workspace));
    add_scales(arguments, attributes_, addresses.kv_scales, slot_scales_);
    launch(main_, arguments.pointers(), stream);
}

void AttentionCall::launch(Launch const& launch, void** arguments, CUstream stream) const {
    CUlaunchAttribute attributes[2];
    unsigned count = 0;
    if (launch.cooperative) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        attributes[count++].value.cooperative = 1;
    }
    if (kernels_->starts_early) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count++].value.programmaticStreamSerializationAllowed = 1;
    }
    CUlaunchConfig config{};
    config.gridDimX = launch.grid_x;
    config.gridDimY = launch.grid_y;
    config.gridDimZ = 1;
    config.blockDimX = launch.threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = launch.shared_nbytes;
    config.hStream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    CudaDriver const& driver = CudaDriver::get();
    // The driver takes a kernel of a library in place of a function.
    driver.check(driver.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(launch.kernel), arguments, nullptr),
                 "cuLaunchKernelEx");
}

}  // namespace trt_kvcache
