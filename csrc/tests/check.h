#pragma once

// A test program is a list of TEST blocks and this header, which has main(). A failed CHECK prints
// its location and ends the process with status 1, including in a forked child; ctest reports the
// program.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace megatron_ext::testing {

struct TestCase {
    const char* name;
    void (*run)();
};

inline std::vector<TestCase>& test_cases() {
    static std::vector<TestCase> cases;
    return cases;
}

struct Registration {
    Registration(const char* name, void (*run)()) { test_cases().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
    std::_Exit(1);
}

/// Runs `run` in a forked child that exits with status 0 if it returns. Returns its process id.
template <typename Function>
pid_t fork_child(Function run) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid != 0) {
        return pid;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // the child ends if the test is stopped
    try {
        run();
    } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, std::string("child ended by ") + error.what());
    }
    std::_Exit(0);
}

/// The wait status of a child, from waitpid(); 0 means success.
inline int join_child(pid_t pid) {
    int status = -1;
    return ::waitpid(pid, &status, 0) == pid ? status : -1;
}

}  // namespace megatron_ext::testing

#define TEST(name)                                                                   \
    static void name();                                                              \
    static const megatron_ext::testing::Registration name##_registered(#name, name); \
    static void name()

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            megatron_ext::testing::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
        }                                                                             \
    } while (false)

#define CHECK_EQ(left, right)                                                                \
    do {                                                                                     \
        const auto left_value = (left);                                                      \
        const auto right_value = (right);                                                    \
        if (!(left_value == right_value)) {                                                  \
            megatron_ext::testing::fail(                                                     \
                __FILE__, __LINE__,                                                          \
                "CHECK_EQ(" #left ", " #right "): " + std::to_string(left_value) + " and " + \
                    std::to_string(right_value));                                            \
        }                                                                                    \
    } while (false)

// Checks that the expression throws Type with a text that contains `part`.
#define CHECK_THROWS(expression, Type, part)                                                 \
    do {                                                                                     \
        std::string thrown_text = "nothing";                                                 \
        try {                                                                                \
            (void)(expression);                                                              \
        } catch (const Type& error) {                                                        \
            thrown_text = std::string(#Type ": ") + error.what();                            \
        }                                                                                    \
        if (thrown_text == "nothing" || thrown_text.find(part) == std::string::npos) {       \
            megatron_ext::testing::fail(__FILE__, __LINE__,                                  \
                                        #expression " threw " + thrown_text +                \
                                            ", expected " #Type " with \"" + (part) + "\""); \
        }                                                                                    \
    } while (false)

int main() {
    for (const auto& test : megatron_ext::testing::test_cases()) {
        std::printf("%s\n", test.name);
        std::fflush(stdout);  // so that ctest shows which test a program hangs in
        try {
            test.run();
        } catch (const std::exception& error) {
            megatron_ext::testing::fail(test.name, 0, std::string("ended by ") + error.what());
        }
    }
    return 0;
}
