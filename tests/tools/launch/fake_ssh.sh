#!/bin/sh
# Stands in for ssh: runs the remote command here, or fails as a host of that name would.
for word in "$@"; do
    host=$remote
    remote=$word
done
case $host in
    password*)
        echo "me@$host: Permission denied (publickey,password)." >&2
        exit 255
        ;;
    gone*)
        echo "ssh: connect to host $host port 22: Connection timed out" >&2
        exit 255
        ;;
    hang*) exec sleep 300 ;;
    dies*) exec timeout 2 sh -c "$remote" ;;
    old*) # torch is older there
        remote=$(printf '%s' "$remote" | sed "s|PYTHONPATH=|PYTHONPATH=$OLD_SITE:|")
        ;;
esac
echo "a login script says hello"
printf "and has no last line: "
exec sh -c "$remote"
