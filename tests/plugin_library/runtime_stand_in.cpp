// TensorRT's runtime and CUDA for examples/cpp, on the host. The plan is a text: a line for each tensor, with its name,
// DataType and shape. An enqueue prints what it reads, adds 1 to the first number of each cache and state, and makes
// the token 5 the most likely one, then 6, ....
#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct Tensor {
    DataType type;
    Dims shape;
};

std::vector<std::string> names;  // in the order of the plan
std::map<std::string, Tensor> tensors;
int32_t const kProfiles = 2;
bool host_code = false;
int32_t steps = 0, contexts = 0;
std::map<void*, size_t> allocations;  // and their bytes

struct Context final : IExecutionContext {
    int32_t number = contexts++, profile = -1;
    std::map<std::string, void*> addresses;
    std::map<std::string, Dims> shapes;
};

struct Engine final : ICudaEngine {};
struct Runtime final : IRuntime {};

}  // namespace

namespace nvinfer1 {

IRuntime* createInferRuntime(ILogger&) noexcept { return new Runtime; }

// No test loads a library here.
IPluginRegistry& IRuntime::getPluginRegistry() noexcept { std::abort(); }

void IRuntime::setEngineHostCodeAllowed(bool allowed) noexcept { host_code = allowed; }

ICudaEngine* IRuntime::deserializeCudaEngine(void const* plan, size_t size) noexcept {
    std::istringstream lines(std::string(static_cast<char const*>(plan), size));
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string name;
        int type;
        words >> name >> type;
        Tensor tensor{static_cast<DataType>(type), {}};
        while (words >> tensor.shape.d[tensor.shape.nbDims]) tensor.shape.nbDims++;
        names.push_back(name);
        tensors[name] = tensor;
    }
    std::printf("host code %d\n", host_code);
    return new Engine;
}

Dims ICudaEngine::getTensorShape(char const* name) const noexcept { return tensors.at(name).shape; }
DataType ICudaEngine::getTensorDataType(char const* name) const noexcept { return tensors.at(name).type; }
int64_t ICudaEngine::getDeviceMemorySizeForProfileV2(int32_t) const noexcept { return 64; }
IExecutionContext* ICudaEngine::createExecutionContext(ExecutionContextAllocationStrategy) noexcept {
    return new Context;
}

void IExecutionContext::setDeviceMemoryV2(void*, int64_t) noexcept {}

bool IExecutionContext::setOptimizationProfileAsync(int32_t profile, cudaStream_t) noexcept {
    static_cast<Context*>(this)->profile = profile;
    return profile < kProfiles;
}

bool IExecutionContext::setInputShape(char const* name, Dims const& shape) noexcept {
    static_cast<Context*>(this)->shapes[name] = shape;
    return true;
}

bool IExecutionContext::setTensorAddress(char const* name, void* address) noexcept {
    static_cast<Context*>(this)->addresses[name] = address;
    return tensors.count(name);
}

// Whether a tensor is V of a layer: "v_0", not "v_cache_0".
static bool is_v_output(std::string const& name) {
    return name.compare(0, 2, "v_") == 0 && name.find_first_not_of("0123456789", 2) == std::string::npos;
}

bool IExecutionContext::enqueueV3(cudaStream_t) noexcept {
    auto& context = *static_cast<Context*>(this);
    std::string const after = "present_";
    auto const first = [&](std::string const& name) { return static_cast<int32_t*>(context.addresses.at(name)); };
    std::printf("profile %d:", context.profile);
    std::set<void*> v_buffers;
    for (std::string const& name : names) {
        Dims const& shape = context.shapes[name];
        if (is_v_output(name)) {  // all of it is written, for as many tokens as the step has
            Dims const& size = tensors[name].shape;
            auto const tokens = static_cast<size_t>(context.shapes["input_ids"].d[1]);
            size_t const nbytes = tokens * static_cast<size_t>(size.d[2] * size.d[3]) * sizeof(int16_t);
            void* const buffer = context.addresses.at(name);
            if (allocations.at(buffer) < nbytes) std::abort();
            std::memset(buffer, 0x55, nbytes);
            v_buffers.insert(buffer);
        } else if (name == "input_ids") {
            for (int64_t i = 0; i < shape.d[1]; i++) std::printf(" %d", first(name)[i]);
        } else if (name.compare(0, after.size(), after) == 0) {
            std::string const rest = name.substr(after.size());
            std::string const before = (rest.compare(0, 3, "key") == 0 ? "past_" : "") + rest;
            int32_t const value = *first(before);
            std::printf(" %s=%d%s", before.c_str(), value, first(name) == first(before) ? " in place" : "");
            *first(name) = value + 1;
        } else if (tensors[name].shape.nbDims <= 2 && name != "logits" && name.find("_state_") == std::string::npos) {
            std::printf(" %s=%d", name.c_str(), *first(name));
        }
    }
    if (!v_buffers.empty()) std::printf(" v_outputs in %zu", v_buffers.size());
    std::printf("\n");
    auto* const logits = static_cast<float*>(context.addresses.at("logits"));
    std::memset(logits, 0, static_cast<size_t>(tensors["logits"].shape.d[1]) * sizeof(float));
    logits[5 + steps++] = 1;
    return true;
}

}  // namespace nvinfer1

extern "C" {
char const* cudaGetErrorString(cudaError_t) { return "error"; }

cudaError_t cudaMalloc(void** address, size_t nbytes) {
    *address = std::malloc(nbytes);
    allocations[*address] = nbytes;
    std::memset(*address, 0x7f, nbytes);  // what is not zeroed is seen
    return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
    std::free(address);
    return cudaSuccess;
}

cudaError_t cudaMemset(void* address, int value, size_t nbytes) {
    std::memset(address, value, nbytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t nbytes, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, nbytes);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t*) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
}
