#include "tcp/receiver.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/errors.h"

namespace megatron_ext {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 16;
/// If at least this many bytes of a body are outstanding, they are read directly to their
/// destination, bypassing the buffer.
constexpr std::uint64_t kDirectBytes = kBufferBytes / 2;

}  // namespace

TcpReceiver::TcpReceiver(int source, BufferPool pool)
    : source_(source), assembly_(source, std::move(pool)), buffer_(kBufferBytes) {}

TcpReceiver::Outcome TcpReceiver::next(int socket, std::uint64_t& budget) {
    for (;;) {
        if (!in_frame_ && !have_head()) {
            if (const std::optional<Outcome> outcome = read_more(socket, budget)) {
                return *outcome;
            }
            continue;
        }
        const std::uint64_t remaining_bytes = head_.piece_bytes - body_have_;
        const auto ready_bytes =
            static_cast<std::size_t>(std::min<std::uint64_t>(remaining_bytes, buffered()));
        if (ready_bytes > 0) {
            std::memcpy(body_ + body_have_, buffer_.data() + begin_, ready_bytes);
            begin_ += ready_bytes;
            body_have_ += ready_bytes;
        }
        if (body_have_ == head_.piece_bytes) {
            if (const std::optional<Outcome> outcome = finish_frame()) {
                return *outcome;
            }
        } else if (const std::optional<Outcome> outcome = read_more(socket, budget)) {
            return *outcome;
        }
    }
}

/// Reads once. If much of a body is outstanding, reads into the body, and at most one header beyond
/// it, so that a long message is copied only by the kernel. Otherwise reads into the buffer, which
/// is empty or holds part of a header. Returns why reading stops, if it stops.
std::optional<TcpReceiver::Outcome> TcpReceiver::read_more(int socket, std::uint64_t& budget) {
    if (budget == 0) {
        return Outcome::kPause;
    }
    const std::uint64_t remaining_bytes = in_frame_ ? head_.piece_bytes - body_have_ : 0;
    const bool is_direct = remaining_bytes >= kDirectBytes;
    const auto direct_bytes = static_cast<std::size_t>(is_direct ? remaining_bytes : 0);
    std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
    end_ = buffered();
    begin_ = 0;
    const std::size_t more = direct_bytes > 0 ? sizeof(Descriptor) : buffer_.size() - end_;
    iovec parts[2]{{body_ + body_have_, direct_bytes}, {buffer_.data() + end_, more}};
    msghdr message{};
    message.msg_iov = direct_bytes > 0 ? parts : parts + 1;
    message.msg_iovlen = direct_bytes > 0 ? 2 : 1;
    const ssize_t num_bytes = ::recvmsg(socket, &message, MSG_DONTWAIT);
    if (num_bytes > 0) {
        const auto have = static_cast<std::size_t>(num_bytes);
        budget -= std::min(budget, static_cast<std::uint64_t>(have));
        body_have_ += std::min(have, direct_bytes);
        end_ += have - std::min(have, direct_bytes);
        return std::nullopt;
    }
    if (num_bytes == 0) {
        return Outcome::kEnd;
    }
    error_number_ = errno;
    if (error_number_ == EINTR) {
        return std::nullopt;
    }
    const bool is_empty = error_number_ == EAGAIN || error_number_ == EWOULDBLOCK;
    return is_empty ? Outcome::kNothing : Outcome::kFailure;
}

/// Starts a frame if its header is in the buffer.
bool TcpReceiver::have_head() {
    if (buffered() < sizeof(Descriptor)) {
        return false;
    }
    std::memcpy(&head_, buffer_.data() + begin_, sizeof(Descriptor));
    begin_ += sizeof(Descriptor);
    body_ = place_of_body();
    body_have_ = 0;
    in_frame_ = true;
    return true;
}

void TcpReceiver::throw_damaged(const std::string& what) const {
    throw TransportError("the messages of rank " + std::to_string(source_) +
                         " are damaged: " + what);
}

std::byte* TcpReceiver::place_of_body() {
    if (head_.magic == kDescriptorMagic) {
        assembly_.check(head_, kTcpPieceBytes);
        begun_cost_ = received_cost_ + cost_of_message(head_.total_bytes - head_.offset_bytes);
        return assembly_.place(head_);
    }
    const bool known =
        head_.magic == kRoomMagic || head_.magic == kClosedMagic || head_.magic == kAbortedMagic;
    if (!is_intact(head_)) {
        throw_damaged("the header after piece " + std::to_string(assembly_.next_sequence()) +
                      " does not match its checksum");
    }
    if (!known || head_.piece_bytes > kMaxReasonBytes) {
        throw_damaged("a frame of an unknown kind");
    }
    text_.resize(static_cast<std::size_t>(head_.piece_bytes));
    return reinterpret_cast<std::byte*>(text_.data());
}

std::optional<TcpReceiver::Outcome> TcpReceiver::finish_frame() {
    in_frame_ = false;
    if (head_.magic != kDescriptorMagic) {
        if (checksum(text_.data(), text_.size()) != head_.checksum) {
            throw_damaged("the reason why it gave up does not match its checksum");
        }
        return Outcome::kControl;
    }
    assembly_.check_bytes(head_, body_);
    received_cost_ += cost_of_piece(head_.piece_bytes);
    message_ = assembly_.finish(head_);
    return message_ ? std::optional(Outcome::kMessage) : std::nullopt;
}

}  // namespace megatron_ext
