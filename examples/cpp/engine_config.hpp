// Reads tensors, aliases and profiles from the config.json of an engine folder.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// A value of JSON; config.json has integers, strings, lists and objects that matter here.
struct Json {
    std::map<std::string, Json> members;
    std::vector<Json> items;
    std::string text;  // of a string; of a number, true, false and null as they are written

    Json const& operator[](std::string const& name) const {
        auto const found = members.find(name);
        if (found == members.end()) throw std::runtime_error("config.json: expected \"" + name + "\", got none.");
        return found->second;
    }
    bool is_null() const { return text == "null"; }
    int64_t integer() const { return std::stoll(text); }
};

class JsonReader {
public:
    explicit JsonReader(std::string const& text) : text_(text) {}

    Json read() {
        Json value;
        char const first = next();
        if (first == '{' || first == '[') {
            char const end = first == '{' ? '}' : ']';
            place_++;
            while (next() != end) {
                if (text_[place_] == ',') place_++;
                if (first == '[') {
                    value.items.push_back(read());
                } else {
                    next();
                    std::string const name = string();
                    if (next() != ':') throw std::runtime_error("config.json: expected : after \"" + name + "\".");
                    place_++;
                    value.members[name] = read();
                }
            }
            place_++;
        } else if (first == '"') {
            value.text = string();
        } else {
            size_t const end = text_.find_first_of(",]} \n\r\t", place_);
            value.text = text_.substr(place_, end - place_);
            place_ = end;
        }
        return value;
    }

private:
    // The next character that is not a space.
    char next() {
        place_ = text_.find_first_not_of(" \n\r\t", place_);
        if (place_ == std::string::npos) throw std::runtime_error("config.json: expected more, it ends too early.");
        return text_[place_];
    }

    // Names of tensors have no escapes; any other string may keep them.
    std::string string() {
        std::string found;
        for (place_++; place_ < text_.size() && text_[place_] != '"'; place_++) {
            if (text_[place_] == '\\') found += text_[place_++];
            found += text_.at(place_);
        }
        place_++;
        return found;
    }

    std::string const& text_;
    size_t place_ = 0;
};

struct EngineConfig {
    struct Tensor {
        std::string name, alias;  // alias: the input whose memory an output shares; empty for none
        bool is_input;
        std::string state_before;  // of an output with the states after a step: the input with those before it
    };
    struct Profile {
        int64_t max_batch, min_width, max_width;  // slots, new tokens of a slot
    };

    std::string input_ids, kvcache_start_index, last_token_ids, new_lengths, logits;  // names of tensors
    std::vector<Tensor> tensors;
    std::set<std::string> v_outputs;  // further outputs, which nobody reads
    std::vector<Profile> profiles;
    int64_t max_sequence_length, vocab_size;
    bool in_one_piece;         // or in segments, between which Python runs operations
    bool carries_its_plugins;  // the engine contains a plugin library
    bool has_adapters;         // the engine has inputs for LoRA adapters
    bool has_rows;             // the engine has an input for rows in place of rows of the embedding
    bool takes_trees;          // the engine has an input for trees of draft tokens

    explicit EngineConfig(std::string const& folder) {
        std::ifstream file(folder + "/config.json");
        if (!file) throw std::runtime_error(folder + ": expected an engine folder, it has no config.json.");
        std::stringstream text;
        text << file.rdbuf();
        std::string const content = text.str();
        Json const json = JsonReader(content).read();
        Json const& names = json["names"];
        input_ids = names["input_ids"].text;
        kvcache_start_index = names["kvcache_start_index"].text;
        last_token_ids = names["last_token_ids"].text;
        new_lengths = names["new_lengths"].text;  // an input only of engines with states
        logits = names["logits"].text;
        for (Json const& one : json["tensors"].items) {
            std::string const alias = one["alias"].is_null() ? "" : one["alias"].text;
            std::string const& name = one["name"].text;
            bool const is_input = one["mode"].text == "input";
            bool const may_be_state = !is_input && alias.empty() && name != logits;
            tensors.push_back({name, alias, is_input, may_be_state ? state_before(names, name) : ""});
            if (one["name"].text == logits) vocab_size = one["shape"].items.back().integer();
        }
        if (json.members.count("v_outputs")) {  // not in folders of before
            for (Json const& one : json["v_outputs"].items) v_outputs.insert(one["name"].text);
        }
        for (Json const& one : json["profiles"].items) {
            profiles.push_back({one["max_batch"].integer(), one["min_width"].integer(), one["max_width"].integer()});
        }
        Json const& cache = json["kv_cache"];
        Json const& sizes = cache.members.count("mamba") ? cache["mamba"] : cache;  // with states, or without
        max_sequence_length = sizes["max_sequence_length"].integer();
        in_one_piece = json["segments"].is_null();
        carries_its_plugins = !json["plugin_library"].is_null();
        has_adapters = json.members.count("adapters") && !json["adapters"].is_null();  // not in folders of before
        has_rows = json.members.count("max_embeddings") && json["max_embeddings"].integer() > 0;  // nor this
        takes_trees = json.members.count("draft_tree") && !json["draft_tree"].is_null();
    }

private:
    // The name of the input for an output with states, such as "conv_state_3" for "present_conv_state_3".
    static std::string state_before(Json const& names, std::string const& name) {
        for (std::string const kind : {"recurrent_state", "conv_state"}) {
            std::string const after = names["present_" + kind].text;
            size_t const start = after.find("{i}"), tail = after.size() - start - 3;
            bool const fits = name.size() > start + tail && name.compare(0, start, after, 0, start) == 0
                              && name.compare(name.size() - tail, tail, after, start + 3, tail) == 0;
            std::string const index = fits ? name.substr(start, name.size() - start - tail) : "";
            if (index.empty() || index.find_first_not_of("0123456789") != std::string::npos) continue;
            std::string before = names[kind].text;
            return before.replace(before.find("{i}"), 3, index);
        }
        throw std::runtime_error("config.json: expected the alias, or the states, of `" + name + "`, got neither.");
    }
};
