#include "core/endpoint.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/errors.h"

namespace megatron_ext {
namespace {

/// How long close() waits for peers to accept their messages.
constexpr std::chrono::seconds kPartingTime{2};

bool is_open(const Link& link) noexcept { return link.state() == PeerState::kOpen; }

}  // namespace

/// Handles the events of one peer's link.
class Endpoint::Events final : public LinkEvents {
  public:
    Events(Endpoint& endpoint, int peer) : endpoint_(endpoint), peer_(peer) {}
    void arrived(Message message) override { endpoint_.table_.add(peer_, std::move(message)); }
    void sent(std::shared_ptr<void> owner) override { endpoint_.done_.push_back(std::move(owner)); }

  private:
    Endpoint& endpoint_;
    int peer_;
};

/// Tells the links that the caller is waiting; the destructor tells them that the wait is over.
class Endpoint::Demand final {
  public:
    explicit Demand(Endpoint& endpoint) : endpoint_(endpoint) {}
    Demand(const Demand&) = delete;
    Demand& operator=(const Demand&) = delete;
    ~Demand() {
        if (told_) {
            const Lock lock(endpoint_.mutex_);
            tell(false);
        }
    }

    /// Requires the endpoint's lock. From then on, links make progress without any further calls.
    void begin() {
        if (!told_) {
            told_ = true;
            tell(true);
        }
    }

  private:
    void tell(bool wanted) {
        for (const auto& [peer, entry] : endpoint_.links_) {
            Events events(endpoint_, peer);
            entry.link->demand(wanted, events);
        }
    }

    Endpoint& endpoint_;
    bool told_ = false;
};

Endpoint::Endpoint(int rank, ArenaSize room, bool checksums)
    : rank_(rank),
      room_(room),
      checksums_(checksums),
      bell_(std::make_shared<ProcessBell>(ProcessBell::create())),
      service_(bell_) {}

Endpoint::~Endpoint() {
    if (!process_.is_this()) {
        service_.abandon();
        return;
    }
    try {
        close();
    } catch (const std::exception&) {
        // The links end with the endpoint, even if a close notice could not be sent.
    }
}

LinkContext Endpoint::context(int peer) const {
    if (peer == rank_ || links_.count(peer) != 0) {
        throw std::invalid_argument("rank " + std::to_string(rank_) +
                                    " already has a link to rank " + std::to_string(peer));
    }
    return {rank_, peer, room_, checksums_, pool_, bell_};
}

void Endpoint::add(int peer, std::shared_ptr<Link> link) {
    check_usable();
    const std::vector<int> descriptors = link->descriptors();
    {
        const Lock lock(mutex_);
        context(peer);
        links_.emplace(peer, Entry{std::move(link), !descriptors.empty()});
    }
    for (const int fd : descriptors) {
        service_.watch(fd, peer);
    }
    if (!descriptors.empty()) {
        start_service();
    }
}

void Endpoint::check_usable() const {
    if (!process_.is_this()) {
        throw TransportError("the links of process " + std::to_string(process_.id()) +
                             " cannot be used by its forked child " + std::to_string(::getpid()));
    }
}

Link& Endpoint::link_to(int peer) const {
    const auto entry = links_.find(peer);
    if (entry == links_.end()) {
        throw std::invalid_argument("rank " + std::to_string(rank_) + " has no link to rank " +
                                    std::to_string(peer));
    }
    return *entry->second.link;
}

/// Returns the link to a peer that still accepts messages, after doing all work that can be done
/// without waiting.
Link& Endpoint::open_link(int peer) {
    Link& link = link_to(peer);
    progress();
    if (!is_open(link)) {
        throw TransportError("the link to rank " + std::to_string(peer) + " is not open");
    }
    return link;
}

/// Counts a message of `num_bytes` and makes the service thread send the rest once there is room.
void Endpoint::count_sent(int peer, std::uint64_t num_bytes) {
    counts_.num_messages += 1;
    counts_.num_bytes += num_bytes;
    const Entry& entry = links_.at(peer);
    if (!entry.served && entry.link->counts().num_queued != 0) {
        start_service();
        bell_->wake_service();
    }
}

void Endpoint::send(int peer, const MessageInfo& info, const void* bytes,
                    std::shared_ptr<void> owner) {
    check_usable();
    Owners done;  // released after the lock
    const Lock lock(mutex_);
    if (peer == rank_) {
        Message message{info, nullptr};
        if (info.num_bytes > 0) {
            const auto num_bytes = static_cast<std::size_t>(info.num_bytes);
            message.bytes = pool_.take(num_bytes);
            std::memcpy(message.bytes.get(), bytes, num_bytes);
        }
        table_.add(peer, std::move(message));
        counts_.num_messages += 1;
        counts_.num_bytes += info.num_bytes;
        bell_->ring();  // another thread may be waiting for it
        return;
    }
    Link& link = open_link(peer);
    Events events(*this, peer);
    link.send(info, bytes, std::move(owner), events);
    count_sent(peer, info.num_bytes);
    done.swap(done_);
}

std::optional<Message> Endpoint::reserve(int peer, const MessageInfo& info) {
    check_usable();
    if (peer == rank_) {
        return std::nullopt;
    }
    Owners done;
    const Lock lock(mutex_);
    Message message{info, open_link(peer).reserve(info.num_bytes)};
    done.swap(done_);
    return message.bytes ? std::optional(std::move(message)) : std::nullopt;
}

void Endpoint::publish(int peer, const Message& message) {
    check_usable();
    Owners done;
    const Lock lock(mutex_);
    Link& link = open_link(peer);
    Events events(*this, peer);
    link.publish(message, events);
    count_sent(peer, message.info.num_bytes);
    done.swap(done_);
}

std::pair<std::byte*, std::size_t> Endpoint::add_buffers(std::size_t num_slots) {
    return pool_.add_slots(num_slots, static_cast<std::size_t>(room_.slot_bytes));
}

/// Does all work that can be done without waiting, on the calling thread.
void Endpoint::progress() {
    if (error_) {
        std::rethrow_exception(error_);
    }
    for (const auto& [peer, entry] : links_) {
        if (!entry.served) {
            progress_of(peer, *entry.link);
        }
    }
}

bool Endpoint::progress_of(int peer, Link& link) {
    Events events(*this, peer);
    return link.progress(events);
}

bool Endpoint::failed() const noexcept {
    return aborted_ || std::any_of(links_.begin(), links_.end(), [](const auto& entry) {
               const PeerState state = entry.second.link->state();
               return state == PeerState::kDied || state == PeerState::kAborted;
           });
}

/// Sleeps once, until a ring after `seen`, but only briefly, because dead peers cannot ring.
/// Returns the seconds slept; std::nullopt at the deadline.
std::optional<double> Endpoint::sleep(std::uint32_t seen, Deadline deadline) {
    const Deadline begin = Clock::now();
    if (begin >= deadline) {
        return std::nullopt;
    }
    const Deadline wake = std::min(deadline, begin + kInterruptPeriod);
    if (!bell_->spin(seen, spin_)) {
        bell_->wait(seen, wake, nullptr);
    }
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Sleeps until `condition` holds, which is checked after each call to progress(). Returns false at
/// the deadline.
template <typename Condition>
bool Endpoint::wait_until(Condition condition, Deadline deadline, InterruptCheck check) {
    check_usable();
    std::optional<double> slept_s = 0.0;
    double checked_at_s = 0.0;
    Demand demand(*this);
    for (double waited_s = 0.0;;) {
        const std::uint32_t seen = bell_->sequence();
        {
            Owners done;
            const Lock lock(mutex_);
            counts_.waited_s += *slept_s;
            counts_.last_wait_s = waited_s += *slept_s;
            progress();
            done.swap(done_);
            if (condition()) {
                return true;
            }
            demand.begin();
        }
        // Check by the clock rather than after idle sleeps, because rings for other messages may
        // never pause.
        constexpr double kPeriodS = std::chrono::duration<double>(kInterruptPeriod).count();
        if (check != nullptr && waited_s >= checked_at_s + kPeriodS) {
            checked_at_s = waited_s;
            check();
        }
        slept_s = sleep(seen, deadline);
        if (!slept_s) {
            return false;
        }
    }
}

EndpointCounts Endpoint::counts() {
    const Lock lock(mutex_);
    return counts_;
}

std::optional<Message> Endpoint::take(int source, std::uint64_t tag, Deadline deadline,
                                      InterruptCheck check) {
    const Link* const link = source == rank_ ? nullptr : &link_to(source);
    std::optional<Message> message;
    wait_until(
        [&] {
            message = table_.take(source, tag);
            return message || failed() || (link != nullptr && !is_open(*link));
        },
        deadline, check);
    return message;
}

std::vector<Arrival> Endpoint::arrivals(Deadline deadline, InterruptCheck check) {
    std::vector<Arrival> news;
    wait_until(
        [&] {
            const bool any_open = std::any_of(links_.begin(), links_.end(), [](const auto& entry) {
                return is_open(*entry.second.link);
            });
            news = table_.take_news();
            return !news.empty() || failed() || (!links_.empty() && !any_open);
        },
        deadline, check);
    return news;
}

bool Endpoint::flush(Deadline deadline, InterruptCheck check) {
    bool empty = false;
    const auto is_empty = [](const auto& entry) {
        return entry.second.link->counts().num_queued == 0;
    };
    const auto is_stuck = [&](const auto& entry) {
        return !is_empty(entry) && !is_open(*entry.second.link);
    };
    wait_until(
        [&] {
            // An abort has emptied the queues, but their messages were not sent.
            empty = !aborted_ && std::all_of(links_.begin(), links_.end(), is_empty);
            return empty || failed() || std::any_of(links_.begin(), links_.end(), is_stuck);
        },
        deadline, check);
    return empty;
}

void Endpoint::abort(const std::string& reason) {
    check_usable();
    Owners done;  // released after the lock, here and below
    const Lock lock(mutex_);
    for (const auto& [peer, entry] : links_) {
        Events events(*this, peer);
        entry.link->say_aborted(reason, events);
    }
    aborted_ = true;
    bell_->ring();  // another thread may wait
    done.swap(done_);
}

void Endpoint::close() {
    check_usable();
    service_.stop();
    Owners done;
    MatchTable table;
    std::map<int, Entry> links;  // with the owners of unsent messages
    const Lock lock(mutex_);
    for (const auto& [peer, entry] : links_) {
        Events events(*this, peer);
        entry.link->say_closed(events);
    }
    part();
    links.swap(links_);
    std::swap(table, table_);
    done.swap(done_);
}

/// Lets links that need time finish their messages and close notices, while peers accept them.
void Endpoint::part() noexcept {
    const Deadline deadline = Clock::now() + kPartingTime;
    try {
        for (;;) {
            std::vector<pollfd> entries;
            for (const auto& [peer, entry] : links_) {
                progress_of(peer, *entry.link);
                if (!entry.link->parted()) {
                    for (const int fd : entry.link->descriptors()) {
                        entries.push_back({fd, POLLIN, 0});
                    }
                }
            }
            if (entries.empty() || Clock::now() >= deadline) {
                return;
            }
            ::poll(entries.data(), static_cast<nfds_t>(entries.size()), 20);
        }
    } catch (const std::exception&) {
        // A peer has sent damaged data, but there is no caller left to receive the error.
    }
}

std::vector<PeerReport> Endpoint::peers() {
    check_usable();
    const Lock lock(mutex_);
    std::vector<PeerReport> reports;
    for (const auto& [rank, entry] : links_) {
        const Link& link = *entry.link;
        reports.push_back(
            {rank, link.wire(), link.state(), link.reason(), table_.count(rank), link.counts()});
    }
    return reports;
}

}  // namespace megatron_ext
