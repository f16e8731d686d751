"""Messages of the link, round, transfer and hop protocols (protocols/*.md).

A message is a map with its ``type`` and its fields in the order given here. Unknown types, unknown fields,
missing fields that have no default and values of another type are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spheroid_node.wire.codes import MAX_DETAIL, ErrorCode, Reason, Verdict, WireError
from spheroid_node.wire.frames import pack, unpack
from spheroid_node.wire.signing import seal, unseal
from spheroid_node.wire.tensors import CHUNK_BYTES, DIGEST_BYTES

PeerId = Annotated[str, Field(max_length=64)]
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Group = Annotated[str, Field(min_length=1, max_length=32)]
Digest = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Port = Annotated[int, Field(gt=0, lt=65_536)]
Host = Annotated[str, Field(min_length=1, max_length=255)]
Via = Literal["tcp", "libp2p"]
Branch = Annotated[int, Field(ge=0, lt=2**31)]
Position = Annotated[int, Field(ge=0, lt=2**31)]
SessionId = Annotated[bytes, Field(min_length=16, max_length=16)]
Sealed = Annotated[bytes, Field(max_length=65_536)]
"""A signed envelope (wire.signing.seal)."""

MAX_HOPS = 1024
MAX_POSITIONS = 65_536
MAX_DRAFTS = 64
"""Drafts ahead of the last judged byte; caches can be taken back much further."""
MAX_BRANCHES = 64
"""Of a line of drafts."""
MAX_UPDATES_NAMED = 64
"""Updates that a manifest names in full."""
MAX_UPDATES_BESIDE = 1024
"""Accepted updates beyond those, of which a manifest has the beginnings of their digests."""
MAX_UPDATES = MAX_UPDATES_NAMED + MAX_UPDATES_BESIDE
"""Updates that a version can be made of."""
PREFIX_BYTES = 8
"""Of such a digest: two of a thousand are alike once in 10¹³ rounds."""
ChunkHashes = Annotated[bytes, Field(max_length=MAX_POSITIONS * DIGEST_BYTES)]
"""The hashes of all chunks of a payload, one after the other."""


class Message(BaseModel):
    """Base of everything that travels."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def fields(self) -> dict[str, Any]:
        """The message as it goes into msgpack."""
        return self.model_dump(mode="python")

    def pack(self) -> bytes:
        return pack(self.__dict__, default=vars)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raise :class:`WireError` (malformed) for anything but a packed message of this class."""
        return cls.parse(unpack(data))

    @classmethod
    def parse(cls, fields: Any) -> Self:
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            complaint = error.errors()[0]
            where = ".".join(str(part) for part in complaint["loc"])
            raise WireError(ErrorCode.MALFORMED, f"{cls.__name__}: {where}: {complaint['msg']}") from error


class Signed(Message):
    """A message that is always carried in an envelope signed by its author."""

    purpose: ClassVar[str]

    def seal(self, key: Any) -> bytes:
        """Signed envelope; ``key`` is the author's Ed25519 private key."""
        return seal(key, self.purpose, self.pack())

    @classmethod
    def unseal(cls, envelope: bytes) -> tuple[str, Self]:
        """Author (peer id) and message. Raises :class:`WireError` (malformed, not-authentic)."""
        peer, body = unseal(envelope, cls.purpose)
        return peer, cls.unpack(body)


# --- link: the first messages of every connection -------------------------------------------------


class Hello(Message):
    """Server to client. The client signs ``nonce`` to prove its peer id."""

    type: Literal["hello"] = "hello"
    oldest: Count
    newest: Count
    run: RunId
    peer: PeerId
    nonce: Annotated[bytes, Field(min_length=32, max_length=32)]


class Greeting(Message):
    """Client to server: which protocol version and service it wants, and who it is."""

    type: Literal["greeting"] = "greeting"
    version: Count
    run: RunId
    service: Literal["round", "transfer", "hop"]
    peer: PeerId
    signature: Annotated[bytes, Field(max_length=64)]
    """Over server's peer id + nonce, purpose ``greeting``."""


class Welcome(Message):
    """Server to client: the greeting holds; the service's messages follow."""

    type: Literal["welcome"] = "welcome"


class Error(Message):
    """Either side, before it closes the connection, or the session named."""

    type: Literal["error"] = "error"
    code: Annotated[ErrorCode, Field(strict=False)]
    detail: Annotated[str, Field(max_length=MAX_DETAIL)] = ""
    session: SessionId | None = None


# --- round ----------------------------------------------------------------------------------------


class UpdateHeader(Signed):
    """What a worker signs about its update θ_local − θ_base of one group."""

    purpose = "update"

    run: RunId
    group: Group
    round: Count
    base: Count
    base_digest: Digest
    nonce: Annotated[bytes, Field(min_length=16, max_length=16)]
    """Tells two updates of the same content apart: of an author and round only one counts."""
    steps: Count
    tokens: Count
    """Bytes trained on: the weight of the update in the average."""
    norm: Annotated[Finite, Field(ge=0)]
    """L2 norm of the update before compression."""
    dtype: Literal["fp16", "int8", "float32"]
    elements: Count
    digest: Digest
    """Payload digest of the compressed bytes."""


class Update(Message):
    """Worker to aggregator; after ``proceed`` the payload follows as chunks."""

    type: Literal["update"] = "update"
    header: Sealed
    hashes: ChunkHashes
    """Of the payload: the digest in the header proves them, and each proves its chunk."""


class Proceed(Message):
    """Aggregator to worker: the header holds, the payload may follow; otherwise a receipt comes at once."""

    type: Literal["proceed"] = "proceed"
    first: Count = 0
    """The chunk to begin with: those before it came over a connection that broke."""


class Receipt(Signed):
    """The aggregator's signed answer to one update."""

    purpose = "receipt"

    run: RunId
    group: Group
    round: Count
    update: Digest
    verdict: Annotated[Verdict, Field(strict=False)]
    reason: Annotated[Reason, Field(strict=False)] = Reason.NONE


class ReceiptMessage(Message):
    type: Literal["receipt"] = "receipt"
    receipt: Sealed


class UpdateOutcome(Message):
    """One update as a manifest names it."""

    peer: PeerId
    digest: Digest
    tokens: Count
    norm: Annotated[Finite, Field(ge=0)]
    verdict: Annotated[Verdict, Field(strict=False)]
    reason: Annotated[Reason, Field(strict=False)] = Reason.NONE


class Manifest(Signed):
    """The description of a version, signed by the aggregator that wrote it."""

    purpose = "manifest"

    run: RunId
    group: Group
    round: Count
    version: Annotated[Count, Field(gt=0)]
    parent: Digest
    """Parameter digest of version − 1."""
    digest: Digest
    """Parameter digest of this version."""
    elements: Count
    rank: Count
    """Place of the aggregator in the round's ranking, 0 the first."""
    steps: Count
    """Local steps behind this version: the sum over versions of the mean steps of the accepted updates."""
    total: Annotated[Count, Field(gt=0)]
    """Updates behind this version: those that it contains, and those that the versions before it do."""
    updates: Annotated[list[UpdateOutcome], Field(max_length=MAX_UPDATES_NAMED)]
    also: Annotated[bytes, Field(max_length=MAX_UPDATES_BESIDE * PREFIX_BYTES)] = b""
    """Of the accepted updates that are not named, the first PREFIX_BYTES of each digest, ascending."""

    @property
    def accepted(self) -> int:
        """Updates that the version contains."""
        named = sum(update.verdict is Verdict.ACCEPTED for update in self.updates)
        return named + len(self.also) // PREFIX_BYTES

    @property
    def beside(self) -> list[bytes]:
        """The entries of ``also``; the last is short if its length is wrong."""
        return [self.also[start : start + PREFIX_BYTES] for start in range(0, len(self.also), PREFIX_BYTES)]

    def contains(self, digest: bytes) -> bool:
        """Whether the version contains the update with this payload digest."""
        if digest[:PREFIX_BYTES] in self.beside:
            return True
        return any(update.digest == digest and update.verdict is Verdict.ACCEPTED for update in self.updates)


class Ping(Message):
    """Worker to the aggregator that has its update: is it still there?"""

    type: Literal["ping"] = "ping"


class Pong(Message):
    """The answer to a ping."""

    type: Literal["pong"] = "pong"


class ManifestMessage(Message):
    """Aggregator to each worker whose connection is still open, once the version is written."""

    type: Literal["manifest"] = "manifest"
    manifest: Sealed


# --- transfer -------------------------------------------------------------------------------------


class Want(Message):
    """Asks for the description of a version; version −1 is the newest the peer holds."""

    type: Literal["want"] = "want"
    group: Group
    version: Annotated[int, Field(ge=-1, lt=2**63)]


class Listing(Message):
    """What the peer holds: the manifest proves the digest, the digest proves the hashes."""

    type: Literal["listing"] = "listing"
    group: Group
    version: Count
    size: Count
    """Bytes of the float32 payload."""
    hashes: ChunkHashes
    """Empty where the peer has the manifest alone."""
    manifest: Sealed
    """Empty for version 0, which follows from the run's seed."""


class Read(Message):
    type: Literal["read"] = "read"
    group: Group
    version: Count
    index: Count


class Chunk(Message):
    """One chunk of an update or a version."""

    type: Literal["chunk"] = "chunk"
    index: Count
    data: Annotated[bytes, Field(max_length=CHUNK_BYTES)]


# --- hop ------------------------------------------------------------------------------------------


class HopAddress(Message):
    """Where the next hop of a chain listens, and whose key its certificate must hold."""

    peer: PeerId
    host: Host
    port: Port


class Open(Message):
    """Client to hop: start a session that serves exactly these versions."""

    type: Literal["open"] = "open"
    session: SessionId
    block: Count
    block_version: Count
    interface_version: Count
    next: HopAddress | None
    """None at the last hop, which answers the client itself."""
    last: HopAddress | None = None
    """Block 0 of a chain that is to write: the last hop, whose results it reads to know which drafts hold."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    temperature: Annotated[Finite, Field(ge=0, le=100)]
    logits: bool = False
    """Whether results carry the logits of every decided position."""


class Opened(Message):
    type: Literal["opened"] = "opened"
    session: SessionId
    via: Via | None = None
    """How this hop's states travel to the next; None at the last."""


class Attach(Message):
    """Hop to hop: this connection belongs to a session that the client opened there."""

    type: Literal["attach"] = "attach"
    session: SessionId
    role: Literal["states", "results"] = "states"
    """Whether it brings the states of the hop before, or takes the results to block 0."""


class Attached(Message):
    type: Literal["attached"] = "attached"
    session: SessionId


class Step(Message):
    """Client to hop 0: new positions of a sweep. A position below what is cached rolls the caches back."""

    type: Literal["step"] = "step"
    session: SessionId
    position: Position
    """Index of the first new byte in the text."""
    tokens: Annotated[bytes, Field(min_length=1, max_length=MAX_POSITIONS)]
    masked: Annotated[int, Field(ge=0, le=MAX_POSITIONS)] = 0
    """Further positions after ``tokens`` whose bytes are unknown (one-sweep)."""
    decide: Annotated[int, Field(ge=0, le=MAX_POSITIONS)] = 1
    """How many of the last positions of this step the last hop decides the next byte of; 0 has no result."""


class Write(Message):
    """Client to hop 0: write on by itself. Block 0 drafts, the chain judges its drafts, many at a time."""

    type: Literal["write"] = "write"
    session: SessionId
    position: Position
    """Index in the text of the first of ``tokens``. One below what is cached rolls the caches back."""
    tokens: Annotated[bytes, Field(min_length=1, max_length=MAX_POSITIONS)]
    """Known bytes."""
    count: Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
    """How many bytes to write after them."""
    drafts: Annotated[int, Field(ge=0, le=MAX_DRAFTS)] = 0
    """Most drafts ahead of the last judged byte; 0 leaves it to the hop."""
    branches: Annotated[int, Field(ge=0, le=MAX_BRANCHES)] | None = None
    """Branches that a line of drafts gets once it is as long as it may be; None leaves it to the hop."""


class State(Message):
    """Hop to next hop: new positions, with what the blocks so far made of them."""

    type: Literal["state"] = "state"
    session: SessionId
    position: Position
    tokens: Annotated[bytes, Field(min_length=1, max_length=MAX_POSITIONS)]
    masked: Annotated[int, Field(ge=0, le=MAX_POSITIONS)]
    decide: Annotated[int, Field(ge=0, le=MAX_POSITIONS)]
    line: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Number of the line of drafts that this is a part of: they are judged; −1: the tokens are known."""
    branch: Branch = 0
    """Of that line, which the drafts belong to; 0 is its trunk."""
    after: Branch = 0
    """The branch that they go on from: their own, but for the first drafts of a new one."""
    hidden: dict[str, Any]
    """Tensor [n, width]: hidden state of the block before."""
    noisy: dict[str, Any]
    """Tensor [n, width]: z, the running estimate of the target code."""
    log_probs: dict[str, Any] | None
    """Tensor [n, 256]: sum of the log-probabilities so far; None unless the run reads out the mean."""
    seconds: Annotated[list[Finite], Field(max_length=MAX_HOPS)]
    """Compute time of each hop so far."""


class Result(Message):
    """Last hop to client, and to block 0 where it writes: bytes that are decided for good."""

    type: Literal["result"] = "result"
    session: SessionId
    position: Position
    """Index in the text of the first decided byte."""
    tokens: Annotated[bytes, Field(min_length=1, max_length=MAX_POSITIONS)]
    line: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """The line of drafts that this judges; −1: the answer to a step."""
    logits: dict[str, Any] | None
    """Tensor [len(tokens), 256] if the session asked for it."""
    seconds: Annotated[list[Finite], Field(max_length=MAX_HOPS)]


class Close(Message):
    type: Literal["close"] = "close"
    session: SessionId


# --- by type --------------------------------------------------------------------------------------

MESSAGES: dict[str, type[Message]] = {
    kind.model_fields["type"].default: kind
    for kind in (
        Hello, Greeting, Welcome, Error, Update, Proceed, ReceiptMessage, Ping, Pong, ManifestMessage,
        Want, Listing, Read, Chunk, Open, Opened, Attach, Attached, Step, Write,
        State, Result, Close,
    )
}  # fmt: skip


def decode(body: bytes) -> Message:
    """The message in a frame's body. Raises :class:`WireError` (malformed)."""
    fields = unpack(body)
    if not isinstance(fields, dict):
        raise WireError(ErrorCode.MALFORMED, "a message is a map")
    name = fields.get("type")
    if not isinstance(name, str):
        raise WireError(ErrorCode.MALFORMED, "a message has a type, and it is text")
    kind = MESSAGES.get(name)
    if kind is None:
        raise WireError(ErrorCode.MALFORMED, f"unknown message type {name[:32]!r}")
    return kind.parse(fields)
