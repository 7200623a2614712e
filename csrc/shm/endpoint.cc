#include "shm/endpoint.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "core/errors.h"
#include "core/fd_passing.h"

namespace megatron_ext {

/// What peers write to wake this process.
struct Endpoint::BellPage {
    alignas(64) std::uint32_t bell;
    /// Set before the ring that tells of news on a socket, so that other rings need no system call.
    alignas(64) std::atomic<std::uint32_t> look_at_sockets;
};

/// A peer; `outbox` is there once it has offered its arena.
struct Endpoint::Peer {
    Peer(Control c, Inbox i) : control(std::move(c)), inbox(std::move(i)) {}

    Control control;
    Inbox inbox;
    std::optional<Outbox> outbox;
    std::shared_ptr<Segment> bell_memory;

    bool is_open() const noexcept { return control.state() == PeerState::kOpen; }
    void wake() const {
        auto* page = static_cast<BellPage*>(bell_memory->data());
        page->look_at_sockets.store(1, std::memory_order_release);
        Doorbell(&page->bell).ring();
    }
};

Endpoint::Endpoint(int rank, ArenaSize size, bool checksums)
    : rank_(rank),
      size_(size),
      checksums_(checksums),
      process_(::getpid()),
      bell_memory_(Segment::create(sizeof(BellPage))),
      bell_(&page().bell),
      next_update_(Clock::now()) {}

Endpoint::~Endpoint() {
    if (::getpid() == process_) {
        close();
    }
}

Endpoint::BellPage& Endpoint::page() const noexcept {
    return *static_cast<BellPage*>(bell_memory_.data());
}

void Endpoint::offer(int peer, UniqueFd socket) {
    check_process();
    if (peer == rank_ || peers_.count(peer) != 0) {
        throw std::invalid_argument("rank " + std::to_string(rank_) + " has a link to rank " +
                                    std::to_string(peer) + " already");
    }
    Inbox inbox(peer, size_, pool_);
    send_fd(socket.get(), bell_memory_.fd());
    send_fd(socket.get(), inbox.fd());
    peers_.emplace(peer, std::make_unique<Peer>(Control(std::move(socket)), std::move(inbox)));
}

void Endpoint::accept(int peer, Deadline deadline, InterruptCheck check) {
    check_process();
    Peer& entry = peer_at(peer);
    const int socket = entry.control.socket();
    auto bell = std::make_shared<Segment>(Segment::attach(receive_fd(socket, deadline, check)));
    Arena arena = Arena::attach(receive_fd(socket, deadline, check));
    if (bell->size_bytes() != sizeof(BellPage)) {
        throw TransportError("rank " + std::to_string(peer) + " sent a doorbell of " +
                             std::to_string(bell->size_bytes()) +
                             " bytes; install the same megatron_ext for all ranks");
    }
    void* const word = &static_cast<BellPage*>(bell->data())->bell;
    entry.bell_memory = bell;
    entry.inbox.set_sender_bell(bell, word);
    entry.outbox.emplace(std::move(arena), bell, word, checksums_);
}

void Endpoint::check_process() const {
    if (::getpid() != process_) {
        throw TransportError("the links of process " + std::to_string(process_) +
                             " cannot be used by its forked child " + std::to_string(::getpid()));
    }
}

Endpoint::Peer& Endpoint::peer_at(int rank) {
    const auto found = peers_.find(rank);
    if (found == peers_.end()) {
        throw std::invalid_argument("rank " + std::to_string(rank_) + " has no link to rank " +
                                    std::to_string(rank));
    }
    return *found->second;
}

void Endpoint::send(int peer, const MessageInfo& info, const void* bytes,
                    std::shared_ptr<void> owner) {
    check_process();
    if (peer == rank_) {
        Message message{info, nullptr};
        if (info.num_bytes > 0) {
            const auto num_bytes = static_cast<std::size_t>(info.num_bytes);
            message.bytes = pool_.take(num_bytes);
            std::memcpy(message.bytes.get(), bytes, num_bytes);
        }
        table_.add(peer, std::move(message));
        return;
    }
    Peer& entry = peer_at(peer);
    progress();
    if (!entry.outbox || !entry.is_open()) {
        throw TransportError("the link to rank " + std::to_string(peer) + " is not open");
    }
    entry.outbox->send(info, bytes, std::move(owner));
}

/// All that can be done without waiting.
void Endpoint::progress() {
    const bool told = page().look_at_sockets.exchange(0, std::memory_order_acquire) != 0;
    if (told || Clock::now() >= next_update_) {
        update_peers();
    }
    for (auto& [rank, peer] : peers_) {
        if (peer->outbox && peer->is_open()) {
            peer->outbox->push();
        }
        while (std::optional<Message> message = peer->inbox.next()) {
            table_.add(rank, std::move(*message));
        }
    }
}

void Endpoint::update_peers() {
    next_update_ = Clock::now() + kInterruptPeriod;
    for (auto& [rank, peer] : peers_) {
        if (peer->outbox) {  // before that, the socket carries descriptors
            peer->control.update();
        }
    }
}

bool Endpoint::failed() const noexcept {
    return std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
        const PeerState state = entry.second->control.state();
        return state == PeerState::kDied || state == PeerState::kAborted;
    });
}

/// Sleeps until `condition` holds: it is asked after each progress. Sleeps end early enough to
/// notice dead peers, which cannot ring.
template <typename Condition>
bool Endpoint::wait_until(Condition condition, Deadline deadline, InterruptCheck check) {
    check_process();
    for (;;) {
        const std::uint32_t seen = bell_.sequence();
        progress();
        if (condition()) {
            return true;
        }
        if (Clock::now() >= deadline) {
            return false;
        }
        const Deadline wake = std::min(deadline, Clock::now() + kInterruptPeriod);
        if (!bell_.wait(seen, wake) && check != nullptr) {
            check();
        }
    }
}

std::optional<Message> Endpoint::take(int source, std::uint64_t tag, Deadline deadline,
                                      InterruptCheck check) {
    if (source != rank_) {
        peer_at(source);
    }
    std::optional<Message> message;
    wait_until(
        [&] {
            message = table_.take(source, tag);
            return message || failed() || (source != rank_ && !peer_at(source).is_open());
        },
        deadline, check);
    return message;
}

std::vector<Arrival> Endpoint::arrivals(Deadline deadline, InterruptCheck check) {
    wait_until(
        [&] {
            const bool any_open = std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
                return entry.second->is_open();
            });
            return table_.has_news() || failed() || (!peers_.empty() && !any_open);
        },
        deadline, check);
    return table_.take_news();
}

bool Endpoint::flush(Deadline deadline, InterruptCheck check) {
    const auto is_empty = [](const auto& entry) {
        return !entry.second->outbox || entry.second->outbox->num_queued() == 0;
    };
    const auto is_stuck = [&](const auto& entry) {
        return !is_empty(entry) && !entry.second->is_open();
    };
    wait_until(
        [&] {
            return std::all_of(peers_.begin(), peers_.end(), is_empty) || failed() ||
                   std::any_of(peers_.begin(), peers_.end(), is_stuck);
        },
        deadline, check);
    return std::all_of(peers_.begin(), peers_.end(), is_empty);
}

void Endpoint::abort(const std::string& reason) {
    check_process();
    for (auto& [rank, peer] : peers_) {
        if (peer->outbox) {
            peer->outbox->drop_queued();
            peer->control.say_aborted(reason);
            peer->wake();
        }
    }
}

void Endpoint::close() {
    check_process();
    for (auto& [rank, peer] : peers_) {
        if (peer->outbox) {
            peer->control.say_closed();
            peer->wake();
        }
    }
    peers_.clear();
    table_ = MatchTable();
}

std::vector<PeerReport> Endpoint::peers() {
    check_process();
    std::vector<PeerReport> reports;
    for (auto& [rank, peer] : peers_) {
        reports.push_back({rank, peer->control.state(), peer->control.reason(), table_.count(rank),
                           peer->inbox.num_held(), peer->outbox ? peer->outbox->num_queued() : 0});
    }
    return reports;
}

}  // namespace megatron_ext
