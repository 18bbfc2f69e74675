"""What is said when an endpoint cannot be bound."""

import errno

from kvbridge.control.sockets import bind_error
from kvbridge.core.errors import ConflictError


def test_a_failed_bind_says_what_to_do():
    assert isinstance(bind_error("tcp://127.0.0.1:1", errno.EADDRINUSE, "x"), ConflictError)
    assert "127.0.0.1:1 is taken; stop" in str(bind_error("tcp://127.0.0.1:1", errno.EADDRINUSE, "x"))
    assert "no such address" in str(bind_error("tcp://10.0.0.9:1", errno.EADDRNOTAVAIL, "x"))
    assert "above 1023" in str(bind_error("tcp://127.0.0.1:1", errno.EACCES, "x"))
    assert "odd" in str(bind_error("tcp://127.0.0.1:1", errno.EIO, "odd"))
