"""The planner: chunk layout, memory model, runtime model and search. Pure Python: it never touches a device."""

from protrain.planning.answer import Answer, explain
from protrain.planning.fits import check, evaluate
from protrain.planning.layout import ChunkRecord, Layout, Slot, choose_chunk_elements, pack
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import BlockMode, Plan, block_modes, fingerprint
from protrain.planning.predict import Models
from protrain.planning.search import search
from protrain.planning.sweeps import Comparison, Largest, fastest_batches, largest

__all__ = [
    "Answer",
    "BlockMode",
    "ChunkRecord",
    "Comparison",
    "Largest",
    "Layout",
    "MemoryModel",
    "Models",
    "Plan",
    "Slot",
    "block_modes",
    "check",
    "choose_chunk_elements",
    "evaluate",
    "explain",
    "fastest_batches",
    "fingerprint",
    "largest",
    "pack",
    "search",
]
