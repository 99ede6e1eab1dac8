"""The address at which a rank listens for the others, and that at which they reach it."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
from pathlib import Path

from gmeta.core.errors import ConfigError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_IPV6 = Path("/proc/net/if_inet6")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def name_machine() -> tuple[str, str]:
    """Name this machine: two processes with equal names share it."""
    return platform.node(), _BOOT.read_text().strip() if _BOOT.exists() else ""


def name_loopback() -> tuple[str, ...]:
    """Name what has this process's loopback address: a machine, or one of the containers on it."""
    return (*name_machine(), str(_NETWORK.readlink()) if _NETWORK.exists() else "")


def choose_addresses(local: bool) -> tuple[str, str]:
    """Choose the address to listen at, and the one to tell.

    Args:
      local: Whether all ranks have the same loopback address.

    Raises:
      ConfigError: ``HOROVOD_GLOO_IFACE`` names an interface without an address.
    """
    if local:
        return "127.0.0.1", "127.0.0.1"
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if not interface:
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0", platform.node()
    address = _ipv4(interface) or _ipv6(interface)
    if address is None:
        raise ConfigError(
            f"HOROVOD_GLOO_IFACE={interface!r} on {platform.node()} has no address: name an interface that "
            "has one, or set GMETA_LANE=horovod"
        )
    return address, address


def _ipv4(interface: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6(interface: str) -> str | None:
    """Return an address of an interface that other machines can use without naming their own interface."""
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope != "20":  # 20: of the link alone
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None
