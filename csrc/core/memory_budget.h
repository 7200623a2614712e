#pragma once

#include <cstdint>
#include <string>

namespace megatron_ext {

/// The amount of shared memory that this process can allocate now, and the limit that applies.
struct MemoryBudget {
    std::uint64_t available_bytes;
    std::string limited_by;  ///< for messages, for example "the free memory of this machine"
};

/// The smallest of: RLIMIT_FSIZE (it bounds memfd files too), MemAvailable + SwapFree of the
/// machine, and the memory cgroups (v1 or v2) of this process, with reclaimable page cache counted
/// as free.
///
/// The kernel accepts a memfd that is larger than the memory or the cgroup: it fills all memory,
/// and then the OOM killer kills a process. This check prevents that. The result is a snapshot:
/// processes that allocate memory at the same time may together exceed the budget that each of them
/// has read. Sources that cannot be read set no limit. `root` is a prefix of every path ("" in
/// production, a directory with fake files in tests).
MemoryBudget shared_memory_budget(const std::string& root = "");

}  // namespace megatron_ext
