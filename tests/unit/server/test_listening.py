"""How the server's connections come to be."""

from __future__ import annotations

import socket

from polymux.server.run import listen
from polymux.server_config import ServerConfig


def test_a_piece_of_an_answer_does_not_wait_for_the_confirmation_of_the_one_before() -> None:
    with listen(ServerConfig(port=0)) as listener:
        with socket.create_connection(listener.getsockname()):
            listener.setblocking(True)
            connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
