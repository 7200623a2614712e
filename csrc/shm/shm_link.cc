#include "shm/shm_link.h"

#include <utility>

#include "core/errors.h"
#include "core/fd_passing.h"

namespace megatron_ext {

ShmLink::ShmLink(const LinkContext& context, UniqueFd socket)
    : checksums_(context.checksums),
      bell_(context.bell),
      control_(std::move(socket)),
      inbox_(context.peer, context.room, context.pool),
      next_look_(Clock::now()) {
    for (const int fd : {bell_->page_fd(), bell_->event_fd(), inbox_.fd()}) {
        send_fd(control_.socket(), fd);
    }
}

void ShmLink::accept(Deadline deadline, InterruptCheck check) {
    const int socket = control_.socket();
    UniqueFd page = receive_fd(socket, deadline, check);
    UniqueFd event = receive_fd(socket, deadline, check);
    peer_bell_ =
        std::make_shared<ProcessBell>(ProcessBell::attach(std::move(page), std::move(event)));
    Arena arena = Arena::attach(receive_fd(socket, deadline, check));
    inbox_.set_sender_bell(peer_bell_);
    outbox_.emplace(std::move(arena), peer_bell_, checksums_);
}

void ShmLink::send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
                   LinkEvents& events) {
    outbox_->send(info, bytes, std::move(owner), events);
}

std::shared_ptr<std::byte> ShmLink::reserve(std::uint64_t num_bytes) {
    return outbox_->reserve(num_bytes);
}

void ShmLink::publish(Message message, LinkEvents& events) {
    outbox_->publish(std::move(message), events);
}

bool ShmLink::progress(LinkEvents& events) {
    // Read notices first: once a notice has been read, all messages that the peer sent before it
    // have arrived.
    bool changed = look_at_control();
    if (outbox_->num_queued() != 0 && control_.state() == PeerState::kOpen) {
        outbox_->push(events);
        changed |= outbox_->num_queued() == 0;
    }
    while (std::optional<Message> message = inbox_.next()) {
        events.arrived(std::move(*message));
        changed = true;
    }
    return changed;
}

/// Reads the socket if the peer rang for it, and periodically, because a dead peer cannot ring.
bool ShmLink::look_at_control() {
    const std::uint32_t news = bell_->control_news();
    if (control_.state() != PeerState::kOpen ||
        (news == seen_control_news_ && Clock::now() < next_look_)) {
        return false;
    }
    seen_control_news_ = news;
    next_look_ = Clock::now() + kInterruptPeriod;
    return control_.update() != PeerState::kOpen;
}

LinkCounts ShmLink::counts() const { return {inbox_.num_held(), outbox_->num_queued()}; }

void ShmLink::say_aborted(const std::string& reason, LinkEvents& events) {
    outbox_->drop_queued(events);
    control_.say_aborted(reason);
    peer_bell_->ring_for_control();
}

void ShmLink::say_closed(LinkEvents&) {
    control_.say_closed();
    peer_bell_->ring_for_control();
}

}  // namespace megatron_ext
