// Prints what examples/cpp reads in the config.json of an engine folder.
#include <cstdio>

#include "../../examples/cpp/engine_config.hpp"

int main(int, char** arguments) try {
    EngineConfig const config(arguments[1]);
    std::printf("%s %s %s %s\n", config.input_ids.c_str(), config.kvcache_start_index.c_str(),
                config.last_token_ids.c_str(), config.logits.c_str());
    std::printf("%lld %lld %d %d\n", static_cast<long long>(config.max_sequence_length),
                static_cast<long long>(config.vocab_size), config.in_one_piece, config.carries_its_plugins);
    for (EngineConfig::Profile const& one : config.profiles) {
        std::printf("%lld %lld %lld\n", static_cast<long long>(one.max_batch), static_cast<long long>(one.min_width),
                    static_cast<long long>(one.max_width));
    }
    for (EngineConfig::Tensor const& one : config.tensors)
        std::printf("%s %d %s/%s\n", one.name.c_str(), one.is_input, one.alias.c_str(), one.state_before.c_str());
    for (std::string const& name : config.v_outputs) std::printf("%s\n", name.c_str());
    return 0;
} catch (std::exception const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
