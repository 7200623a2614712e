#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace megatron_ext {

constexpr std::size_t kNumProjections = 4;

/// Constants that belong to the rows, or to the columns, of a matrix of `count` rows or columns.
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

/// The fingerprint that megatron_ext/tracing/fingerprint.py defines, of a matrix of floats that is
/// stored row by row. Reads it once. The bits equal those of the definition; the norm and the
/// projections may differ from it by rounding.
Fingerprint fingerprint(const float* values, const FingerprintConstants& rows,
                        const FingerprintConstants& columns);

}  // namespace megatron_ext
