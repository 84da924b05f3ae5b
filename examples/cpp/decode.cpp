// Greedy decoding of one sequence in C++: opens an engine folder, binds the cache, and prints token ids.
//
//     decode ENGINE_FOLDER COUNT TOKEN_ID... [--plugins=libtrt_kvcache_plugins.so]
//
// It has run only with a stand-in for TensorRT and CUDA, not with TensorRT itself. The engine must be one plan, and K and V
// in 8 bits must have per-token scales. This program has no tokenizer.
#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine_config.hpp"

namespace {

class Logger final : public nvinfer1::ILogger {
    void log(Severity severity, char const* text) noexcept override {
        if (severity <= Severity::kWARNING) std::fprintf(stderr, "TensorRT: %s\n", text);
    }
};

void check(bool done, std::string const& what) {
    if (!done) throw std::runtime_error(what + " failed.");
}

void check(cudaError_t result, char const* what) {
    if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result) + ".");
}

struct DeviceMemory {
    void* address = nullptr;

    explicit DeviceMemory(size_t nbytes) {
        check(cudaMalloc(&address, std::max<size_t>(nbytes, 256)), "cudaMalloc");
        check(cudaMemset(address, 0, nbytes), "cudaMemset");  // so that no row of the cache is ever NaN
    }
    ~DeviceMemory() { cudaFree(address); }
    DeviceMemory(DeviceMemory const&) = delete;
    DeviceMemory& operator=(DeviceMemory const&) = delete;
};

std::vector<char> read_file(std::string const& path) {
    std::ifstream file(path, std::ios::binary);
    check(file.good(), "reading " + path);
    return {std::istreambuf_iterator<char>(file), {}};
}

size_t nbytes_of(nvinfer1::DataType type) {
    switch (type) {
        case nvinfer1::DataType::kHALF:
        case nvinfer1::DataType::kBF16: return 2;
        default: return 4;
    }
}

class Decoder {
public:
    Decoder(std::string const& folder, std::string const& plugins)
        : config_(folder), runtime_(nvinfer1::createInferRuntime(logger_)) {
        check(config_.in_one_piece, "an engine in segments needs Python: opening " + folder);
        check(!config_.has_adapters, "an engine with inputs for adapters needs Python: opening " + folder);
        check(!config_.has_rows, "an engine with an input for rows needs Python: opening " + folder);
        check(!config_.takes_trees, "an engine for trees of draft tokens needs Python: opening " + folder);
        if (!plugins.empty())
            check(runtime_->getPluginRegistry().loadLibrary(plugins.c_str()) != nullptr, "loading " + plugins);
        runtime_->setEngineHostCodeAllowed(config_.carries_its_plugins);
        std::vector<char> const plan = read_file(folder + "/engine.plan");
        engine_.reset(runtime_->deserializeCudaEngine(plan.data(), plan.size()));
        check(engine_ != nullptr, "deserialising " + folder + "/engine.plan");
        check(cudaStreamCreate(&stream_), "cudaStreamCreate");

        // One context for each profile. They never run at once, so they share the memory of activations.
        int64_t scratch = 0;
        for (size_t i = 0; i < config_.profiles.size(); i++) {
            scratch = std::max(scratch, engine_->getDeviceMemorySizeForProfileV2(static_cast<int32_t>(i)));
        }
        void* const activations = allocate("activations", static_cast<size_t>(scratch));
        for (size_t i = 0; i < config_.profiles.size(); i++) {
            contexts_.emplace_back(
                engine_->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
            check(contexts_[i] != nullptr, "creating an execution context");
            contexts_[i]->setDeviceMemoryV2(activations, scratch);
            check(contexts_[i]->setOptimizationProfileAsync(static_cast<int32_t>(i), stream_), "choosing a profile");
        }
        bind();
        check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    }

    // Appends tokens to the sequence and returns the most likely next one.
    int32_t step(std::vector<int32_t> const& tokens) {
        auto const width = static_cast<int64_t>(tokens.size());
        check(length_ + width <= config_.max_sequence_length, "appending to a sequence that is full");
        size_t const profile = profile_for(width);
        int32_t const last = static_cast<int32_t>(width) - 1, start = static_cast<int32_t>(length_);
        upload(config_.input_ids, tokens.data(), tokens.size());
        upload(config_.kvcache_start_index, &start, 1);
        upload(config_.last_token_ids, &last, 1);
        int32_t const new_length = static_cast<int32_t>(width);
        if (!states_.empty()) upload(config_.new_lengths, &new_length, 1);
        for (State const& state : states_) {
            set_address(profile, state.before, state.buffers[parity_]);
            set_address(profile, state.after, state.buffers[1 - parity_]);
        }
        for (EngineConfig::Tensor const& tensor : config_.tensors) {
            if (tensor.is_input)
                check(contexts_[profile]->setInputShape(tensor.name.c_str(), shape_of(tensor.name, width)),
                      tensor.name);
        }
        check(contexts_[profile]->enqueueV3(stream_), "enqueueV3");
        std::vector<float> logits(static_cast<size_t>(config_.vocab_size));
        check(cudaMemcpyAsync(logits.data(), addresses_.at(config_.logits), logits.size() * sizeof(float),
                              cudaMemcpyDeviceToHost, stream_),
              "cudaMemcpyAsync");
        check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
        // The engine has appended K and V, and written the next states. The caller keeps the length and the current states.
        length_ += width;
        parity_ = 1 - parity_;
        return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    }

private:
    // Recurrent and convolution states of a layer. A step reads one buffer and writes the other, so one that fails can be
    // repeated.
    struct State {
        std::string before, after;
        void* buffers[2];
    };

    // The profile of the fewest tokens: decode steps have one of their own.
    size_t profile_for(int64_t width) const {
        size_t best = config_.profiles.size();
        for (size_t i = 0; i < config_.profiles.size(); i++) {
            EngineConfig::Profile const& one = config_.profiles[i];
            bool const fits = one.min_width <= width && width <= one.max_width;
            if (fits && (best == config_.profiles.size() || one.max_width < config_.profiles[best].max_width)) best = i;
        }
        check(best < config_.profiles.size(), "finding a profile for this many new tokens");
        return best;
    }

    // The shape of a tensor with one slot and `width` new tokens: free sizes are slots, then tokens.
    nvinfer1::Dims shape_of(std::string const& name, int64_t width) const {
        nvinfer1::Dims shape = engine_->getTensorShape(name.c_str());
        bool const is_by_token = name == config_.input_ids || config_.v_outputs.count(name);
        int64_t const sizes[] = {1, is_by_token ? width : 1};
        for (int32_t axis = 0, free = 0; axis < shape.nbDims; axis++) {
            if (shape.d[axis] < 0) shape.d[axis] = sizes[free++];
        }
        return shape;
    }

    // Bytes of a tensor with one slot and `width` new tokens.
    size_t nbytes_in_step(std::string const& name, int64_t width) const {
        nvinfer1::Dims const shape = shape_of(name, width);
        size_t nbytes = nbytes_of(engine_->getTensorDataType(name.c_str()));
        for (int32_t axis = 0; axis < shape.nbDims; axis++) nbytes *= static_cast<size_t>(shape.d[axis]);
        return nbytes;
    }

    // Gives each tensor memory, and binds it in every context. Outputs of the cache are at the address of their input:
    // the engine updates it in place. States are bound in each step.
    void bind() {
        int64_t longest = 1;
        // Inputs that a step is given, or has written before.
        std::set<std::string> updated = {config_.input_ids, config_.kvcache_start_index, config_.last_token_ids,
                                         config_.new_lengths};
        for (EngineConfig::Profile const& profile : config_.profiles) longest = std::max(longest, profile.max_width);
        for (EngineConfig::Tensor const& tensor : config_.tensors) {
            void*& address = addresses_[tensor.name];
            if (!tensor.alias.empty()) {
                address = addresses_.at(tensor.alias);  // config.json lists inputs first
                updated.insert(tensor.alias);
            } else {
                address = allocate(tensor.name, nbytes_in_step(tensor.name, longest));
            }
            if (!tensor.state_before.empty()) {
                states_.push_back({tensor.state_before, tensor.name, {addresses_.at(tensor.state_before), address}});
                updated.insert(tensor.state_before);
            }
            for (size_t i = 0; i < contexts_.size(); i++) set_address(i, tensor.name, address);
        }
        bind_v_outputs(longest);
        for (EngineConfig::Tensor const& tensor : config_.tensors)
            check(!tensor.is_input || updated.count(tensor.name), "finding values for the input " + tensor.name);
    }

    // V of each plugin layer has memory of its own: TensorRT may write an output that nobody reads late.
    void bind_v_outputs(int64_t longest) {
        for (std::string const& name : config_.v_outputs) {
            void* const v = allocate(name, nbytes_in_step(name, longest));
            for (size_t i = 0; i < contexts_.size(); i++) set_address(i, name, v);
        }
    }

    void set_address(size_t context, std::string const& name, void* address) {
        check(contexts_[context]->setTensorAddress(name.c_str(), address), "binding " + name);
    }

    void* allocate(std::string const& name, size_t nbytes) {
        return memory_.emplace(name, std::make_unique<DeviceMemory>(nbytes)).first->second->address;
    }

    void upload(std::string const& name, int32_t const* values, size_t count) {
        check(cudaMemcpyAsync(addresses_.at(name), values, count * sizeof(int32_t), cudaMemcpyHostToDevice, stream_),
              "cudaMemcpyAsync");
    }

    Logger logger_;
    EngineConfig config_;
    std::map<std::string, std::unique_ptr<DeviceMemory>> memory_;
    std::unique_ptr<nvinfer1::IRuntime> runtime_;
    std::unique_ptr<nvinfer1::ICudaEngine> engine_;
    std::vector<std::unique_ptr<nvinfer1::IExecutionContext>> contexts_;
    std::map<std::string, void*> addresses_;
    std::vector<State> states_;
    int parity_ = 0;  // the buffer with the states of the tokens so far
    cudaStream_t stream_ = nullptr;
    int64_t length_ = 0;
};

}  // namespace

int main(int count, char** arguments) try {
    std::vector<std::string> words(arguments + 1, arguments + count);
    std::string const option = "--plugins=";
    std::string plugins;
    if (!words.empty() && words.back().compare(0, option.size(), option) == 0) {
        plugins = words.back().substr(option.size());
        words.pop_back();
    }
    if (words.size() < 3) {
        std::fprintf(stderr, "usage: decode ENGINE_FOLDER COUNT TOKEN_ID... [--plugins=LIBRARY]\n");
        return 2;
    }
    Decoder decoder(words[0], plugins);
    std::vector<int32_t> tokens;
    for (size_t i = 2; i < words.size(); i++) tokens.push_back(std::stoi(words[i]));
    for (int left = std::stoi(words[1]); left > 0; left--) {
        tokens = {decoder.step(tokens)};
        std::printf("%d\n", tokens[0]);
    }
    return 0;
} catch (std::exception const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
