#include "rdma/rdma_link.h"

#include <algorithm>
#include <utility>

#include "rdma/errors.h"
#include "rdma/handshake.h"

namespace megatron_ext {
namespace {

constexpr std::chrono::seconds kProbePeriod{1};

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

std::shared_ptr<ProcessBell> make_bell(bool listen) {
    auto bell = std::make_shared<ProcessBell>(ProcessBell::create());
    bell->listen(listen);
    return bell;
}

}  // namespace

RdmaLink::RdmaLink(const LinkContext& context, UniqueFd socket, std::vector<RdmaSource> sources,
                   const RdmaSettings& settings, double silence_s)
    : context_(context),
      silence_s_(silence_s),
      socket_(std::move(socket)),
      inbox_(context.peer, context.room, context.pool),
      release_bell_(make_bell(true)),
      channel_(name_of(context.peer), context.room, inbox_.fd(), std::move(sources), settings),
      // This bell has no eventfd, because no thread sleeps on the bell of the mirror.
      outbox_(channel_.outbox_arena(), make_bell(false), context.checksums) {
    inbox_.set_sender_bell(release_bell_);
}

void RdmaLink::connect(Deadline deadline, InterruptCheck check) {
    const std::string peer = name_of(context_.peer);
    channel_.connect(
        [&](const std::string& text) {
            return exchange_texts(socket_.get(), peer, text, deadline, check);
        },
        context_.rank < context_.peer, deadline, check);
    control_.emplace(context_, std::move(socket_), silence_s_);
}

void RdmaLink::send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
                    LinkEvents& events) {
    outbox_.send(info, bytes, std::move(owner), events);
    write(events);
}

std::shared_ptr<std::byte> RdmaLink::reserve(std::uint64_t num_bytes) {
    return outbox_.reserve(num_bytes);
}

void RdmaLink::publish(Message message, LinkEvents& events) {
    outbox_.publish(std::move(message), events);
    write(events);
}

/// Writes the pieces that the outbox has published. Schedules probes while messages wait for room.
void RdmaLink::write(LinkEvents& events) {
    try {
        channel_.send();
    } catch (const RdmaError& error) {
        fail(error.what(), events);
    }
    if (outbox_.num_queued() != 0 && next_probe_ == kNever) {
        next_probe_ = Clock::now() + kProbePeriod;
        context_.bell->wake_service();  // the thread is sleeping without the probe's deadline
    }
}

bool RdmaLink::progress(LinkEvents& events) {
    release_bell_->clear_event();
    const PeerState before = state_;
    const bool had_queued = counts().num_queued != 0;
    bool arrived = false;
    if (state_ == PeerState::kOpen) {
        // Read notices first: once a close notice has been read, all messages that were sent before
        // it have arrived.
        look_at_control(events);
        try {
            arrived = move_messages(events);
        } catch (const RdmaError& error) {
            fail(error.what(), events);
        }
    } else {
        control_->progress(events);
    }
    return arrived || state_ != before || (had_queued && counts().num_queued == 0);
}

/// Processes completions and, while the peer is open, posts new writes. Returns whether messages
/// arrived.
bool RdmaLink::move_messages(LinkEvents& events) {
    channel_.arm();
    channel_.receive();
    const bool arrived = take_arrived(events);
    if (state_ != PeerState::kOpen) {
        return arrived;
    }
    outbox_.push(events);
    channel_.send();
    probe_if_due();
    if (closing_ && !said_closed_ && counts().num_queued == 0) {
        said_closed_ = true;  // the peer has all messages
        control_->say_closed(events);
    }
    return arrived;
}

bool RdmaLink::take_arrived(LinkEvents& events) {
    bool arrived = false;
    while (std::optional<Message> message = inbox_.next()) {
        events.arrived(std::move(*message));
        arrived = true;
    }
    return arrived;
}

void RdmaLink::probe_if_due() {
    if (outbox_.num_queued() == 0) {
        next_probe_ = kNever;
    } else if (Clock::now() >= next_probe_ || next_probe_ == kNever) {
        next_probe_ = Clock::now() + kProbePeriod;
        channel_.probe();
    }
}

void RdmaLink::look_at_control(LinkEvents& events) {
    control_->progress(events);
    if (state_ == PeerState::kOpen && control_->state() != PeerState::kOpen) {
        state_ = control_->state();
        reason_ = control_->reason();
    }
}

/// Marks the peer as dead, unless it has closed or aborted. Receives earlier arrivals first,
/// because no later call would.
void RdmaLink::fail(const std::string& reason, LinkEvents& events) {
    look_at_control(events);
    try {
        channel_.receive();
    } catch (const RdmaError&) {
        // Report only the first failure.
    }
    take_arrived(events);
    if (state_ == PeerState::kOpen) {
        state_ = PeerState::kDied;
        reason_ = reason;
    }
}

LinkCounts RdmaLink::counts() const {
    return {inbox_.num_held(), outbox_.num_queued() + channel_.num_in_flight()};
}

void RdmaLink::say_aborted(const std::string& reason, LinkEvents& events) {
    outbox_.drop_queued(events);
    control_->say_aborted(reason, events);
}

void RdmaLink::say_closed(LinkEvents&) { closing_ = true; }

bool RdmaLink::parted() const noexcept {
    switch (state_) {
        case PeerState::kOpen:
            return said_closed_ && control_->parted();
        case PeerState::kDied:
            return true;
        default:
            return control_->parted();
    }
}

std::vector<int> RdmaLink::descriptors() const {
    std::vector<int> all = control_->descriptors();
    all.insert(all.end(), {channel_.fd(), channel_.async_fd(), release_bell_->event_fd()});
    return all;
}

Deadline RdmaLink::next_progress() const noexcept {
    return std::min(next_probe_, control_->next_progress());
}

}  // namespace megatron_ext
