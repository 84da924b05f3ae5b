// `program kernel blocks [together]`: runs a kernel of kernels.cu over floats 0, 1, 2 ..., behind 4 zeros for each
// block, and prints them.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

int main(int count_of_words, char** words) {
    const auto* kernel =
        static_cast<const simt::Kernel*>(dlsym(RTLD_DEFAULT, ("simt_kernel_" + std::string(words[1])).c_str()));
    const unsigned blocks = std::atoi(words[2]), count = 64 * blocks;
    auto values = std::make_unique<float[]>(count + 4 * blocks);
    for (unsigned i = 0; i < count; i++) values[4 * blocks + i] = i;
    float* out = values.get() + 4 * blocks;
    void* arguments[] = {&out};
    const char* error = kernel->run({blocks, 1, 1}, {64, 1, 1}, 64 * sizeof(float), count_of_words > 3, arguments);
    if (error) {
        std::puts(error);
        return 1;
    }
    for (unsigned i = 0; i < count; i++) std::printf("%g ", out[i]);
}
