// The service thread of an endpoint: its work between two sleeps.

#include <algorithm>

#include "core/endpoint.h"

namespace megatron_ext {

void Endpoint::start_service() {
    if (!service_.running()) {
        service_.start([this](const Service::News& news) { return serve(news); });
    }
}

/// Does the work of the service thread between two sleeps. Returns the latest time to wake up.
Deadline Endpoint::serve(const Service::News& news) noexcept {
    try {
        const Lock lock(mutex_);
        return error_ ? kNever : serve_links(news);
    } catch (...) {
        const Lock lock(mutex_);
        error_ = std::current_exception();
    }
    bell_->ring();
    return kNever;
}

Deadline Endpoint::serve_links(const Service::News& news) {
    const bool queued = std::any_of(links_.begin(), links_.end(), [](const auto& entry) {
        return !entry.second.served && entry.second.link->counts().num_queued != 0;
    });
    bell_->listen(queued);  // before the check below, so that no later release goes unnoticed
    bool changed = false;
    Deadline next = kNever;
    for (const auto& [peer, entry] : links_) {
        Link& link = *entry.link;
        const bool named = std::find(news.ids.begin(), news.ids.end(), peer) != news.ids.end();
        if (news.woken || named || link.next_progress() <= Clock::now()) {
            changed |= progress_of(peer, link);
        }
        next = std::min(next, link.next_progress());
    }
    if (changed) {
        bell_->ring();
    }
    return next;
}

}  // namespace megatron_ext
