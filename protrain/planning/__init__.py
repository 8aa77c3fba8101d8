"""The planner: chunk layout, memory model, runtime model and search. Pure Python: it never touches a device."""

from protrain.planning.compare import Comparison, compare
from protrain.planning.evaluate import check, evaluate
from protrain.planning.explain.explanation import Explanation, explain
from protrain.planning.frontier import Frontier, frontier
from protrain.planning.largest import Largest, largest
from protrain.planning.layout import ChunkRecord, Layout, Slot, choose_chunk_elements, pack
from protrain.planning.memory.model import MemoryModel
from protrain.planning.plan import BlockMode, Plan, block_modes, fingerprint
from protrain.planning.predict import Prediction, predict
from protrain.planning.runtime.model import RuntimeModel
from protrain.planning.search import search

__all__ = [
    "BlockMode",
    "ChunkRecord",
    "Comparison",
    "Explanation",
    "Frontier",
    "Largest",
    "Layout",
    "MemoryModel",
    "Plan",
    "Prediction",
    "RuntimeModel",
    "Slot",
    "block_modes",
    "check",
    "choose_chunk_elements",
    "compare",
    "evaluate",
    "explain",
    "fingerprint",
    "frontier",
    "largest",
    "pack",
    "predict",
    "search",
]
