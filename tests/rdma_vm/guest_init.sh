#!/bin/busybox sh
# shellcheck shell=dash
# First process of a virtual machine: makes an RDMA device of software, then runs what the host left
# in the shared folder, within the host's own tree of files (read-only). Ends the machine.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts /host
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
echo "GUEST: has begun"
while read -r module; do
    insmod "/modules/$module" || echo "GUEST: $module does not load"
done </modules.list
for word in $(cat /proc/cmdline); do
    case $word in node=*) node=${word#node=} ;; esac
done

# A cable if the host gave one, else an interface that leads nowhere. Packets that hold the largest
# unit of RDMA need more room than usual.
interface=eth0
[ -e /sys/class/net/eth0 ] || {
    interface=dummy0
    [ -e /sys/class/net/dummy0 ] || ip link add dummy0 type dummy
}
ip link set lo up
ip link set $interface mtu 4200
ip addr add "10.77.0.$((node + 1))/24" dev $interface
ip link set $interface up

echo "GUEST: has a network"
options=trans=virtio,version=9p2000.L,msize=1048576
mount -t 9p -o $options,cache=loose,ro host /host
mount -t 9p -o $options,cache=none share /host/mnt
for folder in proc sys dev; do mount --bind /$folder /host/$folder; done
mount --bind /dev/shm /host/dev/shm
mount -t tmpfs run /host/run
ulimit -l unlimited
echo "GUEST: runs the script"
chroot /host /bin/bash -c "export PATH=/usr/sbin:/usr/bin:/sbin:/bin
    rdma link add rxe0 type rxe netdev $interface && exec bash /mnt/run.sh" \
    >"/host/mnt/node$node.log" 2>&1
echo $? >"/host/mnt/node$node.status"
sync
poweroff -f
