#include "core/inbox.h"

#include <algorithm>
#include <cstring>

#include "core/errors.h"

namespace megatron_ext {
namespace {

MessageInfo info_of(const Descriptor& piece) {
    MessageInfo info;
    info.tag = piece.tag;
    info.num_bytes = piece.total_bytes;
    info.dtype_code = piece.dtype_code;
    info.dtype_bits = piece.dtype_bits;
    info.num_dims = piece.num_dims;
    std::copy(std::begin(piece.shape), std::end(piece.shape), info.shape.begin());
    return info;
}

}  // namespace

Inbox::Inbox(int source, ArenaSize size, BufferPool pool)
    : source_(source),
      shared_(std::make_shared<Shared>(Arena::create(size))),
      pool_(std::move(pool)) {}

void Inbox::set_sender_bell(std::shared_ptr<ProcessBell> bell) {
    shared_->sender_bell = std::move(bell);
}

void Inbox::Shared::release(std::uint32_t slot) noexcept {
    if (::getpid() != process) {
        return;
    }
    // The order of the two words here and in Outbox::wants_room() decides that a sender which finds
    // no slot is rung.
    arena.released(slot / 64).fetch_or(std::uint64_t{1} << slot % 64, std::memory_order_seq_cst);
    num_held.fetch_sub(1);
    if (arena.sender_waits().exchange(0, std::memory_order_seq_cst) != 0 && sender_bell) {
        sender_bell->ring();
    }
}

std::optional<Message> Inbox::next() {
    const Arena& arena = shared_->arena;
    while (next_sequence_ != arena.published().load(std::memory_order_acquire)) {
        const std::uint32_t slot = arena.order(next_sequence_);
        const Descriptor piece = check(slot);
        ++next_sequence_;
        shared_->num_held.fetch_add(1);
        if (piece.piece_bytes == piece.total_bytes) {
            return take_whole(slot, piece);
        }
        if (add_piece(slot, piece)) {
            Message message = std::move(partial_->message);
            partial_.reset();
            return message;
        }
    }
    return std::nullopt;
}

/// Copies the descriptor out of shared memory and refuses one that would lead outside of the arena.
Descriptor Inbox::check(std::uint32_t slot) const {
    const ArenaSize size = shared_->arena.size();
    if (slot >= size.num_slots) {
        throw_damaged("it names slot " + std::to_string(slot) + " of " +
                      std::to_string(size.num_slots));
    }
    const Descriptor piece = shared_->arena.descriptor(slot);
    if (piece.magic != kDescriptorMagic || piece.sequence != next_sequence_) {
        throw_damaged("piece " + std::to_string(piece.sequence) + " stands where piece " +
                      std::to_string(next_sequence_) + " was due");
    }
    const std::uint64_t begin = partial_ ? partial_->have_bytes : 0;
    const bool continues = !partial_ || (partial_->message.info.tag == piece.tag &&
                                         partial_->message.info.num_bytes == piece.total_bytes);
    if (piece.num_dims > kMaxDims || piece.piece_bytes > size.slot_bytes || !continues ||
        piece.offset_bytes != begin || piece.piece_bytes > piece.total_bytes - begin) {
        throw_damaged("a piece of " + std::to_string(piece.piece_bytes) + " bytes at " +
                      std::to_string(piece.offset_bytes) + " of " +
                      std::to_string(piece.total_bytes) + " does not continue what came before");
    }
    if (piece.has_checksum != 0 &&
        checksum(shared_->arena.bytes(slot), static_cast<std::size_t>(piece.piece_bytes)) !=
            piece.checksum) {
        throw_damaged("the checksum of piece " + std::to_string(piece.sequence) + " is wrong");
    }
    return piece;
}

Message Inbox::take_whole(std::uint32_t slot, const Descriptor& piece) {
    Message message{info_of(piece), nullptr};
    std::byte* const bytes = shared_->arena.bytes(slot);
    const auto num_bytes = static_cast<std::size_t>(piece.total_bytes);
    if (num_bytes > 0 && num_held() * 2 <= shared_->arena.size().num_slots) {
        message.bytes = {bytes, [shared = shared_, slot](std::byte*) { shared->release(slot); }};
        return message;
    }
    if (num_bytes > 0) {
        message.bytes = pool_.take(num_bytes);
        std::memcpy(message.bytes.get(), bytes, num_bytes);
    }
    shared_->release(slot);
    return message;
}

/// Whether the message is complete with this piece.
bool Inbox::add_piece(std::uint32_t slot, const Descriptor& piece) {
    if (!partial_) {
        const auto num_bytes = static_cast<std::size_t>(piece.total_bytes);
        partial_ = Partial{Message{info_of(piece), pool_.take(num_bytes)}};
    }
    std::memcpy(partial_->message.bytes.get() + piece.offset_bytes, shared_->arena.bytes(slot),
                static_cast<std::size_t>(piece.piece_bytes));
    partial_->have_bytes += piece.piece_bytes;
    shared_->release(slot);
    return partial_->have_bytes == piece.total_bytes;
}

void Inbox::throw_damaged(const std::string& what) const {
    throw TransportError("the messages of rank " + std::to_string(source_) +
                         " are damaged: " + what);
}

}  // namespace megatron_ext
