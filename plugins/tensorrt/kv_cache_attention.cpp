#include "kv_cache_attention.hpp"

#include <atomic>
#include <mutex>
#include <set>
#include <string>

#include "log.hpp"
#include "text.hpp"

using namespace nvinfer1;

namespace trt_kvcache {
namespace {

constexpr int32_t kSuccess = 0, kFailure = -1;

Sizes sizes_of(Dims const& dims) {
    Sizes sizes(dims.d, dims.d + dims.nbDims);
    for (int64_t& size : sizes) size = size < 0 ? kUnknown : size;
    return sizes;
}

Sizes sizes_of(DimsExprs const& expressions) {
    Sizes sizes;
    for (int32_t axis = 0; axis < expressions.nbDims; axis++) {
        IDimensionExpr const& size = *expressions.d[axis];
        sizes.push_back(size.isConstant() ? size.getConstantValue() : kUnknown);
    }
    return sizes;
}

// The results of a function, one for each tensor.
template <typename Tensor, typename Function>
auto for_each(Tensor const* tensors, int32_t count, Function function) {
    std::vector<decltype(function(*tensors))> results;
    for (int32_t i = 0; i < count; i++) results.push_back(function(tensors[i]));
    return results;
}

char const* dtype_of(DataType q) { return q == DataType::kHALF ? "float16" : "bfloat16"; }

// Of a build, which needs no kernels, but whose engine does.
void warn_of_missing_kernels(AttentionAttributes const& attributes, DataType q) {
    static std::mutex mutex;
    static std::set<std::string> warned;
    std::string const missing = missing_kernels(dtype_of(q), attributes.head_dim, attributes.stored_dtype());
    if (missing.empty()) return;
    std::lock_guard<std::mutex> const lock(mutex);
    if (warned.insert(missing).second) log(ILogger::Severity::kWARNING, missing);
}

void warn_of_copies() {
    static std::atomic_flag warned = ATOMIC_FLAG_INIT;
    if (warned.test_and_set()) return;
    log(ILogger::Severity::kWARNING,
        "TensorRT gave a plugin layer separate memory for the cache's output: each step copies the layer's whole cache.");
}

void warn_of_ptx() {
    static std::atomic_flag warned = ATOMIC_FLAG_INIT;
    if (warned.test_and_set()) return;
    log(ILogger::Severity::kWARNING,
        "The plugin library has no machine code for this GPU: the driver has compiled its PTX. Build the library for it.");
}

}  // namespace

KVCacheAttention::KVCacheAttention(AttentionAttributes const& attributes)
    : attributes_(attributes), outputs_(outputs_of(attributes_)), fields_(attributes_.fields()),
      stored_fields_{static_cast<int32_t>(fields_.size()), fields_.data()} {}

IPluginCapability* KVCacheAttention::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* KVCacheAttention::clone() noexcept {
    return reported<IPluginV3*>("clone", nullptr, [&] { return new KVCacheAttention(attributes_); });
}

AsciiChar const* KVCacheAttention::getPluginVersion() const noexcept {
    return attributes_.quantized() ? kQuantizedVersion : kPluginVersion;
}

int32_t KVCacheAttention::getOutputDataTypes(DataType* types, int32_t num_outputs, DataType const* input_types,
                                             int32_t num_inputs) const noexcept {
    return reported("getOutputDataTypes", kFailure, [&] {
        check_dtypes(attributes_, {input_types, input_types + num_inputs});
        for (int32_t i = 0; i < num_outputs; i++) types[i] = input_types[static_cast<int32_t>(outputs_[i].like)];
        return kSuccess;
    });
}

int32_t KVCacheAttention::getOutputShapes(DimsExprs const* inputs, int32_t num_inputs, DimsExprs const*, int32_t,
                                          DimsExprs* outputs, int32_t num_outputs, IExprBuilder&) noexcept {
    return reported("getOutputShapes", kFailure, [&] {
        check_shapes(attributes_, for_each(inputs, num_inputs, [](DimsExprs const& shape) { return sizes_of(shape); }));
        for (int32_t i = 0; i < num_outputs; i++) outputs[i] = inputs[static_cast<int32_t>(outputs_[i].like)];
        return kSuccess;
    });
}

int32_t KVCacheAttention::getAliasedInput(int32_t output) noexcept {
    return outputs_[output].aliased ? static_cast<int32_t>(outputs_[output].like) : -1;
}

bool KVCacheAttention::supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors,
                                                 int32_t num_inputs, int32_t) noexcept {
    return reported("supportsFormatCombination", false, [&] {
        auto const inputs = inputs_of(attributes_, num_inputs);
        Input const input = position < num_inputs ? inputs[position] : outputs_[position - num_inputs].like;
        PluginTensorDesc const& desc = tensors[position].desc;
        if (desc.format != TensorFormat::kLINEAR) return false;
        return position == 0 ? is_dtype_of_q(desc.type)
                             : takes_dtype(input, attributes_, desc.type, tensors[0].desc.type);
    });
}

int32_t KVCacheAttention::configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                                          DynamicPluginTensorDesc const*, int32_t) noexcept {
    return reported("configurePlugin", kFailure, [&] {
        using Desc = DynamicPluginTensorDesc;
        check_dtypes(attributes_, for_each(inputs, num_inputs, [](Desc const& input) { return input.desc.type; }));
        check_shapes(attributes_, for_each(inputs, num_inputs, [](Desc const& input) { return sizes_of(input.min); }));
        check_shapes(attributes_, for_each(inputs, num_inputs, [](Desc const& input) { return sizes_of(input.max); }));
        warn_of_missing_kernels(attributes_, inputs[0].desc.type);
        return kSuccess;
    });
}

size_t KVCacheAttention::getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                                          int32_t) const noexcept {
    return static_cast<size_t>(workspace_nbytes(attributes_.group(), attributes_.head_dim));
}

int32_t KVCacheAttention::onShapeChange(PluginTensorDesc const* inputs, int32_t num_inputs, PluginTensorDesc const*,
                                        int32_t) noexcept {
    shapes_.reset();
    call_.reset();
    return reported("onShapeChange", kFailure, [&] {
        check_dtypes(attributes_,
                     for_each(inputs, num_inputs, [](PluginTensorDesc const& input) { return input.type; }));
        auto const shapes =
            for_each(inputs, num_inputs, [](PluginTensorDesc const& input) { return sizes_of(input.dims); });
        AttentionSizes const sizes = check_shapes(attributes_, shapes);
        shapes_ = Shapes{inputs_of(attributes_, num_inputs), sizes, dtype_of(inputs[0].type)};
        return kSuccess;
    });
}

int32_t KVCacheAttention::enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const* inputs,
                                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return reported("enqueue", kFailure, [&] {
        if (!shapes_) throw_failure("expected onShapeChange first.");
        if (!call_) {
            call_.emplace(attributes_, shapes_->sizes, shapes_->dtype, current_gpu());
            if (call_->is_ptx()) warn_of_ptx();
        }
        void const* given[kMaxInputs] = {};  // by Input
        for (size_t i = 0; i < shapes_->inputs.size(); i++) given[static_cast<int32_t>(shapes_->inputs[i])] = inputs[i];
        for (size_t i = 0; i < outputs_.size(); i++) {
            void const*& input = given[static_cast<int32_t>(outputs_[i].like)];
            if (!outputs_[i].aliased || outputs[i] == input) continue;
            // TensorRT copied an aliased tensor: the kernels work on the output, after the whole input is there.
            warn_of_copies();
            CudaDriver const& driver = CudaDriver::get();
            auto const from = reinterpret_cast<CUdeviceptr>(input), to = reinterpret_cast<CUdeviceptr>(outputs[i]);
            auto const nbytes = static_cast<size_t>(call_->nbytes_of(outputs_[i].like));
            driver.check(driver.cuMemcpyDtoDAsync(to, from, nbytes, stream), "cuMemcpyDtoDAsync");
            input = outputs[i];
        }
        auto const address = [&](Input input) { return given[static_cast<int32_t>(input)]; };
        AttentionAddresses const addresses{
            address(Input::kQ),
            address(Input::kK),
            address(Input::kV),
            const_cast<void*>(address(Input::kCache)),  // an aliased input: TensorRT lets the plugin write to it
            address(Input::kLengths),
            const_cast<void*>(address(Input::kKVScales)),
            address(Input::kCosSin),
            address(Input::kNewLengths),
            outputs[0],
            workspace};
        call_->run(addresses, stream);
        return kSuccess;
    });
}

IPluginV3* KVCacheAttention::attachToContext(IPluginResourceContext*) noexcept { return clone(); }

}  // namespace trt_kvcache
