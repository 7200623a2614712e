#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/message.h"

namespace megatron_ext {

/// Identifies a message at its receiver.
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

/// The messages that have arrived and have not been taken. Messages can be taken in any order,
/// except that those with the same source and tag are taken in sending order. Not synchronised.
class MatchTable {
  public:
    void add(int source, Message message);

    std::optional<Message> take(int source, std::uint64_t tag);

    /// Returns the sources and tags of the messages that were added since the last call and have
    /// not been taken, in order of arrival.
    std::vector<Arrival> take_news();

    bool has_news() const { return !news_.empty(); }

    /// Number of messages from one source.
    std::size_t count(int source) const;

  private:
    struct Entry {
        Message message;
        std::uint64_t number;  ///< serial number of all messages added
    };

    /// Messages with the same source and tag are in order of arrival.
    std::multimap<Arrival, Entry> messages_;
    std::map<std::uint64_t, Arrival> news_;  ///< by number; entries may be removed in any order
    std::uint64_t num_added_ = 0;
};

}  // namespace megatron_ext
