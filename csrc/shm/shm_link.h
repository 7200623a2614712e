#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/inbox.h"
#include "core/link.h"
#include "core/outbox.h"
#include "core/unique_fd.h"
#include "core/wait.h"
#include "shm/control.h"

namespace megatron_ext {

/// The link to a peer on the same host: an arena for each direction, and a unix socket for close
/// and abort notices. If the socket is closed without a notice, the peer has died.
class ShmLink final : public Link {
  public:
    /// First half of connecting: passes this process's arena and bell to the peer. `socket` is
    /// connected to the peer (AF_UNIX, SOCK_SEQPACKET). Does not wait. Throws TransportError if
    /// there is not enough memory for the arena or the peer is gone.
    ShmLink(const LinkContext& context, UniqueFd socket);

    /// Second half: waits for the peer's first half. A process must complete the first halves with
    /// all peers before any second half; otherwise processes deadlock. Throws TransportError at the
    /// deadline.
    void accept(Deadline deadline, InterruptCheck check);

    /// The memory that receives the peer's messages.
    const Arena& arena() const noexcept { return inbox_.arena(); }

    /// The peer's memory that receives this process's messages. Call it only after accept().
    const Arena& peer_arena() const noexcept { return outbox_->arena(); }

    const char* wire() const noexcept override { return "shm"; }
    void send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
              LinkEvents& events) override;
    std::shared_ptr<std::byte> reserve(std::uint64_t num_bytes) override;
    void publish(Message message, LinkEvents& events) override;
    bool progress(LinkEvents& events) override;
    PeerState state() const noexcept override { return control_.state(); }
    std::string reason() const override { return control_.reason(); }
    LinkCounts counts() const override;
    void say_aborted(const std::string& reason, LinkEvents& events) override;
    void say_closed(LinkEvents& events) override;

  private:
    bool look_at_control();

    const bool checksums_;
    const std::shared_ptr<ProcessBell> bell_;
    Control control_;
    Inbox inbox_;
    std::shared_ptr<ProcessBell> peer_bell_;
    std::optional<Outbox> outbox_;  // set once the peer has passed its arena
    std::uint32_t seen_control_news_ = 0;
    Deadline next_look_;
};

}  // namespace megatron_ext
