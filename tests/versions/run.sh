#!/usr/bin/env bash
# Trains under every feature on every release of the range and prints a table of losses, which have to be
# those of Megatron's own schedule in the same release. A release that cannot be tried fails the run.
#
#   bash tests/versions/run.sh [VERSION...]        by default one of each minor release that has a wheel
#
# VERSION `main` is the tree that MEGATRON_LM_NEXT names, under the version that it says: its wheel is built here.
#
# It makes an environment for each release below VERSIONS_DIR (default: .venv-versions). Releases for the same
# Python share torch and this package, which are installed once.
#
# MEGATRON_LM_PATH_0_19=DIR    upstream's unmodified script of that tree, instead of the wheel's training loop
# PYTHON_FOR_0_19=PATH         the Python to make the environment with, instead of the first that the release
#                              takes, on PATH or among those of pyenv
# PYTHON_0_19=PATH             the Python of an environment that is there already: that megatron-core, torch,
#                              pytest, and this checkout by `pip install -e .` (with a wheel, the tests would find
#                              the checkout without its native module)
# CASES="zb-h1;disaggregation" trains only under these; CASES=none: under none
# TESTS="flags or effects"     of tests/versions, which each release runs too, only these; TESTS=none: none of them
# TESTS_IN="tests/versions tests/patches"   the quick tests of these folders instead
# TORCH_VERSION=2.7.1          another torch
# SKIP="0.17.1"                these are left out on purpose, and the table says so
# LACKING=skip                 so are those that no Python here takes
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/common.sh"
cd "$REPO"
VERSIONS_DIR=$(realpath -m "${VERSIONS_DIR:-.venv-versions}")
# Of the range in megatron_ext/upstream/releases.py.
VERSIONS=("$@")
if [[ ${#VERSIONS[@]} -eq 0 ]]; then
    VERSIONS=(0.16.1 0.17.1 0.18.2 0.19.2)
    [[ -z ${MEGATRON_LM_NEXT:-} ]] || VERSIONS+=(main)
fi

minor_of() { local minor=${1%.*}; printf '%s' "${minor/./_}"; }

# Prints a Python that the release takes.
python_for() {
    local given tried names=(python3.12 python3.13)
    given=PYTHON_FOR_$(minor_of "$1")
    [[ $1 != 0.16.* ]] || names=(python3.11 python3.10 python3.12)
    tried=${!given:-$(pythons "${names[@]}" | paste -sd ' ')}
    (PYTHON3=$tried find_python 2>/dev/null) || fail "$1 has no Python here (tried $tried); name one: $given=PATH"
}

# On PATH, then those that pyenv has and has not activated.
pythons() {
    printf '%s\n' "$@"
    ! command -v pyenv >/dev/null || for name in "$@"; do pyenv whence --path "$name" 2>/dev/null || true; done
}

site_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }

# Sets SHARED to the site-packages of an environment with torch, this package and what it needs, all but
# megatron-core. It is made anew when the native sources or the wanted torch are others.
share() {
    local base=$1 home log wanted PYTHON
    wanted="$TORCH_VERSION $(fingerprint)"
    home=$VERSIONS_DIR/$("$base" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')-torch$TORCH_VERSION
    PYTHON=$home/bin/python log=$home/install.log
    if [[ ! -f $home/.complete || $(<"$home/.complete") != "$wanted" ]]; then
        check_compiler "$base"
        say "makes $home with $base (log: $log)"
        [[ -x $PYTHON ]] || "$base" -m venv "$home"
        : >"$log"
        STEP=0
        "$PYTHON" -c 'import torch' 2>/dev/null || install_torch "$log"
        MEGATRON_EXT_REQUIRE_NATIVE=1 logged "$log" pip_install --editable "${REPO}[upstream]" \
            "torch==$TORCH_VERSION" hypothesis pytest pytest-mock pytest-timeout || installation_failed "$log"
        # Each release brings its own. This one's modules would be found beside them.
        logged "$log" "$PYTHON" -m pip uninstall --yes megatron-core || installation_failed "$log"
        printf '%s' "$wanted" >"$home/.complete"
    fi
    SHARED=$(site_packages "$PYTHON")
}

# Prints the version that the tree of MEGATRON_LM_NEXT says.
next_version() {
    [[ -f ${MEGATRON_LM_NEXT:-}/megatron/core/package_info.py ]] ||
        fail "main is the tree that MEGATRON_LM_NEXT names, and ${MEGATRON_LM_NEXT:-nothing} is none"
    sed -nE 's/^(MAJOR|MINOR|PATCH) = ([0-9]+)$/\2/p' "$MEGATRON_LM_NEXT/megatron/core/package_info.py" | paste -sd .
}

# Installs a release, or the tree of MEGATRON_LM_NEXT.
install_core() {
    local version=$1 tree=$2 copied
    if [[ -z $tree ]]; then
        pip_install --quiet "megatron-core==$version"
        return
    fi
    copied=$(mktemp -d) # a build leaves files in its tree
    cp -r "$tree/." "$copied"
    pip_install --quiet "$copied"
    rm -rf "$copied"
}

# Sets PYTHON to the Python of an environment with this release.
prepare() {
    local version=$1 tree=$2 home=$VERSIONS_DIR/$1 base given SHARED
    given=PYTHON_$(minor_of "$version")
    PYTHON=${!given:-}
    [[ -z $PYTHON ]] || {
        check_release "$version"
        return
    }
    base=$(python_for "$version")
    share "$base"
    [[ -z $tree ]] || home+=-main
    PYTHON=$home/bin/python
    if [[ -n $tree || ! -f $home/.complete || $(<"$home/.complete") != "$SHARED" ]]; then
        say "makes $home with $base"
        rm -rf "$home"
        "$base" -m venv "$home"
        printf 'import site; site.addsitedir("%s")\n' "$SHARED" >"$(site_packages "$PYTHON")/shared.pth"
        install_core "$version" "$tree"
        check_release "$version"
        printf '%s' "$SHARED" >"$home/.complete"
    fi
}

check_release() {
    local found
    found=$("$PYTHON" -c 'from importlib.metadata import version; print(version("megatron-core"))') || found=none
    [[ $found == "$1" ]] || fail "$PYTHON has megatron-core $found, and $1 is to be tried"
}

# Says why this release is not to be tried, if so.
left_out() {
    local given
    given=PYTHON_$(minor_of "$1")
    if [[ " ${SKIP:-} " == *" $1 "* ]]; then
        say "$1 is left out, as SKIP says"
    elif [[ ${LACKING:-} == skip && -z ${!given:-} ]] && ! (python_for "$1") >/dev/null 2>&1; then
        say "$1 is left out: no Python here takes it"
    else
        return 1
    fi
}

# Trains and tests with PYTHON.
try() {
    local version=$1 file=$2 tree status=0
    tree=MEGATRON_LM_PATH_$(minor_of "$version")
    say "$version with $PYTHON, ${!tree:-without a tree}"
    export MEGATRON_LM_PATH=${!tree:-} MEGATRON_EXT_DEVICE=${MEGATRON_EXT_DEVICE:-cpu} OMP_NUM_THREADS=1
    if [[ ${CASES:-} != none ]]; then
        "$PYTHON" -m tests.versions.matrix "$file" ${cases[@]+"${cases[@]}"} || status=1
    fi
    if [[ ${TESTS:-} != none ]]; then
        "$PYTHON" -m pytest -q ${TESTS_IN:+--short --short-s 1.5} ${TESTS_IN:-tests/versions} -k "${TESTS:-}" || status=1
    fi
    return $status
}

main() {
    results=$(mktemp -d)
    trap 'rm -rf "$results"' EXIT
    local version tree file status failed=0 files=()
    cases=()
    [[ -z ${CASES:-} ]] || IFS=';' read -r -a cases <<<"$CASES"
    for version in "${VERSIONS[@]}"; do
        tree=
        if [[ $version == main ]]; then
            version=$(next_version)
            tree=$MEGATRON_LM_NEXT
        fi
        file=$results/$version.json
        files+=("$file")
        if left_out "$version"; then
            printf '{"version": "%s", "skipped": true}\n' "$version" >"$file"
            continue
        fi
        # A subshell of its own, so that what fails in one release does not keep the others from being tried.
        set +e
        (
            set -e
            prepare "$version" "$tree"
            try "$version" "$file"
        )
        status=$?
        set -e
        if ((status != 0)); then
            failed=1
            say "$version FAILED"
            [[ -f $file ]] || printf '{"version": "%s"}\n' "$version" >"$file"
        fi
    done
    [[ ${CASES:-} == none ]] || python3 tests/versions/table.py "${files[@]}" || failed=1
    return $failed
}

main
exit
