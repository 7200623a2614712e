// Choosing a port and GID among fake devices.

#include <cstdlib>

#include "rdma/choice.h"
#include "rdma/errors.h"
#include "rdma/settings.h"
#include "rdma/verbs_abi.h"
#include "check.h"

using namespace megatron_ext;  // NOLINT

namespace {

RdmaPort port(std::vector<GidEntry> gids) {
    return {1, verbs::kPortActive, verbs::kEthernet, 0, 5, 1U << 30, std::move(gids)};
}

GidEntry gid(int index, const char* address, const char* type = "RoCE v2",
             const char* net_device = "eth0") {
    return {index, *gid_of_address(address), type, net_device};
}

/// GIDs as on a usual adapter: each address appears once for each version of RoCE.
RdmaDevice adapter(const std::string& name, const std::string& ipv4) {
    return {name, "", "",
            {port({gid(0, "fe80::1", "IB/RoCE v1"), gid(1, "fe80::1"),
                   gid(2, ipv4.c_str(), "IB/RoCE v1"), gid(3, ipv4.c_str())})}};
}

std::string chosen(const std::vector<RdmaDevice>& devices, const std::string& address = "",
                   unsigned rail = 0, const RdmaSettings& settings = {}) {
    return choose_sources(devices, settings, address, rail).front().text();
}

}  // namespace

TEST(an_ipv4_address_of_roce_v2_is_best) {
    CHECK(chosen({adapter("mlx5_0", "10.0.0.1")}) == "mlx5_0 port 1 GID 3 (::ffff:10.0.0.1)");
}

TEST(other_gids_of_the_port_follow_in_order_of_worth) {
    const RdmaDevice device{
        "rxe0", "", "", {port({gid(0, "fe80::1"), gid(1, "2001:db8::1"), gid(2, "10.0.0.1")})}};
    const auto sources = choose_sources({device}, {}, "", 0);
    CHECK_EQ(sources.size(), std::size_t{3});
    CHECK_EQ(sources[0].gid_index, 2);
    CHECK_EQ(sources[1].gid_index, 1);
    CHECK_EQ(sources[2].gid_index, 0);
}

TEST(an_address_chooses_device_and_gid) {
    const std::vector<RdmaDevice> devices{adapter("mlx5_0", "10.0.0.1"),
                                          adapter("mlx5_1", "10.0.1.1")};
    CHECK(chosen(devices, "10.0.1.1") == "mlx5_1 port 1 GID 3 (::ffff:10.0.1.1)");
    CHECK_THROWS(chosen(devices, "10.0.2.1"), RdmaError, "does not have the address 10.0.2.1");
    CHECK_THROWS(chosen(devices, "10.0.2.1"), RdmaError, "with --node-ips");
    CHECK_THROWS(chosen(devices, "10.0.2.1"), RdmaError, "::ffff:10.0.0.1 (RoCE v2 on eth0)");
    CHECK_THROWS(chosen(devices, "node7"), std::invalid_argument, "got 'node7'");
}

TEST(networks_of_containers_are_left_out) {
    const RdmaDevice device{
        "rxe0", "", "", {port({gid(0, "172.17.0.1", "RoCE v2", "docker0"), gid(1, "10.0.0.1")})}};
    CHECK_EQ(choose_sources({device}, {}, "", 0).size(), std::size_t{1});
    CHECK(chosen({device}) == "rxe0 port 1 GID 1 (::ffff:10.0.0.1)");
    CHECK(chosen({device}, "172.17.0.1") == "rxe0 port 1 GID 0 (::ffff:172.17.0.1)");
}

TEST(rails_deal_out_ports_of_equal_worth) {
    const RdmaDevice poor{"mlx5_0", "", "", {port({gid(0, "fe80::1")})}};
    const std::vector<RdmaDevice> devices{poor, adapter("mlx5_1", "10.0.0.1"),
                                          adapter("mlx5_2", "10.0.1.1")};
    CHECK(chosen(devices, "", 0) == chosen(devices, "", 2));
    CHECK(chosen(devices, "", 0).rfind("mlx5_1", 0) == 0);
    CHECK(chosen(devices, "", 1).rfind("mlx5_2", 0) == 0);
}

TEST(infiniband_needs_no_address) {
    RdmaPort infiniband = port({gid(0, "fe80::2", "IB/RoCE v1", "")});
    infiniband.link_layer = verbs::kInfiniBand;
    infiniband.lid = 7;
    const RdmaDevice device{"mlx4_0", "", "", {infiniband}};
    CHECK_EQ(choose_sources({device}, {}, "", 0).front().lid, 7);
    CHECK_THROWS(chosen({device}, "10.9.9.9"), RdmaError, "does not have the address 10.9.9.9");
}

TEST(settings_overrule) {
    const std::vector<RdmaDevice> devices{adapter("mlx5_0", "10.0.0.1"),
                                          adapter("mlx5_1", "10.0.1.1")};
    ::setenv("MEGATRON_EXT_IB_HCA", "mlx5_7, mlx5_1:1", 1);
    ::setenv("MEGATRON_EXT_IB_GID_INDEX", "1", 1);
    CHECK(chosen(devices, "", 0, RdmaSettings::from_environment()) ==
          "mlx5_1 port 1 GID 1 (fe80::1)");
    ::setenv("MEGATRON_EXT_IB_GID_INDEX", "9", 1);
    CHECK_THROWS(chosen(devices, "", 0, RdmaSettings::from_environment()), RdmaError,
                 "mlx5_0 is not in MEGATRON_EXT_IB_HCA; mlx5_1 port 1 has no GID 9");
    ::unsetenv("MEGATRON_EXT_IB_GID_INDEX");
    ::setenv("MEGATRON_EXT_IB_HCA", "mlx5_1:x", 1);
    CHECK_THROWS(RdmaSettings::from_environment(), std::invalid_argument, "got 'x'");
    ::unsetenv("MEGATRON_EXT_IB_HCA");
    ::setenv("MEGATRON_EXT_IB_RETRY", "7", 1);
    CHECK_THROWS(RdmaSettings::from_environment(), std::invalid_argument,
                 "MEGATRON_EXT_IB_RETRY must be a number from 0 to 6, got '7'");
    ::unsetenv("MEGATRON_EXT_IB_RETRY");
}

TEST(each_port_that_cannot_be_used_has_its_reason) {
    RdmaPort down = port({});
    down.state = verbs::kPortDown;
    const std::vector<RdmaDevice> devices{{"rxe0", "", "", {down}},
                                          {"rxe1", "cannot be opened", "give access", {}}};
    CHECK_THROWS(chosen(devices), RdmaError,
                 "no RDMA port can be used: rxe0 port 1 is down; rxe1 cannot be used: cannot be "
                 "opened; give access");
    CHECK_THROWS(chosen({}), RdmaError, "this host has no RDMA device");
}
