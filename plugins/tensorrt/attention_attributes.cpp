#include "attention_attributes.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>
#include <string>

#include "text.hpp"

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

namespace trt_kvcache {
namespace {

constexpr int32_t kMaxGroup = 16, kRotaryDimStep = 4, kHeadDims[] = {64, 80, 96, 128, 256, 512};
constexpr double kMinScoreFactor = 1e-6, kMaxScoreFactor = 1e6;

// A field is an integer or a real number of the attributes.
struct Field {
    char const* name;
    int32_t AttentionAttributes::* integer;
    double AttentionAttributes::* real;
    bool required;

    PluginFieldType type() const { return integer ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT64; }
};

// In the order in which they are stored. The last two are those of version 2 only.
constexpr Field kFields[] = {
    {"num_heads", &AttentionAttributes::num_heads, nullptr, true},
    {"num_kv_heads", &AttentionAttributes::num_kv_heads, nullptr, true},
    {"head_dim", &AttentionAttributes::head_dim, nullptr, true},
    {"scale", nullptr, &AttentionAttributes::scale, false},
    {"window", &AttentionAttributes::window, nullptr, false},
    {"softcap", nullptr, &AttentionAttributes::softcap, false},
    {"rotary_dim", &AttentionAttributes::rotary_dim, nullptr, false},
    {"kv_dtype", &AttentionAttributes::kv_dtype, nullptr, true},
    {"kv_scales", &AttentionAttributes::kv_scales, nullptr, true},
};
constexpr size_t kNumFields = std::size(kFields), kNumUnquantized = kNumFields - 2;

Field const* find_field(std::string const& name, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (name == kFields[i].name) return &kFields[i];
    }
    return nullptr;
}

void read_integer(PluginField const& given, int32_t& value) {
    int64_t const number = given.type == PluginFieldType::kINT32   ? *static_cast<int32_t const*>(given.data)
                           : given.type == PluginFieldType::kINT64 ? *static_cast<int64_t const*>(given.data)
                                                                   : -1;
    if (number < 0 || number > std::numeric_limits<int32_t>::max()) {
        throw_invalid(given.name, ": expected an integer from 0 to ", std::numeric_limits<int32_t>::max(), ", got ",
                      number, ".");
    }
    value = static_cast<int32_t>(number);
}

void read_real(PluginField const& given, double& value) {
    value = given.type == PluginFieldType::kFLOAT32 ? *static_cast<float const*>(given.data)
                                                    : *static_cast<double const*>(given.data);
    // The lower limit as a float32: the limit itself rounds to less than its double.
    if (value != 0 && !(value >= static_cast<float>(kMinScoreFactor) && value <= kMaxScoreFactor)) {
        throw_invalid(given.name, ": expected 0, or ", kMinScoreFactor, " to ", kMaxScoreFactor, ", got ", value, ".");
    }
}

// A field that stands for one of two values.
void check_code(char const* name, int32_t value, char const* first, char const* second) {
    if (value != 1 && value != 2) {
        throw_invalid("field '", name, "': expected 1 (", first, ") or 2 (", second, "), got ", value, ".");
    }
}

void check(AttentionAttributes const& attributes) {
    int32_t const heads = attributes.num_heads, kv_heads = attributes.num_kv_heads, head_dim = attributes.head_dim;
    if (kv_heads == 0 || heads % kv_heads != 0 || heads < kv_heads || heads / kv_heads > kMaxGroup) {
        throw_invalid("num_heads: expected 1 to ", kMaxGroup, " times num_kv_heads, got ", heads, " over ", kv_heads,
                      " K/V heads.");
    }
    if (std::find(std::begin(kHeadDims), std::end(kHeadDims), head_dim) == std::end(kHeadDims)) {
        throw_invalid("head_dim: expected one of 64, 80, 96, 128, 256, 512, got ", head_dim, ".");
    }
    if (attributes.rotary_dim % kRotaryDimStep != 0 || attributes.rotary_dim > head_dim) {
        throw_invalid("rotary_dim: expected a multiple of ", kRotaryDimStep, " from 0 to ", head_dim, ", got ",
                      attributes.rotary_dim, ".");
    }
}

}  // namespace

AttentionAttributes AttentionAttributes::from_fields(PluginFieldCollection const& fields, bool quantized) {
    AttentionAttributes attributes;
    size_t const count = quantized ? kNumFields : kNumUnquantized;
    std::set<std::string> names;
    for (int32_t i = 0; i < fields.nbFields; i++) {
        PluginField const& given = fields.fields[i];
        Field const* const field = find_field(given.name, count);
        if (!field) throw_invalid("field '", given.name, "' is unknown.");
        if (!names.insert(given.name).second) throw_invalid("field '", given.name, "' is given twice.");
        bool const accepted = field->integer
                                  ? given.type == PluginFieldType::kINT32 || given.type == PluginFieldType::kINT64
                                  : given.type == PluginFieldType::kFLOAT32 || given.type == PluginFieldType::kFLOAT64;
        if (!accepted || given.length != 1 || !given.data) {
            throw_invalid("field '", given.name, "': expected one value of type ",
                          field->integer ? "INT32 or INT64" : "FLOAT32 or FLOAT64", ", got ", given.length, " of type ",
                          static_cast<int32_t>(given.type), " (PluginFieldType).");
        }
        if (field->integer) {
            read_integer(given, attributes.*field->integer);
        } else {
            read_real(given, attributes.*field->real);
        }
    }
    for (size_t i = 0; i < count; i++) {
        if (kFields[i].required && !names.count(kFields[i].name))
            throw_invalid("fields: expected ", kFields[i].name, " too.");
    }
    if (quantized) {
        check_code("kv_dtype", attributes.kv_dtype, "float8_e4m3fn", "int8");
        check_code("kv_scales", attributes.kv_scales, "head", "token");
    }
    check(attributes);
    return attributes;
}

double AttentionAttributes::score_scale() const {
    return scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(head_dim));
}

std::vector<PluginField> AttentionAttributes::fields() const {
    std::vector<PluginField> fields = field_names(quantized());
    for (size_t i = 0; i < fields.size(); i++) {
        Field const& field = kFields[i];
        fields[i].data = field.integer ? static_cast<void const*>(&(this->*field.integer)) : &(this->*field.real);
        fields[i].length = 1;
    }
    return fields;
}

std::vector<PluginField> field_names(bool quantized) {
    std::vector<PluginField> fields;
    for (size_t i = 0; i < (quantized ? kNumFields : kNumUnquantized); i++) {
        fields.emplace_back(kFields[i].name, nullptr, kFields[i].type(), 0);
    }
    return fields;
}

}  // namespace trt_kvcache
