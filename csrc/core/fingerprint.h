#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace megatron_ext {

constexpr std::size_t kNumProjections = 4;

/// Constants for the rows or the columns of a matrix, of which there are `count`.
struct FingerprintConstants {
    std::size_t count;
    const std::int64_t* factors;  ///< [count]
    const float* weights;         ///< [kNumProjections][count]
};

struct Fingerprint {
    std::int64_t bits = 0;
    double norm = 0;
    std::array<double, kNumProjections> projections{};
};

/// The number of columns must be a multiple of this number.
constexpr std::size_t kFingerprintLanes = 8;

/// The fingerprint, as defined in megatron_ext/tracing/fingerprint.py, of a row-major matrix of
/// floats. Reads the matrix once. The bits match the definition exactly; the norm and the
/// projections may differ from it by rounding.
Fingerprint fingerprint(const float* values, const FingerprintConstants& rows,
                        const FingerprintConstants& columns);

}  // namespace megatron_ext
