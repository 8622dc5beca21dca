"""The whole cache of a running model: global pages and per-sequence slots, allocated once from a layout."""

from __future__ import annotations

import torch

from rorqual.cache.pages import GlobalPages
from rorqual.cache.slots import Slots
from rorqual.config import ModelConfig
from rorqual.errors import CapacityError
from rorqual.layout import KVLayout


class KVCache:
    """`pages` pages of global KV and `slots` slots of private state.

    Raises:
        CapacityError: fewer than one page or slot is asked for.
    """

    def __init__(
        self, config: ModelConfig, layout: KVLayout, *, pages: int, slots: int, device: torch.device | str = "cpu"
    ) -> None:
        if pages < 1 or slots < 1:
            raise CapacityError(f"a cache needs at least 1 page and 1 slot, got {pages} pages and {slots} slots")
        self.config = config
        self.layout = layout
        self.pages = GlobalPages(layout, pages, device)
        self.slots = Slots(config, layout, slots, device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated by tensors: pages x page bytes + slots x per-slot bytes."""
        return self.pages.nbytes + self.slots.nbytes
