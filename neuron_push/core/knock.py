"""Whether a process still listens at an address, asked of the kernel on the other side."""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import time

PATIENCE_S = 1.0


class Knock:
    """A connection attempt that nobody has to answer but the other host's kernel.

    A kernel that refuses says that the process is gone, and with it all its connections. No
    answer says nothing: the process may be stopped, its host or the network down. Names are
    not looked up, since that may take long: an address given as one gets no answer.
    """

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self._end_s = time.monotonic() + PATIENCE_S
        try:
            ip = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        except ValueError:
            self._end_s = 0.0
            ip = ipaddress.ip_address("127.0.0.1")
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self._error = errno.EINPROGRESS
        if self._end_s:
            self._error = self.socket.connect_ex((str(ip), port))

    def is_refused(self, now_s: float) -> bool | None:
        """None while it is not known; then the socket is of no more use."""
        if self._error == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(self.socket, select.POLLOUT)
            if not poll.poll(0):
                return None if now_s < self._end_s else False
            self._error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return self._error == errno.ECONNREFUSED
