#include "core/fingerprint.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"

using namespace megatron_ext;

namespace {

struct Table {
    Table(std::size_t count, std::int64_t first)
        : factors(count), weights(kNumProjections * count) {
        for (std::size_t i = 0; i < count; ++i) {
            factors[i] = 1 + 2 * (first + static_cast<std::int64_t>(i) * 0x9E3779B97);
        }
        for (std::size_t i = 0; i < weights.size(); ++i) {
            weights[i] = static_cast<float>(i % 7) - 2.5F;
        }
    }

    FingerprintConstants constants() const {
        return {factors.size(), factors.data(), weights.data()};
    }

    std::vector<std::int64_t> factors;
    std::vector<float> weights;
};

/// The definition, element by element.
Fingerprint expected(const std::vector<float>& values, const Table& rows, const Table& columns) {
    Fingerprint result;
    const std::size_t num_columns = columns.factors.size();
    const std::size_t num_rows = rows.factors.size();
    std::uint64_t bits = 0;
    for (std::size_t column = 0; column < num_columns; ++column) {
        std::uint32_t sum = 0;
        for (std::size_t row = 0; row < num_rows; ++row) {
            const float value = values[row * num_columns + column];
            std::uint32_t word = 0;
            std::memcpy(&word, &value, sizeof(word));
            word = word * static_cast<std::uint32_t>(columns.factors[column]) +
                   static_cast<std::uint32_t>(rows.factors[row]);
            sum += word ^ static_cast<std::uint32_t>(static_cast<std::int32_t>(word) >> 16);
            result.norm += static_cast<double>(value) * static_cast<double>(value);
            for (std::size_t k = 0; k < kNumProjections; ++k) {
                const auto row_weight = static_cast<double>(rows.weights[k * num_rows + row]);
                const float column_weight = columns.weights[k * num_columns + column];
                result.projections[k] +=
                    static_cast<double>(value) * row_weight * static_cast<double>(column_weight);
            }
        }
        const auto signed_sum = static_cast<std::int64_t>(static_cast<std::int32_t>(sum));
        bits += static_cast<std::uint64_t>(signed_sum) *
                static_cast<std::uint64_t>(columns.factors[column]);
    }
    result.bits = static_cast<std::int64_t>(bits);
    result.norm = std::sqrt(result.norm);
    return result;
}

void check_shape(std::size_t num_rows, std::size_t num_columns) {
    const Table rows(num_rows, 5);
    const Table columns(num_columns, 11);
    std::vector<float> values(num_rows * num_columns);
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = std::sin(static_cast<float>(i));
    }
    const Fingerprint result = fingerprint(values.data(), rows.constants(), columns.constants());
    const Fingerprint definition = expected(values, rows, columns);
    CHECK_EQ(result.bits, definition.bits);
    CHECK(std::abs(result.norm - definition.norm) <= 1e-5 * definition.norm);
    for (std::size_t k = 0; k < kNumProjections; ++k) {
        const double error = result.projections[k] - definition.projections[k];
        CHECK(std::abs(error) <= 1e-4 * definition.norm);
    }
}

}  // namespace

TEST(a_matrix_has_the_fingerprint_of_the_definition) {
    check_shape(1, 8);
    check_shape(3, 16);
    check_shape(1, 1024);
    check_shape(5, 1032);  // the last strip has one vector
    check_shape(2, 16384);
    check_shape(2, 24);
    check_shape(0, 16);
}
