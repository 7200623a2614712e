#include "core/match_table.h"

#include <utility>

namespace megatron_ext {

void MatchTable::add(int source, Message message) {
    const Arrival arrival{source, message.info.tag};
    messages_.emplace(arrival, Entry{std::move(message), num_added_});
    news_.emplace_hint(news_.end(), num_added_++, arrival);
}

std::optional<Message> MatchTable::take(int source, std::uint64_t tag) {
    const Arrival arrival{source, tag};
    const auto position = messages_.lower_bound(arrival);
    if (position == messages_.end() || !(position->first == arrival)) {
        return std::nullopt;
    }
    Entry entry = std::move(position->second);
    messages_.erase(position);
    news_.erase(entry.number);
    return std::move(entry.message);
}

std::vector<Arrival> MatchTable::take_news() {
    std::vector<Arrival> result;
    result.reserve(news_.size());
    for (const auto& [number, arrival] : news_) {
        result.push_back(arrival);
    }
    news_.clear();
    return result;
}

std::size_t MatchTable::count(int source) const {
    std::size_t result = 0;
    for (const auto& [arrival, entry] : messages_) {
        result += arrival.source == source ? 1 : 0;
    }
    return result;
}

}  // namespace megatron_ext
