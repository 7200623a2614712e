#include "core/arena.h"

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/errors.h"

namespace megatron_ext {

/// The start of the segment's payload. Words that different processes write are on different cache
/// lines.
struct Arena::Header {
    char magic[8];
    std::uint32_t version;
    std::uint32_t num_slots;
    std::uint64_t slot_bytes;
    alignas(64) std::atomic<std::uint64_t> published;
    alignas(64) std::atomic<std::uint32_t> sender_waits;
    alignas(64) std::atomic<std::uint64_t> released[kMaxSlots / 64];
};

namespace {

constexpr char kMagic[8] = {'M', 'E', 'X', 'T', 'A', 'R', 'E', '\n'};
constexpr std::uint32_t kVersion = 2;
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kHeaderBytes = kPageBytes;
constexpr std::uint64_t kMaxSlotBytes = std::uint64_t{1} << 40;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared with other processes");

std::size_t round_up(std::size_t value, std::size_t step) {
    return (value + step - 1) / step * step;
}

std::size_t descriptors_offset(const ArenaSize& size) {
    return kHeaderBytes + round_up(size.num_slots * sizeof(std::uint32_t), 64);
}

/// Descriptors are 128 bytes apart, so that no two share a cache line.
constexpr std::size_t kDescriptorStride = 128;

std::size_t slots_offset(const ArenaSize& size) {
    return round_up(descriptors_offset(size) + size.num_slots * kDescriptorStride, kPageBytes);
}

std::size_t slot_stride(const ArenaSize& size) {
    return round_up(static_cast<std::size_t>(size.slot_bytes), kPageBytes);
}

std::size_t total_bytes(const ArenaSize& size) {
    return slots_offset(size) + size.num_slots * slot_stride(size);
}

bool possible(const ArenaSize& size) {
    return size.num_slots >= 1 && size.num_slots <= Arena::kMaxSlots && size.slot_bytes >= 1 &&
           size.slot_bytes <= kMaxSlotBytes;
}

}  // namespace

Arena::Arena(Segment segment, ArenaSize size) : segment_(std::move(segment)), size_(size) {}

Arena Arena::create(ArenaSize size) {
    static_assert(sizeof(Header) <= kHeaderBytes && sizeof(Descriptor) <= kDescriptorStride,
                  "part of the protocol");
    if (!possible(size)) {
        throw std::invalid_argument("an arena has 1 to " + std::to_string(kMaxSlots) +
                                    " slots of 1 to " + std::to_string(kMaxSlotBytes) +
                                    " bytes, got " + std::to_string(size.num_slots) + " of " +
                                    std::to_string(size.slot_bytes));
    }
    Arena arena(Segment::create(total_bytes(size)), size);
    auto* header = new (arena.segment_.data()) Header{};
    header->version = kVersion;
    header->num_slots = size.num_slots;
    header->slot_bytes = size.slot_bytes;
    for (std::uint32_t slot = 0; slot < size.num_slots; ++slot) {  // all are free at first
        const std::uint64_t bit = std::uint64_t{1} << slot % 64;
        header->released[slot / 64].fetch_or(bit, std::memory_order_relaxed);
    }
    std::memcpy(header->magic, kMagic, sizeof(kMagic));
    return arena;
}

Arena Arena::attach(UniqueFd fd) {
    Segment segment = Segment::attach(std::move(fd));
    if (segment.size_bytes() < kHeaderBytes) {
        throw TransportError("cannot attach an arena: the segment has only " +
                             std::to_string(segment.size_bytes()) + " bytes");
    }
    const auto* header = static_cast<const Header*>(segment.data());
    const ArenaSize size{header->num_slots, header->slot_bytes};
    if (std::memcmp(header->magic, kMagic, sizeof(kMagic)) != 0 || header->version != kVersion) {
        throw TransportError(
            "cannot attach an arena: the segment holds something else, or an arena of another "
            "version; install the same megatron_ext on all ranks");
    }
    if (!possible(size) || segment.size_bytes() != total_bytes(size)) {
        throw TransportError("cannot attach an arena: " + std::to_string(size.num_slots) +
                             " slots of " + std::to_string(size.slot_bytes) +
                             " bytes do not fill a segment of " +
                             std::to_string(segment.size_bytes()) + " bytes");
    }
    return Arena(std::move(segment), size);
}

std::byte* Arena::at(std::size_t offset) const noexcept {
    return static_cast<std::byte*>(segment_.data()) + offset;
}

Arena::Header& Arena::header() const noexcept { return *static_cast<Header*>(segment_.data()); }

std::atomic<std::uint64_t>& Arena::published() const noexcept { return header().published; }

std::atomic<std::uint32_t>& Arena::sender_waits() const noexcept { return header().sender_waits; }

std::atomic<std::uint64_t>& Arena::released(std::size_t index) const noexcept {
    return header().released[index];
}

std::uint32_t& Arena::order(std::uint64_t sequence) const noexcept {
    const auto index = static_cast<std::size_t>(sequence % size_.num_slots);
    return reinterpret_cast<std::uint32_t*>(at(kHeaderBytes))[index];
}

Descriptor& Arena::descriptor(std::uint32_t slot) const noexcept {
    return *reinterpret_cast<Descriptor*>(at(descriptors_offset(size_) + slot * kDescriptorStride));
}

std::byte* Arena::bytes(std::uint32_t slot) const noexcept {
    return at(slots_offset(size_) + slot * slot_stride(size_));
}

std::size_t Arena::num_slots_bytes() const noexcept {
    return size_.num_slots * slot_stride(size_);
}

}  // namespace megatron_ext
