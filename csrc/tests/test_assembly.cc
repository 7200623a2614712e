#include <cstdint>

#include "check.h"
#include "core/assembly.h"
#include "core/errors.h"

using namespace megatron_ext;

// A message that is larger than any memory must cause an allocation error, even under a sanitizer.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

TEST(a_message_for_which_there_is_no_memory_names_its_source_and_size) {
    constexpr std::uint64_t kBytes = std::uint64_t{1} << 47;
    MessageInfo info;
    info.tag = 0x21;
    info.num_bytes = kBytes;
    const std::byte first_bytes[64] = {};
    const Descriptor piece = describe_piece(info, 0, 0, sizeof(first_bytes), first_bytes, false);
    Assembly assembly(7, BufferPool());
    for (int attempt = 0; attempt < 2; ++attempt) {  // the first attempt leaves no partial message
        assembly.check(piece, sizeof(first_bytes));
        CHECK_THROWS(assembly.place(piece), TransportError,
                     "rank 7 sends 140737488355328 bytes as tag 0x21");
    }
}
