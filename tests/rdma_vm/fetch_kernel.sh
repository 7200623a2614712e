#!/usr/bin/env bash
# Puts a kernel with software RoCE, and its modules, into the folder of the argument (by default the
# one in which tests look). Debian's package is only unpacked: nothing is installed, no root is needed.
set -euo pipefail

into=${1:-${MEGATRON_EXT_VM_KERNEL:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_ext/vm-kernel}}
[[ ! -e $into/version ]] || exit 0

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

# The package of all drivers: the one for clouds leaves rxe out.
package=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\)/\1/p' | head -n 1)
[[ -n $package ]] || {
    echo "fetch_kernel.sh: apt knows no linux-image-amd64; on Debian, run apt-get update" >&2
    exit 2
}
apt-get download "$package"
dpkg -x "$package"_*.deb tree
version=$(basename tree/boot/vmlinuz-*)
version=${version#vmlinuz-}
[[ -d tree/lib ]] || ln -s usr/lib tree/lib
PATH=$PATH:/sbin:/usr/sbin depmod -b tree "$version"

# Only what can become part of a virtual machine.
mkdir -p "$into/lib/modules/$version/kernel"
cp "tree/boot/vmlinuz-$version" "$into/vmlinuz"
cp "tree/lib/modules/$version"/modules.* "$into/lib/modules/$version/"
for part in arch crypto lib net drivers/block drivers/infiniband drivers/net/dummy.ko* \
    drivers/net/virtio_net.ko* drivers/net/net_failover.ko* drivers/virtio fs/9p fs/fscache fs/netfs; do
    for path in "tree/lib/modules/$version/kernel"/$part; do
        [[ -e $path ]] || continue
        relative=${path#"tree/lib/modules/$version/"}
        mkdir -p "$into/lib/modules/$version/$(dirname "$relative")"
        cp -r "$path" "$into/lib/modules/$version/$relative"
    done
done
echo "$version" >"$into/version"
echo "fetch_kernel.sh: kernel $version in $into"
