"""A rank's window buffers as tensors, for as long as they are mapped."""

import torch

from megatron_ft.snapshot.capture.copier import pin, unpin
from megatron_ft.snapshot.server.client import Arena


class WindowMemory:
    """The buffers of an arena; pinned where copies come from CUDA."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        """Raises RuntimeError where the driver refuses to pin them."""
        self.arena = arena
        self.buffers = [torch.frombuffer(arena.buffer(index), dtype=torch.uint8) for index in range(arena.num_buffers)]
        """uint8 [window_bytes] each. What is made of them must be gone before ``release``."""
        self._is_pinned = device.type == "cuda"
        if self._is_pinned:
            for buffer in self.buffers:
                pin(buffer)

    def release(self) -> None:
        """Unpin and unmap: the keeper can then give the memory to others.

        Raises:
            BufferError: somebody still uses a buffer.
            RuntimeError: the driver refuses.
        """
        while self.buffers:
            buffer = self.buffers.pop()
            if self._is_pinned:
                unpin(buffer)
            del buffer
        self.arena.close()
