# SPDX-License-Identifier: Apache-2.0
"""status, capabilities and memory. None of them waits for the engine."""

from __future__ import annotations

from pathlib import Path

import cecilia
from server.ack import MAX_WINDOW
from server.gate import Phase
from server.openai.chat import ACK_SECONDS, ChatService
from server.openai.objects import Object

_PROCESS = Path("/proc/self/status")
_FIELDS = {"VmRSS": "rss", "VmHWM": "peak_rss", "VmSwap": "swap"}


class StatusRoutes:
    """What the process is and takes."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._started = service.clock.time()

    def status(self) -> Object:
        """GET status."""
        service = self._service
        info = dict(service.worker.loaded.result().info) if self._ready() else {}
        return {
            "service": "cecilia",
            "version": cecilia.__version__,
            "phase": service.gate.phase.name.lower(),
            "ready": self._ready(),
            "busy": service.gate.busy,
            "model": {"id": service.model_id} | info,
            "backend": {"kind": "cpu"},
            "generation": service.generations.status(),
            "uptime_s": service.clock.time() - self._started,
        }

    def capabilities(self) -> Object:
        """GET capabilities."""
        return {
            "flow": {"modes": ["ack"], "max_window": MAX_WINDOW, "ack_timeout_s": ACK_SECONDS},
            "features": {
                "cache_salt": True,
                "continue_generation": True,
                "pause": True,
                "sessions": True,
                "images": False,
                "json_schema": False,
                "tools": False,
            },
            "generations_at_once": 1,
        }

    def memory(self) -> Object:
        """GET memory: bytes of the process, and of what is kept of earlier requests."""
        answer: Object = {}
        for line in _PROCESS.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in _FIELDS:
                answer[_FIELDS[name]] = int(rest.split()[0]) << 10
        if self._ready():
            totals = self._service.worker.loaded.result().sessions.totals()
            answer["cache"] = {
                "sequences": totals.sequences,
                "used_bytes": totals.used_bytes,
                "allocated_bytes": totals.allocated_bytes,
                "limit_bytes": totals.limit_bytes,
            }
        return answer

    def _ready(self) -> bool:
        return self._service.gate.phase is Phase.OPEN
