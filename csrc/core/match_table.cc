#include "core/match_table.h"

#include <algorithm>
#include <utility>

namespace megatron_ext {

void MatchTable::add(int source, Message message) {
    const Arrival arrival{source, message.info.tag};
    messages_.emplace(arrival, std::move(message));
    news_.push_back(arrival);
}

std::optional<Message> MatchTable::take(int source, std::uint64_t tag) {
    const Arrival arrival{source, tag};
    const auto found = messages_.lower_bound(arrival);
    if (found == messages_.end() || !(found->first == arrival)) {
        return std::nullopt;
    }
    Message message = std::move(found->second);
    messages_.erase(found);
    const auto news = std::find(news_.begin(), news_.end(), arrival);
    if (news != news_.end()) {
        news_.erase(news);
    }
    return message;
}

std::vector<Arrival> MatchTable::take_news() {
    std::vector<Arrival> result(news_.begin(), news_.end());
    news_.clear();
    return result;
}

std::size_t MatchTable::count(int source) const {
    std::size_t result = 0;
    for (const auto& [arrival, message] : messages_) {
        result += arrival.source == source ? 1 : 0;
    }
    return result;
}

}  // namespace megatron_ext
