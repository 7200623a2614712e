#include "tcp/sender.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace megatron_ext {

void TcpSender::queue(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner) {
    queue_.push_back({info, static_cast<const std::byte*>(bytes), std::move(owner)});
}

void TcpSender::queue_control(std::uint32_t magic, std::uint64_t number, std::string text) {
    Frame frame;
    frame.head.magic = magic;
    frame.head.total_bytes = number;
    frame.head.piece_bytes = text.size();
    frame.head.checksum = checksum(text.data(), text.size());
    seal(frame.head);
    frame.text = std::move(text);
    control_.push_back(std::move(frame));
}

void TcpSender::allow(std::uint64_t cost) { allowed_ = std::max(allowed_, cost); }

void TcpSender::drop_queued(LinkEvents& events) {
    for (Pending& pending : queue_) {
        events.sent(std::move(pending.owner));
    }
    queue_.clear();
    if (frame_) {
        frame_->ends_message = false;
    }
}

/// Starts the next frame. Returns false if there is no frame, or no room for it.
bool TcpSender::begin_frame() {
    if (!control_.empty()) {
        frame_ = std::move(control_.front());
        control_.pop_front();
        frame_->body = reinterpret_cast<const std::byte*>(frame_->text.data());
        return true;
    }
    if (queue_.empty() || spent_ >= allowed_) {
        return false;
    }
    Pending& pending = queue_.front();
    const std::uint64_t num_bytes =
        std::min(kTcpPieceBytes, pending.info.num_bytes - pending.sent_bytes);
    frame_.emplace();
    frame_->body = pending.bytes + pending.sent_bytes;
    frame_->head = describe_piece(pending.info, next_sequence_++, pending.sent_bytes, num_bytes,
                                  frame_->body, checksums_);
    frame_->owner = pending.owner;
    pending.sent_bytes += num_bytes;
    frame_->ends_message = pending.sent_bytes == pending.info.num_bytes;
    spent_ += cost_of_piece(num_bytes);
    return true;
}

void TcpSender::finish_frame(LinkEvents& events) {
    if (frame_->ends_message) {
        queue_.pop_front();
    }
    if (frame_->owner) {  // not released here: it may be the last reference
        events.sent(std::move(frame_->owner));
    }
    frame_.reset();
}

int TcpSender::write(int socket, LinkEvents& events) {
    while (frame_ || begin_frame()) {
        Frame& frame = *frame_;
        const std::uint64_t num_bytes = sizeof(Descriptor) + frame.head.piece_bytes;
        const std::uint64_t body_begin =
            std::max<std::uint64_t>(frame.written, sizeof(Descriptor)) - sizeof(Descriptor);
        iovec parts[2]{};
        std::size_t num_parts = 0;
        if (frame.written < sizeof(Descriptor)) {
            auto* const head = reinterpret_cast<std::byte*>(&frame.head);
            parts[num_parts++] = {head + frame.written, sizeof(Descriptor) - frame.written};
        }
        if (body_begin < frame.head.piece_bytes) {
            auto* const body = const_cast<std::byte*>(frame.body);  // sendmsg() only reads it
            parts[num_parts++] = {body + body_begin, frame.head.piece_bytes - body_begin};
        }
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = num_parts;
        const ssize_t written = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (written < 0) {
            if (errno == EINTR) {
                continue;
            }
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
        }
        frame.written += static_cast<std::uint64_t>(written);
        if (frame.written == num_bytes) {
            finish_frame(events);
        }
    }
    return 0;
}

}  // namespace megatron_ext
