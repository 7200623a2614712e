# Sourced by run and nightly: what installs Debian packages that are missing, if this user may do so.
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1

as_root() {
    if ((EUID == 0)); then
        "$@"
    else
        sudo -n "$@"
    fi
}

install() {
    echo "ci: installs $*"
    as_root apt-get update -qq && as_root apt-get install -y -qq --no-install-recommends "$@"
}

has() {
    PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null
}
