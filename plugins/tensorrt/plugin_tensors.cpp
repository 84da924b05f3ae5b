#include "plugin_tensors.hpp"

#include <algorithm>
#include <string>

#include "text.hpp"

using nvinfer1::DataType;

namespace trt_kvcache {
namespace {

constexpr int32_t kValuesPerInt32 = 4;
constexpr int64_t kScalesGranule = 4;  // scales by token are stored for a multiple of so many tokens

// A size in the shape of an input: a free one, which is the same wherever it stands, or one that the attributes give.
struct Size {
    char const* name;  // of a free size
    int64_t AttentionSizes::* free = nullptr;
    int64_t fixed = kUnknown;

    Size(char const* name, int64_t AttentionSizes::* free) : name(name), free(free) {}
    Size(int64_t fixed) : name(nullptr), fixed(fixed) {}
};

char const* name_of(Input input) {
    switch (input) {
        case Input::kQ: return "q";
        case Input::kK: return "k";
        case Input::kV: return "v";
        case Input::kCache: return "cache";
        case Input::kLengths: return "lengths";
        case Input::kKVScales: return "kv_scales";
        case Input::kCosSin: return "cos_sin";
        case Input::kNewLengths: return "new_lengths";
    }
    return "";
}

std::vector<Size> shape_of(Input input, AttentionAttributes const& attributes) {
    Size const batch("B", &AttentionSizes::batch), width("s", &AttentionSizes::width),
        tokens("S", &AttentionSizes::tokens);
    int64_t const kv_heads = attributes.num_kv_heads, head_dim = attributes.head_dim;
    switch (input) {
        case Input::kQ: return {batch, width, attributes.num_heads, head_dim};
        case Input::kK:
        case Input::kV: return {batch, width, kv_heads, head_dim};
        case Input::kCache:  // quantized values are packed: four of a row are one int32
            return {batch, 2, kv_heads, tokens, attributes.quantized() ? head_dim / kValuesPerInt32 : head_dim};
        case Input::kKVScales:
            if (attributes.kv_scales == kPerHead) return {2, kv_heads};
            return {batch, 2, kv_heads, Size("S'", &AttentionSizes::scales)};
        case Input::kCosSin: return {Size("P", &AttentionSizes::positions), 2, attributes.rotary_dim / 2};
        case Input::kLengths:
        case Input::kNewLengths: return {batch};
    }
    return {};
}

// The dtype of an input; kHALF stands for that of q.
DataType dtype_of(Input input, AttentionAttributes const& attributes) {
    switch (input) {
        case Input::kCache: return attributes.quantized() ? DataType::kINT32 : DataType::kHALF;
        case Input::kLengths:
        case Input::kNewLengths: return DataType::kINT32;
        case Input::kKVScales:
        case Input::kCosSin: return DataType::kFLOAT;
        default: return DataType::kHALF;
    }
}

std::string name_of(DataType dtype) {
    switch (dtype) {
        case DataType::kFLOAT: return "float32";
        case DataType::kHALF: return "float16";
        case DataType::kBF16: return "bfloat16";
        case DataType::kINT32: return "int32";
        case DataType::kINT64: return "int64";
        case DataType::kINT8: return "int8";
        case DataType::kFP8: return "float8_e4m3fn";
        default: return text_of("DataType ", static_cast<int32_t>(dtype));
    }
}

template <typename Parts, typename Format>
std::string join(Parts const& parts, Format format) {
    std::string text;
    for (auto const& part : parts) text += (text.empty() ? "" : ", ") + format(part);
    return text;
}

void check_at_least(char const* what, int64_t least, char const* least_name, int64_t value) {
    if (least != kUnknown && value != kUnknown && least > value) {
        throw_invalid(what, ": expected ", least, " (", least_name, ") or more, got ", value, ".");
    }
}

}  // namespace

std::vector<Input> inputs_of(AttentionAttributes const& attributes, int32_t count) {
    std::vector<Input> inputs = {Input::kQ, Input::kK, Input::kV, Input::kCache, Input::kLengths};
    if (attributes.quantized()) inputs.push_back(Input::kKVScales);
    if (attributes.rotary_dim) inputs.push_back(Input::kCosSin);
    int32_t const needed = static_cast<int32_t>(inputs.size());
    if (count != needed && count != needed + 1) {
        throw_invalid("inputs: expected ", join(inputs, [](Input input) { return std::string(name_of(input)); }),
                      " and, if wanted, new_lengths, got ", count, ".");
    }
    if (count > needed) inputs.push_back(Input::kNewLengths);
    return inputs;
}

std::vector<Output> outputs_of(AttentionAttributes const& attributes) {
    std::vector<Output> outputs = {{Input::kQ, false}, {Input::kCache, true}};
    if (attributes.kv_scales == kPerToken) outputs.push_back({Input::kKVScales, true});
    return outputs;
}

AttentionSizes check_shapes(AttentionAttributes const& attributes, std::vector<Sizes> const& shapes) {
    AttentionSizes sizes;
    auto const inputs = inputs_of(attributes, static_cast<int32_t>(shapes.size()));
    for (size_t i = 0; i < shapes.size(); i++) {
        Sizes const& shape = shapes[i];
        auto const pattern = shape_of(inputs[i], attributes);
        auto const expected = [&](Size const& size) { return size.free ? sizes.*size.free : size.fixed; };
        bool fits = shape.size() == pattern.size();
        for (size_t axis = 0; fits && axis < shape.size(); axis++) {
            int64_t const size = expected(pattern[axis]);
            fits = size == kUnknown || shape[axis] == kUnknown || size == shape[axis];
        }
        if (!fits) {
            auto const number = [](int64_t size) { return std::to_string(size); };
            auto const wanted = [&](Size const& size) {
                return expected(size) == kUnknown ? size.name : number(expected(size));
            };
            throw_invalid(name_of(inputs[i]), ": expected [", join(pattern, wanted), "], got [", join(shape, number),
                          "].");
        }
        for (size_t axis = 0; axis < shape.size(); axis++) {
            if (pattern[axis].free && sizes.*pattern[axis].free == kUnknown) sizes.*pattern[axis].free = shape[axis];
        }
    }
    if (sizes.width == 0) throw_invalid("q: expected at least one new token, got s = 0.");
    check_at_least("tokens in a slot of the cache", sizes.width, "s", sizes.tokens);
    check_at_least("positions in cos_sin", sizes.tokens, "S", sizes.positions);
    if (sizes.tokens != kUnknown && sizes.scales != kUnknown) {
        int64_t const scales = (sizes.tokens + kScalesGranule - 1) / kScalesGranule * kScalesGranule;
        if (sizes.scales != scales) {
            throw_invalid("kv_scales: expected scales of ", scales, " tokens with a cache of ", sizes.tokens, ", got ",
                          sizes.scales, ".");
        }
    }
    return sizes;
}

bool is_dtype_of_q(DataType dtype) { return dtype == DataType::kHALF || dtype == DataType::kBF16; }

bool takes_dtype(Input input, AttentionAttributes const& attributes, DataType dtype, DataType q) {
    DataType const expected = dtype_of(input, attributes);
    return dtype == (expected == DataType::kHALF ? q : expected);
}

void check_dtypes(AttentionAttributes const& attributes, std::vector<DataType> const& dtypes) {
    auto const inputs = inputs_of(attributes, static_cast<int32_t>(dtypes.size()));
    for (size_t i = 0; i < dtypes.size(); i++) {
        if (i == 0 ? is_dtype_of_q(dtypes[0]) : takes_dtype(inputs[i], attributes, dtypes[i], dtypes[0])) continue;
        DataType const expected = dtype_of(inputs[i], attributes);
        throw_invalid(name_of(inputs[i]), ": expected ",
                      i == 0 ? "float16 or bfloat16" : name_of(expected == DataType::kHALF ? dtypes[0] : expected),
                      ", got ", name_of(dtypes[i]), ".");
    }
}

}  // namespace trt_kvcache
