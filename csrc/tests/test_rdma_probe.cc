// The probe on the fake library, with each of its steps made to fail.

#include "rdma/probe.h"

#include <cerrno>

#include "rdma/devices.h"
#include "rdma/verbs_abi.h"
#include "check.h"
#include "fake_rdma.h"

using namespace megatron_ext;           // NOLINT
using namespace megatron_ext::testing;  // NOLINT

namespace {

/// Checks that the probe ends in `step` with a text that contains `part`.
void check_ends(const std::string& step, const std::string& part, const std::string& address = "") {
    const FakeSysfs sysfs;
    const auto findings = probe_rdma(address, sysfs.path());
    const RdmaFinding& last = findings.back();
    const std::string text = last.text + " | " + last.remedy;
    if (last.step != step || last.is_good || text.find(part) == std::string::npos) {
        fail(__FILE__, __LINE__,
             "expected " + step + ": " + part + ", got " + last.step + ": " + text);
    }
    for (std::size_t i = 0; i + 1 < findings.size(); ++i) {
        CHECK(findings[i].is_good);
    }
    CHECK_EQ(num_fake_objects(), 0);
}

}  // namespace

TEST(a_working_device_passes_every_step) {
    use_fake_verbs();
    const FakeSysfs sysfs;
    const auto findings = probe_rdma("", sysfs.path());
    CHECK_EQ(findings.size(), std::size_t{5});
    for (const RdmaFinding& finding : findings) {
        CHECK(finding.is_good && finding.remedy.empty());
    }
    CHECK(findings[2].text == "fake0 port 1 GID 1 (::ffff:10.77.0.1), MTU 1024");
    CHECK_EQ(num_fake_objects(), 0);
}

TEST(devices_are_listed_with_their_gids) {
    const FakeSysfs sysfs;
    const auto devices = list_devices(sysfs.path());
    CHECK_EQ(devices.size(), std::size_t{1});
    const RdmaPort& port = devices[0].ports.at(0);
    CHECK_EQ(port.gids.size(), std::size_t{4});  // one entry is empty
    CHECK_EQ(port.gids[2].index, 3);
    CHECK(port.gids[2].gid.text() == "2001:db8::1");
    CHECK(port.gids[3].net_device == "docker0" && port.gids[3].type == "RoCE v2");
    CHECK_EQ(mtu_bytes(port.active_mtu), 1024);
}

TEST(a_missing_library_is_told_with_its_package) {
    ::setenv("MEGATRON_EXT_IBVERBS_LIB", "/nonexistent/libibverbs.so", 1);
    check_ends("library", "/nonexistent/libibverbs.so: cannot open");
    check_ends("library", "apt-get install libibverbs1");
    use_fake_verbs();
}

TEST(a_library_of_another_kind_is_refused) {
    ::setenv("MEGATRON_EXT_IBVERBS_LIB", "libc.so.6", 1);
    check_ends("library", "libc.so.6 has no function ibv_fork_init");
    use_fake_verbs();
}

TEST(a_host_without_devices_is_told) {
    const Faults faults("no_device");
    check_ends("devices", "this host has no RDMA device");
}

TEST(a_device_that_may_not_be_opened_names_the_folder) {
    const Faults faults("open=" + std::to_string(EACCES));
    check_ends("port", "fake0 cannot be opened: Permission denied");
    check_ends("port", "--device=/dev/infiniband");
}

TEST(a_port_that_is_down_is_told) {
    const Faults faults("port_down");
    check_ends("port", "fake0 port 1 is down");
}

TEST(an_address_that_no_port_has_is_told_with_those_there_are) {
    check_ends("port", "does not have the address 10.1.2.3", "10.1.2.3");
    check_ends("port", "::ffff:10.77.0.1 (RoCE v2 on eth0)", "10.1.2.3");
}

TEST(too_little_lockable_memory_names_bytes_and_limit) {
    const Faults faults("reg_mr=" + std::to_string(ENOMEM));
    check_ends("memory", "1048576 bytes of memory cannot be registered");
    check_ends("memory", "the limit of locked memory is");
    check_ends("memory", "ulimit -l unlimited");
}

TEST(a_queue_pair_that_does_not_connect_names_both_ends) {
    const Faults faults("rtr=" + std::to_string(EINVAL));
    check_ends("queue pair", "to 1");
    check_ends("queue pair", "GID 1 (::ffff:10.77.0.1)");
    check_ends("queue pair", "cannot be connected: Invalid argument (errno 22)");
    check_ends("queue pair", "MEGATRON_EXT_IB_GID_INDEX");
}
