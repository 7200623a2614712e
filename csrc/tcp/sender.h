#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "core/link.h"
#include "core/message.h"
#include "tcp/frame.h"

namespace megatron_ext {

/// The sending half of a TCP link: queues of frames that are waiting for the socket, and of
/// messages that are waiting for room at the receiver. Not synchronised.
class TcpSender {
  public:
    explicit TcpSender(bool checksums) : checksums_(checksums) {}

    void queue(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner);

    /// Queues a control frame, ahead of all messages but not inside a piece.
    void queue_control(std::uint32_t magic, std::uint64_t number, std::string text = {});

    /// Allows messages up to this total cost, counted from the start of the connection.
    void allow(std::uint64_t cost);

    /// Drops all messages except the piece being written; `events` gets their owners.
    void drop_queued(LinkEvents& events);

    /// Writes until the socket is full or no frame may be sent. Returns 0, or the error number of a
    /// lost connection.
    int write(int socket, LinkEvents& events);

    std::size_t num_queued() const noexcept { return queue_.size(); }

  private:
    struct Pending {
        MessageInfo info;
        const std::byte* bytes;
        std::shared_ptr<void> owner;
        std::uint64_t sent_bytes = 0;
    };

    /// A descriptor with its bytes, and the number of bytes that have been written.
    struct Frame {
        Descriptor head{};
        const std::byte* body = nullptr;
        std::string text;             // the body of a control frame
        std::shared_ptr<void> owner;  // of the body of a piece
        bool ends_message = false;    // ends the first message in the queue
        std::uint64_t written = 0;
    };

    bool begin_frame();
    void finish_frame(LinkEvents& events);

    std::deque<Pending> queue_;
    std::deque<Frame> control_;
    std::optional<Frame> frame_;
    std::uint64_t next_sequence_ = 0;
    std::uint64_t allowed_ = kFirstRoom;  // total cost since the beginning, like `spent_`
    std::uint64_t spent_ = 0;
    bool checksums_;
};

}  // namespace megatron_ext
