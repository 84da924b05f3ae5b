// Declarations of TensorRT's plugin interface for tests, in place of NVIDIA's headers, which are on no package index.
//
// Only what plugins/tensorrt uses, in the order and with the types of the binary interface: a plugin library that is
// compiled with these works in NVIDIA's binaries, which the tests show. Programs of users are compiled with NVIDIA's
// headers, never with these.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : int32_t {
    kFLOAT = 0,
    kHALF = 1,
    kINT8 = 2,
    kINT32 = 3,
    kBOOL = 4,
    kUINT8 = 5,
    kFP8 = 6,
    kBF16 = 7,
    kINT64 = 8,
};
enum class TensorFormat : int32_t { kLINEAR = 0 };
enum class PluginFieldType : int32_t {
    kFLOAT16 = 0,
    kFLOAT32 = 1,
    kFLOAT64 = 2,
    kINT32 = 5,
    kUNKNOWN = 8,
    kINT64 = 10
};
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class APILanguage : int32_t { kCPP = 0, kPYTHON = 1 };

struct Dims {
    int32_t nbDims;
    int64_t d[8];
};

struct InterfaceInfo {
    AsciiChar const* kind;
    int32_t major, minor;
};

class IVersionedInterface {
public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

// These two are as in TensorRT for RTX; in TensorRT 10 they begin with their own function.
class ILogger : public IVersionedInterface {
public:
    enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
    virtual void log(Severity severity, AsciiChar const* text) noexcept = 0;
};

class ILoggerFinder : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
    virtual ILogger* findLogger() noexcept = 0;
};

// --- fields ---

struct PluginField {
    AsciiChar const* name;
    void const* data;
    PluginFieldType type;
    int32_t length;

    PluginField(AsciiChar const* name = nullptr, void const* data = nullptr,
                PluginFieldType type = PluginFieldType::kUNKNOWN, int32_t length = 0) noexcept
        : name(name), data(data), type(type), length(length) {}
};

struct PluginFieldCollection {
    int32_t nbFields{};
    PluginField const* fields{};
};

// --- tensors ---

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min, max, opt;
};

// TensorRT's own objects lead to a private one, which does the work.
namespace apiv {
class VDimensionExpr {
public:
    virtual ~VDimensionExpr() noexcept = default;
    virtual bool isConstant() const = 0;
    virtual int64_t getConstantValue() const = 0;
};
}  // namespace apiv

class IDimensionExpr {
public:
    bool isConstant() const noexcept { return impl_->isConstant(); }
    int64_t getConstantValue() const noexcept { return impl_->getConstantValue(); }

protected:
    virtual ~IDimensionExpr() noexcept = default;
    apiv::VDimensionExpr* impl_;
};

class IExprBuilder;

struct DimsExprs {
    int32_t nbDims;
    IDimensionExpr const* d[8];
};

// --- plugins ---

class IPluginCapability : public IVersionedInterface {};
class IPluginResourceContext;

class IPluginV3 : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuildV2 : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                                    int32_t) noexcept = 0;
    virtual int32_t getOutputDataTypes(DataType*, int32_t, DataType const*, int32_t) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const*, int32_t, DimsExprs const*, int32_t, DimsExprs*, int32_t,
                                    IExprBuilder&) noexcept = 0;
    virtual bool supportsFormatCombination(int32_t, DynamicPluginTensorDesc const*, int32_t, int32_t) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                                    int32_t) const noexcept {
        return 0;
    }
    virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
    virtual int32_t getNbTactics() noexcept { return 0; }
    virtual char const* getTimingCacheID() noexcept { return nullptr; }
    virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
    virtual char const* getMetadataString() noexcept { return nullptr; }
    virtual int32_t getAliasedInput(int32_t) noexcept { return -1; }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*, void* const*, void*,
                            cudaStream_t) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext*) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const*, TensorRTPhase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

// As in TensorRT for RTX; the registry of TensorRT 10 has functions for older plugins before these.
class IPluginRegistry {
public:
    virtual ~IPluginRegistry() noexcept = default;
    virtual void setErrorRecorder(void*) noexcept = 0;
    virtual void* getErrorRecorder() const noexcept = 0;
    virtual bool isParentSearchEnabled() const = 0;
    virtual void setParentSearchEnabled(bool) = 0;
    virtual void* loadLibrary(AsciiChar const*) noexcept = 0;
    virtual void deregisterLibrary(void*) noexcept = 0;
    virtual bool registerCreator(IPluginCreatorInterface&, AsciiChar const*) noexcept = 0;
};

}  // namespace nvinfer1

extern "C" nvinfer1::IPluginRegistry* getPluginRegistry() noexcept;

#include "NvInferRuntime.h"
