#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/assembly.h"
#include "core/buffer_pool.h"
#include "core/message.h"
#include "tcp/frame.h"

namespace megatron_ext {

/// The receiving half of a TCP link: parses the byte stream into frames. The bytes of long pieces
/// go from the socket directly to the message's memory. Not synchronised.
class TcpReceiver {
  public:
    /// The result of next().
    enum class Outcome {
        kMessage,  ///< message() is complete
        kControl,  ///< head() and text() are a control frame
        kNothing,  ///< no more bytes to read now
        kPause,    ///< the budget is used up
        kEnd,      ///< the peer has closed the connection
        kFailure,  ///< the connection is lost: error_number()
    };

    TcpReceiver(int source, BufferPool pool);

    /// Reads up to the next complete message or control frame, and subtracts the bytes read from
    /// `budget`. Throws TransportError for bytes that are not a frame.
    Outcome next(int socket, std::uint64_t& budget);

    Message take_message() { return std::move(*message_); }
    const Descriptor& head() const noexcept { return head_; }
    const std::string& text() const noexcept { return text_; }
    int error_number() const noexcept { return error_number_; }

    /// Cost of all pieces received since the connection was opened.
    std::uint64_t received_cost() const noexcept { return received_cost_; }

    /// The same cost, counted up to the end of the message in progress.
    std::uint64_t begun_cost() const noexcept { return begun_cost_; }

  private:
    std::optional<Outcome> read_more(int socket, std::uint64_t& budget);
    bool have_head();
    std::byte* place_of_body();
    std::optional<Outcome> finish_frame();
    [[noreturn]] void throw_damaged(const std::string& what) const;
    std::size_t buffered() const noexcept { return end_ - begin_; }

    int source_;
    Assembly assembly_;
    std::vector<std::byte> buffer_;  // bytes begin_ to end_ have been read but not parsed
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    bool in_frame_ = false;
    Descriptor head_{};
    std::byte* body_ = nullptr;
    std::uint64_t body_have_ = 0;
    std::string text_;
    std::optional<Message> message_;
    int error_number_ = 0;
    std::uint64_t received_cost_ = 0;
    std::uint64_t begun_cost_ = 0;
};

}  // namespace megatron_ext
