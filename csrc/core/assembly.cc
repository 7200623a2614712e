#include "core/assembly.h"

#include <cinttypes>
#include <cstdio>
#include <new>
#include <utility>

#include "core/errors.h"

namespace megatron_ext {
namespace {

/// More than any machine's memory, and small enough that rounding up does not overflow.
constexpr std::uint64_t kMaxMessageBytes = std::uint64_t{1} << 48;

std::string hexadecimal(std::uint64_t number) {
    char text[2 + 16 + 1];
    std::snprintf(text, sizeof(text), "0x%" PRIx64, number);
    return text;
}

}  // namespace

Assembly::Assembly(int source, BufferPool pool) : source_(source), pool_(std::move(pool)) {}

void Assembly::check(const Descriptor& piece, std::uint64_t max_piece_bytes) const {
    if (!is_intact(piece)) {
        throw_damaged("the header of piece " + std::to_string(next_sequence_) +
                      " does not match its checksum");
    }
    if (piece.magic != kDescriptorMagic || piece.sequence != next_sequence_) {
        throw_damaged("piece " + std::to_string(piece.sequence) + " arrived where piece " +
                      std::to_string(next_sequence_) + " was expected");
    }
    const std::uint64_t begin = partial_ ? partial_->have_bytes : 0;
    const bool continues = !partial_ || (partial_->message.info.tag == piece.tag &&
                                         partial_->message.info.num_bytes == piece.total_bytes);
    const bool is_empty = piece.piece_bytes == 0 && piece.total_bytes != 0;
    if (piece.num_dims > kMaxDims || piece.total_bytes > kMaxMessageBytes || is_empty ||
        piece.piece_bytes > max_piece_bytes || !continues || piece.offset_bytes != begin ||
        piece.piece_bytes > piece.total_bytes - begin) {
        throw_damaged("a piece of " + std::to_string(piece.piece_bytes) + " bytes at " +
                      std::to_string(piece.offset_bytes) + " of " +
                      std::to_string(piece.total_bytes) + " does not continue the message");
    }
}

void Assembly::check_bytes(const Descriptor& piece, const std::byte* bytes) const {
    if (piece.has_checksum != 0 &&
        checksum(bytes, static_cast<std::size_t>(piece.piece_bytes)) != piece.checksum) {
        const std::uint64_t end = piece.offset_bytes + piece.piece_bytes;
        throw_damaged("bytes " + std::to_string(piece.offset_bytes) + " to " + std::to_string(end) +
                      " of the " + std::to_string(piece.total_bytes) + " of tag " +
                      hexadecimal(piece.tag) + " do not match their checksum");
    }
}

std::byte* Assembly::place(const Descriptor& piece) {
    if (!partial_) {
        Message message{info_of(piece), nullptr};
        if (piece.total_bytes > 0) {
            message.bytes = memory_for(piece);
        }
        // Set this last: if the allocation fails, no piece may be written to missing memory.
        partial_ = Partial{std::move(message)};
    }
    return piece.piece_bytes == 0 ? nullptr : partial_->message.bytes.get() + piece.offset_bytes;
}

std::shared_ptr<std::byte> Assembly::memory_for(const Descriptor& piece) const {
    try {
        return pool_.take(static_cast<std::size_t>(piece.total_bytes));
    } catch (const std::bad_alloc&) {
        throw TransportError("rank " + std::to_string(source_) + " sends " +
                             std::to_string(piece.total_bytes) + " bytes as tag " +
                             hexadecimal(piece.tag) +
                             ", but this process cannot allocate so many; raise its memory limits, "
                             "or use smaller micro-batches");
    }
}

std::optional<Message> Assembly::finish(const Descriptor& piece) {
    ++next_sequence_;
    partial_->have_bytes += piece.piece_bytes;
    if (partial_->have_bytes != piece.total_bytes) {
        return std::nullopt;
    }
    Message message = std::move(partial_->message);
    partial_.reset();
    return message;
}

void Assembly::throw_damaged(const std::string& what) const {
    throw TransportError("the messages of rank " + std::to_string(source_) +
                         " are damaged: " + what);
}

}  // namespace megatron_ext
