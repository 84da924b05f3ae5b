// The calls of TensorRT's runtime that examples/cpp makes: names and types only. runtime_stand_in.cpp defines them.
#pragma once

namespace nvinfer1 {

enum class ExecutionContextAllocationStrategy : int32_t { kSTATIC = 0, kON_PROFILE_CHANGE = 1, kUSER_MANAGED = 2 };

class IExecutionContext {
public:
    virtual ~IExecutionContext() noexcept = default;
    void setDeviceMemoryV2(void* memory, int64_t size) noexcept;
    bool setOptimizationProfileAsync(int32_t profile, cudaStream_t stream) noexcept;
    bool setInputShape(char const* name, Dims const& shape) noexcept;
    bool setTensorAddress(char const* name, void* address) noexcept;
    bool enqueueV3(cudaStream_t stream) noexcept;
};

class ICudaEngine {
public:
    virtual ~ICudaEngine() noexcept = default;
    Dims getTensorShape(char const* name) const noexcept;
    DataType getTensorDataType(char const* name) const noexcept;
    int64_t getDeviceMemorySizeForProfileV2(int32_t profile) const noexcept;
    IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy strategy) noexcept;
};

class IRuntime {
public:
    virtual ~IRuntime() noexcept = default;
    IPluginRegistry& getPluginRegistry() noexcept;
    void setEngineHostCodeAllowed(bool allowed) noexcept;
    ICudaEngine* deserializeCudaEngine(void const* plan, size_t size) noexcept;
};

IRuntime* createInferRuntime(ILogger& logger) noexcept;

}  // namespace nvinfer1
