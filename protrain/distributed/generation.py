"""``generate`` of transformers models on several ranks, where every forward needs all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from protrain.distributed.ranks import Ranks


def generate_together(model: nn.Module, ranks: Ranks) -> None:
    """Let ``generate()`` of ``model``, or of a model inside, call forward until all ranks have all their tokens.

    transformers does so with ``synced_gpus=True``, which is passed now in any case, because Trainer passes False. It
    would ask all processes of the default group whether they are done. Here it asks ``ranks``, with their watcher.
    """
    if not ranks.several:
        return
    found: Iterable[Any] = model.modules()
    for module in found:
        if hasattr(module, "_has_unfinished_sequences"):
            vars(module).update(
                generate=_synced(module.generate),
                _has_unfinished_sequences=functools.partial(_is_any_unfinished, ranks),
            )


def _synced(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def run(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **(kwargs | {"synced_gpus": True}))

    return run


def _is_any_unfinished(ranks: Ranks, this_peer_finished: bool, synced_gpus: bool, device: Any) -> bool:
    if not synced_gpus:
        return not this_peer_finished
    return not all(ranks.all_values(bool(this_peer_finished), "the end of generate()"))
