#include "rdma/channel.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "rdma/errors.h"

namespace megatron_ext {
namespace {

constexpr char kMagic[8] = {'M', 'E', 'X', 'T', 'R', 'D', 'M', '1'};
constexpr std::size_t kMaxSources = 8;
constexpr std::uint64_t kLargestPacketBytes = 4096;

/// The kind of an immediate value or of a request id, in the high bits; the low bits are a slot
/// number.
enum Kind : std::uint32_t { kPiece = 0, kCredit = 1, kProbe = 2 };
constexpr std::uint32_t kKindShift = 16;
static_assert(Arena::kMaxSlots <= 1U << kKindShift, "slots fit below the kind");

constexpr std::uint32_t label(Kind kind, std::uint32_t slot) {
    return static_cast<std::uint32_t>(kind) << kKindShift | slot;
}

Arena attach_again(int fd) {
    UniqueFd duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!duplicate) {
        const int error_number = errno;
        throw_errno("cannot map an arena for RDMA", error_number);
    }
    return Arena::attach(std::move(duplicate));
}

/// Start of the registered memory: the descriptors and slots of an arena are contiguous. The
/// control words before them stay local.
std::byte* base_of(const Arena& arena) {
    return reinterpret_cast<std::byte*>(&arena.descriptor(0));
}

std::size_t num_bytes_of(const Arena& arena) {
    const std::byte* const last = arena.bytes(arena.size().num_slots - 1);
    return static_cast<std::size_t>(last - base_of(arena)) +
           static_cast<std::size_t>(arena.size().slot_bytes);
}

std::uint32_t writes_for(std::uint64_t num_bytes, std::uint32_t max_write_bytes) {
    return static_cast<std::uint32_t>((num_bytes + max_write_bytes - 1) / max_write_bytes);
}

std::uint32_t smallest_write_limit(const std::vector<RdmaSource>& sources) {
    std::uint32_t limit = UINT32_MAX;
    for (const RdmaSource& source : sources) {
        limit = std::min(limit, std::max(source.max_message_bytes, 1U));
    }
    return limit;
}

/// Runs a step that the peer runs too. Returns why it failed at either end; empty if it succeeded
/// at both ends.
template <typename Step>
std::string try_together(const RdmaChannel::Exchange& exchange, const std::string& peer,
                         Step step) {
    std::string failure;
    try {
        step();
    } catch (const RdmaError& error) {
        failure = error.finding();
    }
    const std::string their_failure = exchange(failure);
    return failure.empty() && !their_failure.empty() ? peer + " says: " + their_failure : failure;
}

}  // namespace

/// One end's connection data, as sent to the other end. All hosts in a job have the same byte
/// order.
struct RdmaChannel::Offer {
    struct Source {
        std::uint8_t gid[16];
        std::uint16_t lid;
        std::uint8_t link_layer;
        std::uint8_t mtu;
    };

    char magic[8];
    std::uint64_t slot_bytes;
    std::uint64_t base;
    std::uint32_t num_slots;
    std::uint32_t key;
    std::uint32_t qp_number;
    std::uint32_t first_psn;
    std::uint32_t num_sources;
    Source sources[kMaxSources];

    RdmaTarget target(std::size_t index) const {
        RdmaTarget result{qp_number, first_psn, {}, sources[index].lid, sources[index].mtu};
        std::copy(std::begin(sources[index].gid), std::end(sources[index].gid),
                  result.gid.bytes.begin());
        return result;
    }
};

RdmaChannel::RdmaChannel(const std::string& peer, ArenaSize size, int inbox_fd,
                         std::vector<RdmaSource> sources, const RdmaSettings& settings)
    : peer_(peer),
      size_(size),
      sources_(std::move(sources)),
      settings_(settings),
      max_write_bytes_(smallest_write_limit(sources_)),
      inbox_(attach_again(inbox_fd)),
      mirror_(Arena::create(size)),
      queue_pair_(sources_.front().device, depth()),
      inbox_memory_(queue_pair_.register_memory(base_of(inbox_), num_bytes_of(inbox_))),
      mirror_memory_(queue_pair_.register_memory(base_of(mirror_), num_bytes_of(mirror_))),
      written_(size.num_slots),
      released_(size.num_slots) {
    sources_.resize(std::min(sources_.size(), kMaxSources));
    for (std::size_t word = 0; word < inbox_.num_released_words(); ++word) {
        inbox_.released(word).store(0);  // the peer's mirror also starts with all slots free
    }
}

/// Room for a piece and a credit for each slot, and for a probe; see the class comment.
QueuePair::Depth RdmaChannel::depth() const noexcept {
    const std::uint32_t per_piece = writes_for(size_.slot_bytes, max_write_bytes_) + 1;
    return {size_.num_slots * (per_piece + 1) + 1, size_.num_slots * 2};
}

RdmaChannel::Offer RdmaChannel::make_offer() const {
    Offer offer{};
    std::memcpy(offer.magic, kMagic, sizeof(kMagic));
    offer.slot_bytes = size_.slot_bytes;
    offer.num_slots = size_.num_slots;
    offer.base = reinterpret_cast<std::uint64_t>(base_of(inbox_));
    offer.key = inbox_memory_->rkey;
    offer.qp_number = queue_pair_.number();
    offer.first_psn = queue_pair_.first_psn();
    offer.num_sources = static_cast<std::uint32_t>(sources_.size());
    for (std::size_t i = 0; i < sources_.size(); ++i) {
        const RdmaSource& source = sources_[i];
        std::copy(source.gid.bytes.begin(), source.gid.bytes.end(), offer.sources[i].gid);
        offer.sources[i].lid = source.lid;
        offer.sources[i].link_layer = source.link_layer;
        offer.sources[i].mtu = static_cast<std::uint8_t>(source.mtu);
    }
    return offer;
}

void RdmaChannel::accept_offer(const Offer& offer) {
    if (std::memcmp(offer.magic, kMagic, sizeof(kMagic)) != 0 || offer.num_sources > kMaxSources) {
        throw RdmaError(peer_ + " did not send an RDMA address",
                        "install the same megatron_ext on all ranks");
    }
    if (offer.num_slots != size_.num_slots || offer.slot_bytes != size_.slot_bytes) {
        throw RdmaError(peer_ + " has " + std::to_string(offer.num_slots) + " slots of " +
                            std::to_string(offer.slot_bytes) + " bytes, but this process has " +
                            std::to_string(size_.num_slots) + " of " +
                            std::to_string(size_.slot_bytes),
                        "give all ranks the same flags");
    }
    remote_base_ = offer.base;
    remote_key_ = offer.key;
}

/// The indices of a local and a remote source that may reach each other, best first. Both ends try
/// the same ones in the same order.
std::vector<std::pair<std::size_t, std::size_t>> RdmaChannel::candidates(const Offer& peer_offer,
                                                                         bool is_first) const {
    std::vector<std::pair<std::size_t, std::size_t>> reachable;
    for (std::size_t i = 0; i < sources_.size(); ++i) {
        for (std::size_t j = 0; j < peer_offer.num_sources; ++j) {
            if (sources_[i].link_layer == peer_offer.sources[j].link_layer &&
                sources_[i].gid.kind() == peer_offer.target(j).gid.kind()) {
                reachable.emplace_back(i, j);
            }
        }
    }
    const auto rank = [&](const std::pair<std::size_t, std::size_t>& indices) {
        return std::pair(indices.first + indices.second, is_first ? indices.first : indices.second);
    };
    std::sort(reachable.begin(), reachable.end(),
              [&](const auto& left, const auto& right) { return rank(left) < rank(right); });
    return reachable;
}

Arena RdmaChannel::outbox_arena() const { return attach_again(mirror_.fd()); }

void RdmaChannel::connect(const Exchange& exchange, bool is_first, Deadline deadline,
                          InterruptCheck check) {
    const Offer own_offer = make_offer();
    const std::string answer =
        exchange(std::string(reinterpret_cast<const char*>(&own_offer), sizeof(own_offer)));
    Offer peer_offer{};
    std::memcpy(&peer_offer, answer.data(), std::min(answer.size(), sizeof(peer_offer)));
    accept_offer(peer_offer);

    std::string failures;
    for (const auto& [i, j] : candidates(peer_offer, is_first)) {
        // Make sure that both ends are ready to receive before either writes.
        std::string failure =
            try_together(exchange, peer_, [&] { queue_pair_.begin(sources_[i]); });
        if (failure.empty()) {
            failure = try_together(exchange, peer_,
                                   [&] { queue_pair_.connect(peer_offer.target(j), settings_); });
        }
        if (failure.empty()) {
            failure = try_together(exchange, peer_, [&] { write_packet(deadline, check); });
        }
        if (failure.empty()) {
            return;
        }
        failures += "; " + failure;
    }
    throw RdmaError("no RDMA connection to " + peer_ +
                        (failures.empty() ? ": the two hosts have no kind of GID in common; the "
                                            "first ones are " +
                                                sources_.front().text() + " and " +
                                                peer_offer.target(0).gid.text()
                                          : failures),
                    "set the addresses to use with --node-ips, or a GID with "
                    "MEGATRON_EXT_IB_GID_INDEX");
}

/// Writes one packet into an unused slot of the peer and waits for its completion, which arrives,
/// as a success or a failure, within the retries that the settings allow.
void RdmaChannel::write_packet(Deadline deadline, InterruptCheck check) {
    const auto num_bytes = static_cast<std::uint32_t>(
        std::min<std::uint64_t>({size_.slot_bytes, kLargestPacketBytes, max_write_bytes_}));
    const std::byte* const from = mirror_.bytes(0);
    const auto offset = static_cast<std::uint64_t>(from - base_of(mirror_));
    const verbs::MemoryPiece piece{reinterpret_cast<std::uint64_t>(from), num_bytes,
                                   mirror_memory_->lkey};
    queue_pair_.post_write(label(kProbe, 0), piece, remote_base_ + offset, remote_key_,
                           std::nullopt, true);
    for (;;) {
        queue_pair_.arm();
        if (queue_pair_.poll("an RDMA write to " + peer_)) {
            return;
        }
        if (Clock::now() >= deadline) {
            throw RdmaError("an RDMA write to " + peer_ + " did not complete in time", "");
        }
        pollfd entry{queue_pair_.fd(), POLLIN, 0};
        ::poll(&entry, 1, static_cast<int>(kInterruptPeriod.count()));
        if (check != nullptr) {
            check();
        }
    }
}

void RdmaChannel::receive() {
    std::exception_ptr first_failure;
    // Every failure except one of the queue itself consumes at least one completion.
    for (std::uint32_t outstanding = depth().sends + depth().receives; outstanding > 0;) {
        try {
            const auto completion = queue_pair_.poll("an RDMA write to " + peer_);
            if (!completion) {
                break;
            }
            take(*completion);
        } catch (const RdmaError&) {
            first_failure = first_failure ? first_failure : std::current_exception();
            --outstanding;
        }
    }
    if (first_failure) {
        std::rethrow_exception(first_failure);
    }
}

void RdmaChannel::take(const verbs::WorkCompletion& completion) {
    if (completion.opcode == verbs::kWcReceiveWithImmediate) {
        arrived(ntohl(completion.immediate));  // done first, because post_receive() may throw
        queue_pair_.post_receive();
        return;
    }
    const auto slot = static_cast<std::uint32_t>(completion.id) & ((1U << kKindShift) - 1);
    switch (completion.id >> kKindShift) {
        case kPiece:
            written_[slot] = false;
            --num_in_flight_;
            free_slot_if_done(slot);
            break;
        case kCredit:
            --num_credits_in_flight_;
            break;
        default:
            probe_in_flight_ = false;
    }
}

void RdmaChannel::arrived(std::uint32_t immediate) {
    const std::uint32_t kind = immediate >> kKindShift;
    const std::uint32_t slot = immediate & ((1U << kKindShift) - 1);
    if (kind > kCredit || slot >= size_.num_slots) {
        throw RdmaError(peer_ + " sent the unknown immediate value " + std::to_string(immediate),
                        "install the same megatron_ext on all ranks");
    }
    if (kind == kCredit) {
        released_[slot] = true;
        free_slot_if_done(slot);
        return;
    }
    inbox_.order(next_to_publish_) = slot;
    inbox_.published().store(++next_to_publish_, std::memory_order_release);
}

void RdmaChannel::free_slot_if_done(std::uint32_t slot) {
    if (released_[slot] && !written_[slot]) {
        released_[slot] = false;
        mirror_.released(slot / 64).fetch_or(std::uint64_t{1} << slot % 64);
    }
}

void RdmaChannel::send() {
    while (next_to_write_ != mirror_.published().load(std::memory_order_acquire)) {
        write_piece(mirror_.order(next_to_write_));
        ++next_to_write_;
    }
    return_credits();
}

void RdmaChannel::write_piece(std::uint32_t slot) {
    const auto write = [&](const std::byte* from, std::uint64_t num_bytes, bool is_last) {
        const auto offset = static_cast<std::uint64_t>(from - base_of(mirror_));
        const verbs::MemoryPiece piece{reinterpret_cast<std::uint64_t>(from),
                                       static_cast<std::uint32_t>(num_bytes), mirror_memory_->lkey};
        const auto immediate = is_last ? std::optional(label(kPiece, slot)) : std::nullopt;
        queue_pair_.post_write(label(kPiece, slot), piece, remote_base_ + offset, remote_key_,
                               immediate, is_last);
    };
    const Descriptor& descriptor = mirror_.descriptor(slot);
    for (std::uint64_t done = 0; done < descriptor.piece_bytes; done += max_write_bytes_) {
        const std::uint64_t remaining = descriptor.piece_bytes - done;
        const std::uint64_t num_bytes = std::min<std::uint64_t>(remaining, max_write_bytes_);
        write(mirror_.bytes(slot) + done, num_bytes, false);
    }
    write(reinterpret_cast<const std::byte*>(&descriptor), sizeof(descriptor), true);
    written_[slot] = true;
    ++num_in_flight_;
}

void RdmaChannel::return_credits() {
    inbox_.sender_waits().store(1, std::memory_order_seq_cst);  // before reading `released`
    for (std::size_t word = 0; word < inbox_.num_released_words(); ++word) {
        std::uint64_t bits = inbox_.released(word).exchange(0, std::memory_order_seq_cst);
        for (std::uint32_t bit = 0; bits != 0; ++bit, bits >>= 1) {
            if ((bits & 1) != 0) {
                credits_.push_back(static_cast<std::uint32_t>(word) * 64 + bit);
            }
        }
    }
    while (!credits_.empty() && num_credits_in_flight_ < size_.num_slots) {
        const std::uint32_t about = label(kCredit, credits_.back());
        queue_pair_.post_write(about, {}, remote_base_, remote_key_, about, true);
        credits_.pop_back();
        ++num_credits_in_flight_;
    }
}

void RdmaChannel::probe() {
    if (!probe_in_flight_ && num_in_flight_ == 0 && num_credits_in_flight_ == 0) {
        queue_pair_.post_write(label(kProbe, 0), {}, remote_base_, remote_key_, std::nullopt, true);
        probe_in_flight_ = true;
    }
}

}  // namespace megatron_ext
