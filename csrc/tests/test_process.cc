#include "core/process.h"

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

using namespace megatron_ext;

namespace {

TEST(a_process_knows_itself_and_is_not_its_children) {
    const Process parent;
    CHECK(parent.is_this());
    CHECK_EQ(parent.id(), ::getpid());
    const pid_t child = ::fork();
    if (child == 0) {
        const Process own;
        const bool told_apart = !parent.is_this() && own.is_this() && own.id() != parent.id();
        ::_exit(told_apart ? 0 : 1);
    }
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    CHECK(parent.is_this());
}

}  // namespace
