#include "core/outbox.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace megatron_ext {

Outbox::Outbox(Arena arena, std::shared_ptr<ProcessBell> bell, bool checksums)
    : arena_(std::make_shared<const Arena>(std::move(arena))),
      bell_(std::move(bell)),
      checksums_(checksums) {
    free_slots_.reserve(arena_->size().num_slots);
}

void Outbox::send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
                  LinkEvents& events) {
    queue_.push_back({info, static_cast<const std::byte*>(bytes), std::move(owner), 0, {}});
    push(events);
}

std::shared_ptr<std::byte> Outbox::reserve(std::uint64_t num_bytes) {
    const ArenaSize size = arena_->size();
    // The receiver keeps up to half of the slots (Inbox), and one must remain for the queue.
    const std::uint32_t max_reserved = (size.num_slots - 1) / 2;
    if (num_bytes == 0 || num_bytes > size.slot_bytes || !queue_.empty() ||
        reserved_.size() >= max_reserved || !find_free_slots()) {
        return nullptr;
    }
    reserved_.push_back(take_free_slot());
    return {arena_, arena_->bytes(reserved_.back())};
}

void Outbox::publish(Message message, LinkEvents& events) {
    const auto position = std::find_if(reserved_.begin(), reserved_.end(), [&](std::uint32_t slot) {
        return arena_->bytes(slot) == message.bytes.get();
    });
    if (position == reserved_.end()) {
        throw std::invalid_argument(
            "a message can be published only once, from memory reserved for it");
    }
    const std::uint32_t slot = *position;
    reserved_.erase(position);
    const std::byte* const bytes = message.bytes.get();
    queue_.push_back({message.info, bytes, std::move(message.bytes), 0, slot});
    push(events);
}

void Outbox::drop_queued(LinkEvents& events) {
    for (Pending& pending : queue_) {
        events.sent(std::move(pending.owner));
    }
    queue_.clear();
}

void Outbox::push(LinkEvents& events) {
    while (!queue_.empty() && (queue_.front().slot || find_free_slots() || wants_room())) {
        Pending& pending = queue_.front();
        publish_piece(pending);
        if (pending.sent_bytes == pending.info.num_bytes) {
            events.sent(std::move(pending.owner));
            queue_.pop_front();
        }
    }
}

/// Collects released slots; returns whether a slot is free. Released slots go on top and are used
/// next, because their memory is still in the caches.
bool Outbox::find_free_slots() {
    for (std::size_t word = 0; word < arena_->num_released_words(); ++word) {
        if (arena_->released(word).load(std::memory_order_seq_cst) == 0) {
            continue;
        }
        std::uint64_t bits = arena_->released(word).exchange(0, std::memory_order_seq_cst);
        for (std::uint32_t bit = 0; bits != 0; ++bit, bits >>= 1) {
            const auto slot = static_cast<std::uint32_t>(word) * 64 + bit;
            if ((bits & 1) != 0 && slot < arena_->size().num_slots) {
                free_slots_.push_back(slot);
            }
        }
    }
    return !free_slots_.empty();
}

/// Asks the receiver to ring at its next release, then checks again for a release in between.
/// Returns whether a slot is free.
bool Outbox::wants_room() {
    arena_->sender_waits().store(1, std::memory_order_seq_cst);
    return find_free_slots();
}

std::uint32_t Outbox::take_free_slot() {
    const std::uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
}

void Outbox::publish_piece(Pending& pending) {
    const std::uint32_t slot = pending.slot ? *pending.slot : take_free_slot();
    const MessageInfo& info = pending.info;
    const std::uint64_t num_bytes =
        std::min(arena_->size().slot_bytes, info.num_bytes - pending.sent_bytes);
    const std::byte* const from = pending.bytes + pending.sent_bytes;
    if (num_bytes > 0 && !pending.slot) {
        std::memcpy(arena_->bytes(slot), from, static_cast<std::size_t>(num_bytes));
    }
    arena_->descriptor(slot) =
        describe_piece(info, next_sequence_, pending.sent_bytes, num_bytes, from, checksums_);
    arena_->order(next_sequence_) = slot;
    ++next_sequence_;
    arena_->published().store(next_sequence_, std::memory_order_release);
    pending.sent_bytes += num_bytes;
    bell_->ring();
}

}  // namespace megatron_ext
