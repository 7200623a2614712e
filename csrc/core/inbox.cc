#include "core/inbox.h"

#include <cstring>

#include "core/errors.h"

namespace megatron_ext {

Inbox::Inbox(int source, ArenaSize size, BufferPool pool)
    : source_(source),
      shared_(std::make_shared<Shared>(Arena::create(size))),
      assembly_(source, std::move(pool)) {}

void Inbox::set_sender_bell(std::shared_ptr<ProcessBell> bell) {
    shared_->sender_bell = std::move(bell);
}

void Inbox::Shared::release(std::uint32_t slot) noexcept {
    if (!process.is_this()) {
        return;
    }
    // This order of the two words, and the reverse order in Outbox::wants_room(), guarantee that a
    // sender without a free slot is rung.
    arena.released(slot / 64).fetch_or(std::uint64_t{1} << slot % 64, std::memory_order_seq_cst);
    num_held.fetch_sub(1);
    if (arena.sender_waits().exchange(0, std::memory_order_seq_cst) != 0 && sender_bell) {
        sender_bell->ring();
    }
}

std::optional<Message> Inbox::next() {
    const Arena& arena = shared_->arena;
    while (assembly_.next_sequence() != arena.published().load(std::memory_order_acquire)) {
        const std::uint32_t slot = arena.order(assembly_.next_sequence());
        const Descriptor piece = check(slot);
        shared_->num_held.fetch_add(1);
        if (piece.piece_bytes == piece.total_bytes) {
            return take_whole(slot, piece);
        }
        if (std::optional<Message> message = add_piece(slot, piece)) {
            return message;
        }
    }
    return std::nullopt;
}

/// Copies the descriptor out of shared memory. Throws TransportError if it exceeds the arena.
Descriptor Inbox::check(std::uint32_t slot) const {
    const ArenaSize size = shared_->arena.size();
    if (slot >= size.num_slots) {
        throw TransportError("the messages of rank " + std::to_string(source_) +
                             " are damaged: a message names slot " + std::to_string(slot) + " of " +
                             std::to_string(size.num_slots));
    }
    const Descriptor piece = shared_->arena.descriptor(slot);
    assembly_.check(piece, size.slot_bytes);
    assembly_.check_bytes(piece, shared_->arena.bytes(slot));
    return piece;
}

Message Inbox::take_whole(std::uint32_t slot, const Descriptor& piece) {
    assembly_.skip();
    Message message{info_of(piece), nullptr};
    std::byte* const bytes = shared_->arena.bytes(slot);
    const auto num_bytes = static_cast<std::size_t>(piece.total_bytes);
    if (num_bytes > 0 && num_held() * 2 <= shared_->arena.size().num_slots) {
        message.bytes = {bytes, [shared = shared_, slot](std::byte*) { shared->release(slot); }};
        return message;
    }
    if (num_bytes > 0) {
        message.bytes = assembly_.memory_for(piece);
        std::memcpy(message.bytes.get(), bytes, num_bytes);
    }
    shared_->release(slot);
    return message;
}

std::optional<Message> Inbox::add_piece(std::uint32_t slot, const Descriptor& piece) {
    std::memcpy(assembly_.place(piece), shared_->arena.bytes(slot),
                static_cast<std::size_t>(piece.piece_bytes));
    shared_->release(slot);
    return assembly_.finish(piece);
}

}  // namespace megatron_ext
