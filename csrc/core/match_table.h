#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/message.h"

namespace megatron_ext {

/// Name of a message at its receiver.
struct Arrival {
    int source;
    std::uint64_t tag;

    bool operator==(const Arrival& other) const {
        return source == other.source && tag == other.tag;
    }
};

/// Messages that arrived and were not taken yet. They are taken in any order; those of one source
/// and tag come out in the order in which they were sent. Not synchronised.
class MatchTable {
  public:
    void add(int source, Message message);

    std::optional<Message> take(int source, std::uint64_t tag);

    /// What was added since the last call and is still here, in order of arrival.
    std::vector<Arrival> take_news();

    bool has_news() const { return !news_.empty(); }

    /// Messages of one source that are here.
    std::size_t count(int source) const;

  private:
    struct Hash {
        std::size_t operator()(const Arrival& arrival) const noexcept {
            const auto source = static_cast<std::uint64_t>(arrival.source);
            return static_cast<std::size_t>((arrival.tag ^ source << 56) * 0x9E3779B97F4A7C15U);
        }
    };

    std::unordered_map<Arrival, std::deque<Message>, Hash> messages_;
    std::deque<Arrival> news_;
};

}  // namespace megatron_ext
