"""Calls as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture the call as a CUDA graph. Its result is that of the replay, in fixed memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay
