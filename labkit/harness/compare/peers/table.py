"""The peers by name, and the peer of each side."""

from __future__ import annotations

from labkit.harness.compare.peers.bitsandbytes import BitsAndBytes
from labkit.harness.compare.peers.ctranslate2 import CTranslate2
from labkit.harness.compare.peers.deepspeed import DeepSpeed
from labkit.harness.compare.peers.llama_cpp import LlamaCpp
from labkit.harness.compare.peers.onnxruntime import OnnxRuntime
from labkit.harness.compare.peers.openvino import OpenVino
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.peers.torchao import TorchAo
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (LlamaCpp(), OnnxRuntime(), OpenVino(), CTranslate2(), TorchAo(), BitsAndBytes(), DeepSpeed())
}
PEER_OF_SIDE: dict[str, Peer] = {side: peer for peer in PEERS.values() for side in peer.sides}


def peer_named(name: str) -> Peer:
    """The peer of this name. UserError for an unknown name."""
    if name not in PEERS:
        raise UserError(f"unknown peer {name!r}{did_you_mean(name, PEERS)}; expected one of {', '.join(PEERS)}")
    return PEERS[name]
