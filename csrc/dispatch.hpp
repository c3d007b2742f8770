// Which instruction set's kernels run here.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace ibpo {

// Those that this machine can run, the fastest first.
inline std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("bmi2"))
        found.push_back(&kAvx512Kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) found.push_back(&kAvx2Kernels);
#endif
    found.push_back(&kPortableKernels);
    return found;
}

// `named` is one of them; empty: what IBPO_EDIT_DISTANCE_ISA names, else the fastest.
inline const Kernels& choose_kernels(const std::string& named) {
    std::string isa = named, source = "isa";
    if (isa.empty()) {
        const char* wanted = std::getenv("IBPO_EDIT_DISTANCE_ISA");
        if (wanted != nullptr) isa = wanted;
        source = "IBPO_EDIT_DISTANCE_ISA";
    }
    std::string names;
    for (const Kernels* kernels : supported_kernels()) {
        if (isa.empty() || isa == kernels->isa) return *kernels;
        names += std::string(names.empty() ? "" : ", ") + kernels->isa;
    }
    throw std::invalid_argument(source + "=" + isa + ": this machine runs " + names);
}

}  // namespace ibpo
