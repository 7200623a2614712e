#include "core/memory_budget.h"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <system_error>

namespace megatron_ext {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

/// The file names of control groups, the only difference between v1 and v2 that matters here.
struct CgroupNames {
    const char* mount;
    const char* limit_file;
    const char* usage_file;
    const char* inactive_file_key;
    const char* active_file_key;
};
constexpr CgroupNames kV1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                          "total_inactive_file", "total_active_file"};
constexpr CgroupNames kV2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file",
                          "active_file"};

/// Parses the number at the start of a text. Do not use a stream: in a process with PyTorch 2.11 on
/// Ubuntu 24.04, a stream read the "max" of a cgroup without a limit as 0. Without PyTorch, this
/// did not happen.
std::optional<std::uint64_t> number(const std::string& text) {
    std::uint64_t value = 0;
    const auto end = std::from_chars(text.data(), text.data() + text.size(), value);
    return end.ec == std::errc() ? std::optional(value) : std::nullopt;
}

/// The number in a file; std::nullopt if the file is missing or contains something else, such as
/// "max".
std::optional<std::uint64_t> read_number(const std::string& path) {
    std::ifstream file(path);
    std::string word;
    return file >> word ? number(word) : std::nullopt;
}

/// The value of `key` in a file of lines "key value ..."; 0 if it is missing.
std::uint64_t read_field(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string name;
        std::string value;
        if (words >> name >> value && name == key) {
            return number(value).value_or(0);
        }
    }
    return 0;
}

void tighten(MemoryBudget* budget, std::uint64_t available_bytes, const std::string& limited_by) {
    if (available_bytes < budget->available_bytes) {
        *budget = {available_bytes, limited_by};
    }
}

void apply_cgroup(MemoryBudget* budget, const CgroupNames& names, const std::string& directory) {
    const auto limit = read_number(directory + "/" + names.limit_file);
    const auto usage = read_number(directory + "/" + names.usage_file);
    if (!limit || !usage) {
        return;
    }
    const std::string stat = directory + "/memory.stat";
    const std::uint64_t page_cache =
        read_field(stat, names.inactive_file_key) + read_field(stat, names.active_file_key);
    const std::uint64_t in_use = *usage - std::min(*usage, page_cache);
    tighten(budget, *limit - std::min(*limit, in_use),
            "the memory cgroup " + directory + ", where " + std::to_string(in_use) + " of " +
                std::to_string(*limit) + " bytes are in use,");
}

/// Applies the limits of `path` and of all its parents, each of which bounds its subtree.
void apply_cgroup_and_parents(MemoryBudget* budget, const CgroupNames& names,
                              const std::string& root, std::string path) {
    for (;;) {
        apply_cgroup(budget, names, root + names.mount + (path == "/" ? "" : path));
        if (path.empty() || path == "/") {
            return;
        }
        path.erase(path.rfind('/'));
    }
}

/// Lines of /proc/self/cgroup are "0::PATH" (v2) or "ID:CONTROLLER,...:PATH" (v1). In a container,
/// the path may be the host's, which is not visible here; in that case, the container's limit is at
/// the mount point.
void apply_own_cgroups(MemoryBudget* budget, const std::string& root) {
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const auto first = line.find(':');
        const auto second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const std::string path = line.substr(second + 1);
        if (path.empty() || path.front() != '/') {
            continue;
        }
        if (controllers == ",,") {
            apply_cgroup_and_parents(budget, kV2, root, path);
        } else if (controllers.find(",memory,") != std::string::npos) {
            apply_cgroup_and_parents(budget, kV1, root, path);
        }
    }
}

}  // namespace

MemoryBudget shared_memory_budget(const std::string& root) {
    MemoryBudget budget{kUnlimited, "nothing"};
    rlimit file_size{};
    if (::getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY) {
        tighten(&budget, file_size.rlim_cur, "RLIMIT_FSIZE (ulimit -f)");
    }
    const std::string meminfo = root + "/proc/meminfo";
    const std::uint64_t available_kib =
        read_field(meminfo, "MemAvailable:") + read_field(meminfo, "SwapFree:");
    if (available_kib > 0) {
        tighten(&budget, available_kib * 1024, "the free memory of this machine");
    }
    apply_own_cgroups(&budget, root);
    return budget;
}

}  // namespace megatron_ext
