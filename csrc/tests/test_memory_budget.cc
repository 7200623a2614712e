#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "core/memory_budget.h"

using namespace megatron_ext;
namespace fs = std::filesystem;

namespace {

/// A directory of fake /proc and /sys files, which the destructor removes.
class FakeRoot {
  public:
    FakeRoot() {
        char name[] = "/tmp/memory_budget_XXXXXX";
        CHECK(::mkdtemp(name) != nullptr);
        root_ = name;
        write("/proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:   4000 kB\nSwapFree:    96 kB\n");
    }
    ~FakeRoot() { fs::remove_all(root_); }

    void write(const std::string& path, const std::string& text) const {
        fs::create_directories(fs::path(root_ + path).parent_path());
        std::ofstream(root_ + path) << text;
    }
    MemoryBudget budget() const { return shared_memory_budget(root_); }
    bool limited_by(const std::string& path) const {
        return budget().limited_by.rfind("the memory cgroup " + root_ + path + ", where ", 0) == 0;
    }

  private:
    std::string root_;
};

constexpr std::uint64_t kMachineBytes = 4096 * 1024;

}  // namespace

TEST(without_cgroups_the_machine_is_the_limit) {
    const FakeRoot root;
    CHECK_EQ(root.budget().available_bytes, kMachineBytes);
    CHECK(root.budget().limited_by == "the free memory of this machine");
}

TEST(v2_counts_page_cache_as_free) {
    const FakeRoot root;
    root.write("/proc/self/cgroup", "0::/job/step\n");
    root.write("/sys/fs/cgroup/job/step/memory.max", "10000\n");
    root.write("/sys/fs/cgroup/job/step/memory.current", "9000\n");
    root.write("/sys/fs/cgroup/job/step/memory.stat",
               "anon 100\nfile 8000\ninactive_file 300\nactive_file 200\nshmem 7500\n");
    CHECK_EQ(root.budget().available_bytes, 1500U);
    CHECK(root.limited_by("/sys/fs/cgroup/job/step"));
}

TEST(v2_parents_bound_their_children) {
    const FakeRoot root;
    root.write("/proc/self/cgroup", "0::/job/step\n");
    root.write("/sys/fs/cgroup/job/step/memory.max", "max\n");
    root.write("/sys/fs/cgroup/job/step/memory.current", "5\n");
    root.write("/sys/fs/cgroup/job/memory.max", "100\n");
    root.write("/sys/fs/cgroup/job/memory.current", "120\n");
    CHECK_EQ(root.budget().available_bytes, 0U);
    CHECK(root.limited_by("/sys/fs/cgroup/job"));
}

TEST(a_container_sees_its_limit_at_the_mount_point) {
    const FakeRoot root;
    root.write("/proc/self/cgroup", "0::/not/visible/here\n");
    root.write("/sys/fs/cgroup/memory.max", "1000\n");
    root.write("/sys/fs/cgroup/memory.current", "400\n");
    CHECK_EQ(root.budget().available_bytes, 600U);
    CHECK(root.limited_by("/sys/fs/cgroup"));
}

TEST(v1_is_found_among_other_controllers) {
    const FakeRoot root;
    root.write("/proc/self/cgroup", "7:cpu,cpuacct:/x\n4:hugetlb,memory:/job\n0::/\n");
    root.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2000\n");
    root.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1500\n");
    root.write("/sys/fs/cgroup/memory/job/memory.stat",
               "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n");
    CHECK_EQ(root.budget().available_bytes, 650U);
    CHECK(root.limited_by("/sys/fs/cgroup/memory/job"));
}

TEST(malformed_files_set_no_limit) {
    const FakeRoot root;
    root.write("/proc/self/cgroup", "nonsense\n0::relative\n:\n\n");
    root.write("/sys/fs/cgroup/memory.max", "\n");
    CHECK_EQ(root.budget().available_bytes, kMachineBytes);
}

TEST(a_file_size_limit_counts) {
    const pid_t child = megatron_ext::testing::fork_child([] {
        const FakeRoot root;
        const rlimit limit{12345, 12345};
        CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
        CHECK_EQ(root.budget().available_bytes, 12345U);
    });
    CHECK_EQ(megatron_ext::testing::join_child(child), 0);
}

TEST(this_machine_has_memory) {
    const MemoryBudget budget = shared_memory_budget();
    CHECK(budget.available_bytes > 0);
    CHECK(!budget.limited_by.empty());
}
