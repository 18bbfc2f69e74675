"""Both ends of control conversations over real TCP, and what they are told. Port 0 only, every wait bounded."""

import asyncio

import zmq

from kvbridge.control.link import PeerCallbacks
from kvbridge.control.peers import PeerClient, PeerIdentity, PeerServer
from kvbridge.control.sockets import SocketContext
from kvbridge.core.wire.codec import PEER, Envelope
from kvbridge.core.wire.messages import Drained, Heartbeat

WAIT_S = 20.0
LOOPBACK = "tcp://127.0.0.1:0"
SERVER, CLIENT = "5" * 16, "c" * 16


class Recorder:
    """Callbacks that remember."""

    def __init__(self):
        self.messages, self.undelivered, self.refused, self.resets = [], [], [], []
        self.resent = self.cuts = 0
        self.handler = None
        self._changed = asyncio.Event()
        self.callbacks = PeerCallbacks(
            self._on_message, self._on_undelivered, self._on_refused, self._on_resent, self._on_reset, self._on_cut
        )

    def _note(self, where, what):
        where.append(what)
        self._changed.set()

    def _on_message(self, peer, message):
        self._note(self.messages, (peer, message))
        if self.handler:
            self.handler(peer, message)

    def _on_undelivered(self, peer, message, age_s):
        assert age_s >= 0
        self._note(self.undelivered, (peer, message))

    def _on_refused(self, kind, detail):
        assert detail
        self._note(self.refused, str(kind))

    def _on_resent(self, count):
        self.resent += count

    def _on_cut(self):
        self.cuts += 1
        self._changed.set()

    def _on_reset(self, peer):
        self._note(self.resets, peer)

    @property
    def rooms(self):
        return [message.room for _, message in self.messages if not isinstance(message, Heartbeat)]

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Stage:
    """Makes servers and clients, and closes them all."""

    def __init__(self, stack):
        self.stack = stack
        self.context = SocketContext()
        stack.callback(self.context.close)

    def server(self, incarnation=SERVER, *, keys=None, settings=None, endpoint=LOOPBACK):
        recorder = Recorder()
        server = PeerServer(PeerIdentity(incarnation, keys), recorder.callbacks, endpoint, settings=settings)
        self.stack.callback(server.close)
        return server, recorder, server.endpoint

    def client(self, endpoint, incarnation=CLIENT, *, keys=None, server_key="", settings=None):
        recorder = Recorder()
        client = PeerClient(
            PeerIdentity(incarnation, keys),
            recorder.callbacks,
            endpoint,
            server_key=server_key,
            context=self.context,
            settings=settings,
        )
        self.stack.callback(client.close)
        return client, recorder

    def raw(self, endpoint, **options):
        dealer = self.context.zmq.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(endpoint)
        self.stack.callback(dealer.close)
        return dealer


def drained(room):
    return Drained(room=room, generation=1)


def frame(*, recipient="", link=1, sequence=1, acknowledged=0, body=None):
    return PEER.encode(Envelope(CLIENT, recipient, link, sequence, acknowledged, body))


async def poll(condition, beat=lambda: None):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            beat()
            await asyncio.sleep(0.01)
