"""Connections: to the platform's ports, to addresses of cloud metadata, and to the kernel."""

import errno
import os
import socket

from tests.escapes.attacks.attack import Loot, Targets, attack, claim

VSOCK, ALG, PACKET, NETLINK = 40, 38, 17, 16
WAIT_S = 0.3
UNREACHED = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EPERM, errno.EACCES)


def _talk(family: int, address: object, text: str) -> bytes:
    with socket.socket(family, socket.SOCK_STREAM) as talking:
        talking.settimeout(WAIT_S)
        talking.connect(address)  # type: ignore[arg-type]  # of each family
        talking.sendall(text.encode())
        return talking.recv(4096)


def _connected(family: int, address: object) -> str:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as talking:
            talking.settimeout(WAIT_S)
            talking.connect(address)  # type: ignore[arg-type]  # of each family
            return claim(f"connected to {address}")
    except OSError:
        return ""


@attack()
def loopback(targets: Targets) -> Loot:
    """Connects to the platform's port on 127.0.0.1."""
    return _talk(socket.AF_INET, ("127.0.0.1", targets.tcp), targets.name("loopback"))


@attack()
def loopback_six(targets: Targets) -> Loot:
    """Connects to the platform's port through IPv6 and through mapped addresses."""
    found = b""
    for host in ("::1", "::ffff:127.0.0.1"):
        try:
            found += _talk(socket.AF_INET6, (host, targets.tcp), targets.name("loopback_six"))
        except OSError:
            continue
    return found


@attack()
def other_loopbacks(targets: Targets) -> Loot:
    """Connects to the platform's port through other names of this machine."""
    found = b""
    for host in ("localhost", "0.0.0.0", "127.1.2.3", *targets.addresses):
        try:
            found += _talk(socket.AF_INET, (host, targets.tcp), targets.name("other_loopbacks"))
        except OSError:
            continue
    return found


@attack()
def datagram(targets: Targets) -> Loot:
    """Sends a datagram to a port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        for host in ("127.0.0.1", *targets.addresses):
            sending.sendto(targets.name("datagram").encode(), (host, targets.udp))
    return None


@attack()
def broadcast(targets: Targets) -> Loot:
    """Sends a datagram to everyone in the network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sending.sendto(targets.name("broadcast").encode(), ("127.255.255.255", targets.udp))
    return None


@attack()
def database_socket(targets: Targets) -> Loot:
    """Connects to the database's socket."""
    return _talk(socket.AF_UNIX, targets.socket, targets.name("database_socket"))


@attack()
def abstract_socket(targets: Targets) -> Loot:
    """Connects to an abstract socket, which has no file."""
    return _talk(socket.AF_UNIX, "\0" + targets.abstract, targets.name("abstract_socket"))


@attack(is_safe=False)
def abstract_sockets_of_all(targets: Targets) -> Loot:
    """Connects to every abstract socket that the kernel lists."""
    found = ""
    with open("/proc/net/unix") as file:
        for line in file:
            if "@" in line:
                found += _connected(socket.AF_UNIX, "\0" + line.rpartition("@")[2].strip())
    return found


@attack(is_safe=False)
def port_scan(targets: Targets) -> Loot:
    """Tries the ports of this machine that services use."""
    found = ""
    ports = {22, 80, 111, 443, 2375, 3000, 3128, 5000, 5432, 6379, 8000, 8080, 8420, 9000, 9092}
    for port in sorted(ports - set(targets.own_ports)):
        found += _connected(socket.AF_INET, ("127.0.0.1", port))
    return found


@attack(is_safe=False)
def metadata_service(targets: Targets) -> Loot:
    """Connects to the addresses at which clouds serve credentials."""
    return (
        _connected(socket.AF_INET, ("169.254.169.254", 80))
        + _connected(socket.AF_INET, ("169.254.170.2", 80))
        + _connected(socket.AF_INET, ("100.100.100.200", 80))
        + _connected(socket.AF_INET6, ("fd00:ec2::254", 80))
    )


@attack(is_safe=False)
def internet(targets: Targets) -> Loot:
    """Connects to a documentation address and asks a name server, as an exfiltration would."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        try:
            sending.sendto(b"\0" * 12, ("192.0.2.53", 53))
            return claim("a datagram left for 192.0.2.53")
        except OSError:
            return _connected(socket.AF_INET, ("192.0.2.1", 443))


@attack()
def own_port(targets: Targets) -> Loot:
    """Listens on all addresses. The harness connects from outside."""
    if os.fork() == 0:
        listening = socket.create_server(("0.0.0.0", targets.tcp + 1), reuse_port=True)
        listening.settimeout(2.0)
        try:
            listening.accept()[0].sendall(targets.name("own_port").encode())
        finally:
            os._exit(0)
    return None


@attack()
def own_abstract_socket(targets: Targets) -> Loot:
    """Listens on an abstract socket. The harness connects from outside."""
    if os.fork() == 0:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind("\0" + targets.name("own_abstract_socket"))
        listening.listen()
        listening.settimeout(2.0)
        try:
            listening.accept()[0].sendall(targets.name("own_abstract_socket").encode())
        finally:
            os._exit(0)
    return None


@attack()
def interfaces(targets: Targets) -> Loot:
    """Lists the network interfaces and their addresses."""
    names = [name for _, name in socket.if_nameindex() if not name.startswith(("lo", "tun", "sit"))]
    return claim(f"it sees the interfaces {names}") if names else None


@attack()
def packets(targets: Targets) -> Loot:
    """Listens to all packets of the machine."""
    socket.socket(PACKET, socket.SOCK_RAW, socket.htons(3)).close()
    return claim("a packet socket was opened")


@attack()
def raw_packets(targets: Targets) -> Loot:
    """Sends packets with headers of its own."""
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW).close()
    return claim("a raw socket was opened")


@attack()
def change_routes(targets: Targets) -> Loot:
    """Asks the kernel to add an address to the loopback device, over netlink."""
    import struct

    with socket.socket(NETLINK, socket.SOCK_RAW, 0) as kernel:
        body = struct.pack("=BBBBI", 2, 32, 0, 0, 1) + struct.pack(
            "=HH4s", 8, 2, b"\x7f\x09\x09\x09"
        )
        kernel.send(struct.pack("=IHHII", 16 + len(body), 20, 0x605, 1, 0) + body)
        kernel.settimeout(WAIT_S)
        answer = kernel.recv(4096)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trying:
        trying.bind(("127.9.9.9", 0))
    return claim("it added an address") if answer[16:20] == b"\0\0\0\0" else None


@attack()
def virtual_machine_socket(targets: Targets) -> Loot:
    """Connects to the host of a virtual machine."""
    return _connected(VSOCK, (2, 22)) + _connected(VSOCK, (1, 22))


@attack()
def cipher_socket(targets: Targets) -> Loot:
    """Uses ciphers of the kernel, a source of faults in it."""
    ciphers = socket.socket(ALG, socket.SOCK_SEQPACKET)
    ciphers.bind(("hash", "sha1"))
    return claim("SYSCALL a cipher socket was opened")


@attack()
def kernel_events(targets: Targets) -> Loot:
    """Listens to the events of devices (uevent) and to audit records, over netlink."""
    with socket.socket(NETLINK, socket.SOCK_RAW, 15) as kernel:
        kernel.bind((0, 1))
    with socket.socket(NETLINK, socket.SOCK_RAW, 9) as kernel:
        kernel.bind((0, 1))
    return claim("it listens to audit records")
