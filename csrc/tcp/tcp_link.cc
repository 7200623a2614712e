#include "tcp/tcp_link.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/errors.h"

namespace megatron_ext {
namespace {

/// Maximum number of bytes that one call to progress() reads, so that the other links and the
/// caller get their turn and the grant grows before the peer has used it up.
constexpr std::uint64_t kReadBytes = kFirstRoom / 4;

void set_option(int socket, int level, int name, int value) {
    if (::setsockopt(socket, level, name, &value, sizeof(value)) != 0) {
        const int error_number = errno;
        throw_errno("cannot set option " + std::to_string(name) + " of a connection", error_number);
    }
}

/// Returns the longest silence in ms.
int set_options(int socket, double silence_s) {
    if (!(silence_s >= 1.0 && silence_s <= 86400.0)) {
        throw std::invalid_argument("silence_s must be between 1 and 86400, got " +
                                    std::to_string(silence_s));
    }
    const int seconds = static_cast<int>(std::ceil(silence_s));
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 3));
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 6));
    set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
    set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000);
    return seconds * 1000;
}

std::string error_text(int error_number) { return std::system_category().message(error_number); }

}  // namespace

/// The cost of received messages that are still held. The messages share this object with the link.
class TcpLink::Held {
  public:
    Held(std::shared_ptr<ProcessBell> bell, std::uint64_t room)
        : bell_(std::move(bell)), step_(room / 4) {}

    void hold() noexcept { num_held_.fetch_add(1); }

    /// Any thread may call this. Wakes the service thread once the released cost is worth a frame.
    void let_go(std::uint64_t cost) noexcept {
        if (::getpid() != process_) {
            return;  // a forked child has a copy of the message
        }
        num_held_.fetch_sub(1);
        const std::uint64_t released = released_.fetch_add(cost) + cost;
        if (released - told_.load() >= step_ && !woken_.exchange(true)) {
            bell_->wake_service();
        }
    }

    std::uint64_t num_held() const noexcept { return num_held_.load(); }

    /// The total released cost, if its growth since the last call is worth a frame; otherwise 0.
    std::uint64_t take_news() noexcept {
        woken_.store(false);
        const std::uint64_t released = released_.load();
        if (released - told_.load() < step_) {
            return 0;
        }
        told_.store(released);
        return released;
    }

  private:
    const std::shared_ptr<ProcessBell> bell_;
    const std::uint64_t step_;
    const pid_t process_ = ::getpid();
    std::atomic<std::uint64_t> num_held_{0};
    std::atomic<std::uint64_t> released_{0};
    std::atomic<std::uint64_t> told_{0};
    std::atomic<bool> woken_{false};
};

TcpLink::TcpLink(const LinkContext& context, UniqueFd socket, double silence_s)
    : socket_(std::move(socket)),
      guard_(socket_.get()),
      bell_(context.bell),
      silence_ms_(set_options(socket_.get(), silence_s)),
      room_(std::max(kFirstRoom, context.room.num_slots * context.room.slot_bytes)),
      sender_(context.checksums),
      receiver_(context.peer, context.pool),
      held_(std::make_shared<Held>(context.bell, room_)) {
    allow(room_);
}

void TcpLink::send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
                   LinkEvents& events) {
    sender_.queue(info, bytes, std::move(owner));
    if (sender_.num_queued() == 1) {  // otherwise the socket is full, or there is no room
        write(events);                // progress() reports a failure
    }
}

bool TcpLink::progress(LinkEvents& events) {
    const PeerState before = state_;
    const bool was_queued = sender_.num_queued() != 0;
    next_progress_ = kNever;
    bool changed = receive(events);
    allow_what_is_due();
    if (const int error_number = write(events)) {
        changed |= receive(events);  // a notice from the peer may give the reason
        ended_ = true;
        leave_open(PeerState::kDied, error_text(error_number));
    }
    look_at_window();
    return changed || state_ != before || (was_queued && sender_.num_queued() == 0);
}

/// Reads the available frames; returns whether messages were completed.
bool TcpLink::receive(LinkEvents& events) {
    bool arrived = false;
    for (std::uint64_t budget = kReadBytes; !ended_;) {
        switch (receiver_.next(socket_.get(), budget)) {
            case TcpReceiver::Outcome::kMessage:
                events.arrived(hold(receiver_.take_message()));
                arrived = true;
                break;
            case TcpReceiver::Outcome::kControl:
                take_control();
                break;
            case TcpReceiver::Outcome::kNothing:
                return arrived;
            case TcpReceiver::Outcome::kPause:
                next_progress_ = Clock::now();
                return arrived;
            case TcpReceiver::Outcome::kEnd:
                ended_ = true;
                leave_open(PeerState::kDied, "its end of the connection was closed");
                break;
            case TcpReceiver::Outcome::kFailure:
                ended_ = true;
                leave_open(PeerState::kDied, error_text(receiver_.error_number()));
                break;
        }
    }
    return arrived;
}

void TcpLink::take_control() {
    switch (receiver_.head().magic) {
        case kRoomMagic:
            sender_.allow(receiver_.head().total_bytes);
            break;
        case kClosedMagic:
            leave_open(PeerState::kClosed, "");
            break;
        default:
            leave_open(PeerState::kAborted, receiver_.text());
    }
}

/// Returns the message with an owner that gives the room back when the message is released.
Message TcpLink::hold(Message message) {
    const std::uint64_t cost = cost_of_message(message.info.num_bytes);
    held_->hold();
    if (!message.bytes) {
        held_->let_go(cost);
        return message;
    }
    std::byte* const bytes = message.bytes.get();
    message.bytes = {bytes, [owner = std::move(message.bytes), held = held_, cost](auto*) mutable {
                         owner.reset();
                         held->let_go(cost);
                     }};
    return message;
}

/// Grants the peer this total cost, counted from the start of the connection.
void TcpLink::allow(std::uint64_t cost) {
    if (cost > allowed_) {
        allowed_ = cost;
        sender_.queue_control(kRoomMagic, cost);
    }
}

void TcpLink::allow_what_is_due() {
    allow(receiver_.begun_cost());
    if (const std::uint64_t released = held_->take_news()) {
        allow(released + room_);
    }
    if (demanded_ && allowed_ < receiver_.received_cost() + room_ / 2) {
        allow(receiver_.received_cost() + room_);
    }
}

void TcpLink::demand(bool is_waiting, LinkEvents& events) {
    demanded_ = is_waiting;
    if (is_waiting) {
        allow_what_is_due();
        write(events);
    }
}

/// Writes queued frames. Returns the error number of a lost connection, or 0.
int TcpLink::write(LinkEvents& events) {
    if (mute_ || ended_) {
        return 0;
    }
    if (next_look_ == kNever) {
        next_look_ = Clock::now() + look_period();
        bell_->wake_service();  // the thread is sleeping with a different deadline
    }
    return sender_.write(socket_.get(), events);
}

/// After `silence_ms_`, the kernel ends a connection with waiting data, even if the peer's host
/// answers but has no room, because its process is stopped or starved of CPU. So the limit is
/// disabled while data is waiting, if all sent data has been acknowledged and the host answers
/// probes for room.
void TcpLink::look_at_window() noexcept {
    if (Clock::now() < next_look_) {
        return;
    }
    int num_waiting = 0;
    tcp_info info{};
    socklen_t size = sizeof(info);
    const bool known = ::ioctl(socket_.get(), SIOCOUTQ, &num_waiting) == 0 &&
                       ::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
    const bool is_full =
        known && num_waiting > 0 && info.tcpi_unacked == 0 && info.tcpi_probes <= 1;
    if (is_full != window_is_full_) {
        window_is_full_ = is_full;
        const int limit_ms = is_full ? 0 : silence_ms_;
        ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof(limit_ms));
    }
    next_look_ = known && num_waiting > 0 ? Clock::now() + look_period() : kNever;
}

Deadline TcpLink::next_progress() const noexcept { return std::min(next_progress_, next_look_); }

/// Enters a final state. Closing this direction acknowledges the peer's notice.
void TcpLink::leave_open(PeerState state, const std::string& reason) {
    if (state_ == PeerState::kOpen) {
        state_ = state;
        reason_ = reason;
    }
    mute_ = true;
    ::shutdown(socket_.get(), SHUT_WR);
}

LinkCounts TcpLink::counts() const { return {held_->num_held(), sender_.num_queued()}; }

void TcpLink::say_aborted(const std::string& reason, LinkEvents& events) {
    say(kAbortedMagic, reason.substr(0, kMaxReasonBytes), events);
}

void TcpLink::say_closed(LinkEvents& events) { say(kClosedMagic, {}, events); }

void TcpLink::say(std::uint32_t magic, std::string text, LinkEvents& events) {
    sender_.drop_queued(events);
    sender_.queue_control(magic, 0, std::move(text));
    write(events);
}

}  // namespace megatron_ext
