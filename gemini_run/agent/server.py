"""The agent's HTTP server (slots, RPC, watch stream) and the client side of RPC.

The server lives on a thread with its own event loop: it goes on serving while the agent's main thread waits for
workers or for the rendezvous.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import http.client
import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from gemini_run.agent.runtime import PeerNode
from gemini_run.errors import CallerLate, GeminiError, PeerLost, ReplicaCorrupt
from gemini_run.memory.segment import NodeMemory, SlotInfo
from gemini_run.memory.settle import settle_file
from gemini_run.memory.slots import Slot
from gemini_run.plan.health import HEARTBEAT_SECONDS
from gemini_run.terminal import say
from gemini_run.wire import HTTP_GENERATION, HTTP_RPC, HTTP_SLOT, HTTP_WATCH

if TYPE_CHECKING:
    from aiohttp import web

    _Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RpcHandler = Callable[[dict[str, Any]], dict[str, Any]]

#: bytes of the watch stream
BEAT, LEFT, FINISHED = b".", b"L", b"F"

_RPC_BYTES = 16 * 2**20
_RPC_THREADS = 4
_BACKLOG = 128
_CLOSE_SECONDS = 2.0


class AgentServer:
    """Serves one node's memory and RPC calls to its peers, from `start` until `stop`.

    The port is bound (and known) from construction on; calls that arrive before `start` wait.

    Attributes:
        host, port: as bound. The host is "" for all interfaces.
        own_token: made here; callers may always present it. Peers learn it through the rendezvous.
        token: of the run, the same on all its nodes once they have met (`adopt`); accepted as well.
        generation: number of the newest round that this node has begun to form, -1 before. What comes with an older
            one is late and refused.
        finished: set once the job is over for everybody: peers that watch this node then take its end as
            orderly. Otherwise they re-form without it.
    """

    def __init__(self, memory: NodeMemory, run_id: str, *, host: str = "") -> None:
        """Raises: OSError if `host` is no address of this machine."""
        self.own_token = self.token = secrets.token_hex(16)
        self._run_id = run_id
        self.generation = -1
        self.finished = False
        self._memory = memory
        self._handlers: dict[str, RpcHandler] = {}
        self._socket = _listen(host)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._pool = concurrent.futures.ThreadPoolExecutor(_RPC_THREADS, thread_name_prefix="gemini-rpc")
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._farewell = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="gemini-server", daemon=True)
        self._stopped = False

    def rpc(self, name: str, handler: RpcHandler) -> None:
        """Answer POST HTTP_RPC/`name` by `handler` (JSON objects in and out), called on a pool thread.

        A GeminiError that it raises reaches the caller as PeerLost with its message.
        """
        self._handlers[name] = handler

    def start(self) -> None:
        """Begin to answer. Returns at once; aiohttp is imported on the server's own thread."""
        self._thread.start()

    def adopt(self, token: str) -> None:
        """`token` is the run's from now on."""
        self.token = token

    def leave(self) -> None:
        """Tell watchers that this node is going; serve on until `stop`. Idempotent, of any thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._farewell.set)

    def stop(self) -> None:
        """Tell watchers (`finished` says what), stop answering, free the port. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._thread.is_alive():
            self.leave()
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_CLOSE_SECONDS)
        self._socket.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        except Exception as error:  # noqa: BLE001 - the top of a thread: peers will see a silent node, say why
            say(f"the agent's server ended: {type(error).__name__}: {error}; peers can no longer reach this node")
        finally:
            self._loop.close()

    async def _run(self) -> None:
        from aiohttp import web

        def authorised(handler: _Handler) -> _Handler:
            # No middleware: aiohttp keeps the handlers of those, and so this server and all it refers to, for good.
            async def checked(request: web.Request) -> web.StreamResponse:
                given = request.headers.get("Authorization", "").encode(errors="replace")
                accepted = (f"Bearer {token}".encode() for token in (self.token, self.own_token))
                if not any([hmac.compare_digest(given, token) for token in accepted]):
                    raise web.HTTPUnauthorized(text=f"wrong or missing token of run {self._run_id}\n")
                told = request.headers.get(HTTP_GENERATION)
                if told is not None and (not told.isdecimal() or int(told) < self.generation):
                    raise web.HTTPPreconditionFailed(text=f"late: of round {told}, this node is in {self.generation}\n")
                return await handler(request)

            return checked

        application = web.Application(client_max_size=_RPC_BYTES)
        # Digits only: a slot's path is looked up by these two numbers and never built from what was sent.
        slot_route = HTTP_SLOT.format(owner=r"{owner:\d{1,9}}", iteration=r"{iteration:\d{1,18}}")
        application.router.add_get(slot_route, authorised(self._get_slot))
        application.router.add_get(HTTP_WATCH, authorised(self._get_watch))
        application.router.add_post(HTTP_RPC.format(name="{name}"), authorised(self._post_rpc))
        application.router.add_route("*", "/{path:.*}", authorised(self._nothing))
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=_CLOSE_SECONDS / 2)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket, backlog=_BACKLOG).start()
            await self._stopping.wait()
        finally:
            await runner.cleanup()

    async def _nothing(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        raise web.HTTPNotFound

    async def _get_slot(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        owner, iteration = int(request.match_info["owner"]), int(request.match_info["iteration"])
        try:
            info = await self._loop.run_in_executor(self._pool, self._sealed_slot, owner, iteration)
        except ReplicaCorrupt as error:
            raise web.HTTPGone(text=f"{error}\n") from error
        except BlockingIOError as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n", headers={"Retry-After": "1"}) from error
        if info is None:
            raise web.HTTPNotFound(text=f"no complete slot of rank {owner} at iteration {iteration} here\n")
        return web.FileResponse(info.path, chunk_size=2**20)

    def _sealed_slot(self, owner: int, iteration: int) -> SlotInfo | None:
        info = self._memory.find(owner, iteration)
        if info is None or info.header is None or (info.header.sealed and not info.header.borrowed):
            return info
        # Its lock is free only if its writer is dead, or through with it.
        slot = Slot(info.path, writable=True)
        try:
            if not slot.try_lock():
                raise BlockingIOError(f"{info.path}: its writer is not through with it yet")
            settle_file(info.path)
        finally:
            slot.close()
        return self._memory.find(owner, iteration)

    async def _get_watch(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        try:
            while not self._farewell.is_set():
                await response.write(BEAT)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._farewell.wait(), HEARTBEAT_SECONDS)
            await response.write(FINISHED if self.finished else LEFT)
            await response.write_eof()
        except ConnectionError:
            pass  # the watcher is gone; who watches it says so
        return response

    async def _post_rpc(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        name = request.match_info["name"]
        handler = self._handlers.get(name)
        if handler is None:
            raise web.HTTPNotFound(text=f"no call {name!r} here\n")
        try:
            payload = await request.json()
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"not JSON: {error}\n") from error
        if not isinstance(payload, dict):
            raise web.HTTPBadRequest(text="expected a JSON object\n")
        try:
            answer = await self._loop.run_in_executor(self._pool, handler, payload)
        except GeminiError as error:
            raise web.HTTPConflict(text=f"{error}\n") from error
        return web.json_response(answer)


def _listen(host: str) -> socket.socket:
    """A listening-to-be socket on an ephemeral port: of `host`, else of all interfaces, IPv6 as well if it can."""
    if host:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError:
            pass  # compiled in, but switched off on this machine (ipv6.disable=1): IPv4 then
    return socket.create_server(("", 0), backlog=_BACKLOG)


def call(
    peer: PeerNode, name: str, payload: dict[str, Any], token: str, timeout: float = 5.0, *,
    generation: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Call `name` on the agent of `peer`.

    Args:
        timeout: seconds, for connecting and for each read.
        generation: the round that the call is of; None where it is of none.

    Raises:
        CallerLate: the peer has begun a newer round than `generation`.
        PeerLost: no connection, no answer in time, or it answered with an error.
    """
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    if generation is not None:
        headers[HTTP_GENERATION] = str(generation)
    where = f"node {peer.node_id} at {peer.host}:{peer.port}"
    connection = http.client.HTTPConnection(peer.host, peer.port, timeout=timeout)
    try:
        connection.request(
            "POST",
            HTTP_RPC.format(name=name),
            body=json.dumps(payload).encode(),
            headers=headers,
        )
        response = connection.getresponse()
        text = response.read()
        if response.status == http.client.PRECONDITION_FAILED:
            raise CallerLate(f"{where} refused {name!r}: {text.decode(errors='replace').strip()}")
        if response.status != 200:
            raise PeerLost(f"{where} refused {name!r}: {response.status} {text.decode(errors='replace').strip()}")
        answer = json.loads(text)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerLost(f"{where} did not answer {name!r}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise PeerLost(f"{where} answered {name!r} with a {type(answer).__name__}")
    return answer
