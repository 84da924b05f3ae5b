// `program kernel blocks`: runs a kernel of kernels.cu over floats 0, 1, 2 ... and prints them afterwards.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

int main(int, char** words) {
    const auto* kernel = static_cast<const simt::Kernel*>(dlsym(RTLD_DEFAULT, ("simt_kernel_" + std::string(words[1])).c_str()));
    const unsigned blocks = std::atoi(words[2]), count = 64 * blocks;
    auto values = std::make_unique<float[]>(count);
    for (unsigned i = 0; i < count; i++) values[i] = i;
    float* out = values.get();
    void* arguments[] = {&out};
    const char* error = kernel->run({blocks, 1, 1}, {64, 1, 1}, 64 * sizeof(float), arguments);
    if (error) {
        std::puts(error);
        return 1;
    }
    for (unsigned i = 0; i < count; i++) std::printf("%g ", values[i]);
}
