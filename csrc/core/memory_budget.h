#pragma once

#include <cstdint>
#include <string>

namespace megatron_ext {

/// How much shared memory this process could allocate now, and which limit applies.
struct MemoryBudget {
    std::uint64_t available_bytes;
    std::string limited_by;  ///< for people, for example "the free memory of this machine"
};

/// The smallest of: RLIMIT_FSIZE (it bounds memfd files too), MemAvailable + SwapFree of the
/// machine, and the memory cgroups (v1 or v2) of this process, with reclaimable page cache counted
/// as free.
///
/// The kernel accepts a memfd that is larger than memory or the cgroup: it fills all there is, then
/// the OOM killer ends some process. This check prevents that. It is a snapshot: processes that
/// allocate at the same time may together exceed what each one saw. Sources that cannot be read set
/// no limit. `root` is put before every path ("" in production, a directory with made-up files in
/// tests).
MemoryBudget shared_memory_budget(const std::string& root = "");

}  // namespace megatron_ext
