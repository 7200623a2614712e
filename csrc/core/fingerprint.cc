#include "core/fingerprint.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace megatron_ext {
namespace {

// The compiler's vector types. A processor with shorter vectors uses several instructions for each.
constexpr std::size_t kVectorBytes = kFingerprintLanes * sizeof(float);
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t Words __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t UnsignedWords __attribute__((vector_size(kVectorBytes)));

// Columns that are read together, row by row. Their constants and sums (24 KiB) fit into the L1
// cache next to a row of values.
constexpr std::size_t kStripColumns = 1024;

// A macro, because the ABI of a function that takes or returns a vector depends on the processor.
#define LOAD(vector, address) std::memcpy(&(vector), (address), sizeof(vector))

/// Adds one strip of columns to `result`.
__attribute__((always_inline)) inline void add_strip(const float* values,
                                                     const FingerprintConstants& rows,
                                                     const FingerprintConstants& columns,
                                                     std::size_t first, std::size_t num_columns,
                                                     double& squares, Fingerprint& result) {
    std::uint32_t factors[kStripColumns];
    std::uint32_t sums[kStripColumns];
    for (std::size_t i = 0; i < num_columns; ++i) {
        factors[i] = static_cast<std::uint32_t>(columns.factors[first + i]);
        sums[i] = 0;
    }
    const float* const weights = columns.weights + first;
    for (std::size_t row = 0; row < rows.count; ++row) {
        const float* const row_values = values + row * columns.count + first;
        const auto row_term = static_cast<std::uint32_t>(rows.factors[row]);
        Floats row_squares{};
        Floats row_sums[kNumProjections]{};
        for (std::size_t i = 0; i < num_columns; i += kFingerprintLanes) {
            // The next row of the strip is a few pages away, where hardware does not prefetch.
            __builtin_prefetch(row_values + i + columns.count);
            Floats vector;
            LOAD(vector, row_values + i);
            row_squares += vector * vector;
            for (std::size_t k = 0; k < kNumProjections; ++k) {
                Floats column_weights;
                LOAD(column_weights, weights + k * columns.count + i);
                row_sums[k] += vector * column_weights;
            }
            UnsignedWords words;
            UnsignedWords column_factors;
            UnsignedWords column_sums;
            LOAD(words, row_values + i);
            LOAD(column_factors, factors + i);
            LOAD(column_sums, sums + i);
            words = words * column_factors + row_term;
            words ^= (UnsignedWords)((Words)words >> 16);
            column_sums += words;
            std::memcpy(sums + i, &column_sums, sizeof(column_sums));
        }
        for (std::size_t lane = 0; lane < kFingerprintLanes; ++lane) {
            squares += static_cast<double>(row_squares[lane]);
        }
        for (std::size_t k = 0; k < kNumProjections; ++k) {
            double sum = 0;
            for (std::size_t lane = 0; lane < kFingerprintLanes; ++lane) {
                sum += static_cast<double>(row_sums[k][lane]);
            }
            result.projections[k] += sum * static_cast<double>(rows.weights[k * rows.count + row]);
        }
    }
    auto bits = static_cast<std::uint64_t>(result.bits);
    for (std::size_t i = 0; i < num_columns; ++i) {
        // The sum is treated as a signed number, as in the definition.
        const auto sum = static_cast<std::int64_t>(static_cast<std::int32_t>(sums[i]));
        bits += static_cast<std::uint64_t>(sum) *
                static_cast<std::uint64_t>(columns.factors[first + i]);
    }
    result.bits = static_cast<std::int64_t>(bits);
}

__attribute__((always_inline)) inline Fingerprint add_all(const float* values,
                                                          const FingerprintConstants& rows,
                                                          const FingerprintConstants& columns) {
    Fingerprint result;
    double squares = 0;
    for (std::size_t first = 0; first < columns.count; first += kStripColumns) {
        const std::size_t num_columns = std::min(kStripColumns, columns.count - first);
        add_strip(values, rows, columns, first, num_columns, squares, result);
    }
    result.norm = std::sqrt(squares);
    return result;
}

Fingerprint on_any_processor(const float* values, const FingerprintConstants& rows,
                             const FingerprintConstants& columns) {
    return add_all(values, rows, columns);
}

#if defined(__x86_64__)
// Wheels must run on every x86-64 processor, and the baseline of x86-64 lacks a product of 32-bit
// vectors.
__attribute__((target("avx2"))) Fingerprint with_avx2(const float* values,
                                                      const FingerprintConstants& rows,
                                                      const FingerprintConstants& columns) {
    return add_all(values, rows, columns);
}
#endif

}  // namespace

Fingerprint fingerprint(const float* values, const FingerprintConstants& rows,
                        const FingerprintConstants& columns) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        return with_avx2(values, rows, columns);
    }
#endif
    return on_any_processor(values, rows, columns);
}

}  // namespace megatron_ext
