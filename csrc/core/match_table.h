#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
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
    bool operator<(const Arrival& other) const {
        return source != other.source ? source < other.source : tag < other.tag;
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
    struct Entry {
        Message message;
        std::uint64_t number;  ///< counts all that was added
    };

    /// Those of one name stand in the order of their arrival.
    std::multimap<Arrival, Entry> messages_;
    std::map<std::uint64_t, Arrival> news_;  ///< by number: taken from in any order, too
    std::uint64_t num_added_ = 0;
};

}  // namespace megatron_ext
