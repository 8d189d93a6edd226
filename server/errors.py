# SPDX-License-Identifier: Apache-2.0
"""Errors as the OpenAI API shows them: one exception, one table from code to status, one body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from cecilia.errors import CeciliaError, RequestError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    505: "invalid_request_error",
    507: "insufficient_storage_error",
}

# Engine codes that are the client's to mend, or the machine's state; every other engine code is a 500.
ENGINE_STATUS = {
    "context_length_exceeded": 400,
    "template_error": 400,
    "invalid_value": 400,
    "unsupported_parameter": 400,
    "unsupported_value": 400,
    "insufficient_memory": 503,
    "session_not_found": 404,
    "position_not_restorable": 409,
    "generation_not_resumable": 409,
    "session_exists": 409,
    "in_use": 409,
    "snapshot_not_found": 404,
    "snapshot_mismatch": 409,
    "snapshot_damaged": 409,
    "snapshot_unsupported": 409,
    "snapshot_failed": 507,
    "cache_full": 507,
    "shutting_down": 503,
}


@dataclass
class ApiError(Exception):
    """An answer that is not a success. `facts` join the error object, `headers` the response."""

    status: int
    code: str
    message: str
    param: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> bytes:
        """The error object as JSON."""
        return orjson.dumps(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """`{"error": {...}}`; message, type, param and code always come first."""
        error = {
            "message": self.message,
            "type": TYPES[self.status],
            "param": self.param,
            "code": self.code,
        }
        return {"error": error | self.facts}


def from_engine(error: CeciliaError) -> ApiError:
    """The HTTP form of an engine error.

    A `RequestError` is the client's to mend (400 unless the table knows better). Anything else that the table
    does not know is a 500 that keeps its code and its one line of facts: engine messages name no path.
    """
    param = error.param if isinstance(error, RequestError) else None
    facts = error.facts if isinstance(error, RequestError) else {}
    status = ENGINE_STATUS.get(error.code, 400 if isinstance(error, RequestError) else 500)
    headers = (("x-should-retry", "false"),) if status == 409 else ()
    return ApiError(status, error.code, error.message, param=param, facts=dict(facts), headers=headers)


def internal_error(request_id: str) -> ApiError:
    """A fault of ours; the id leads to the log line that holds the traceback."""
    return ApiError(500, "internal_error", f"internal error; the server's log has it under {request_id}")


def invalid_value(message: str, param: str | None) -> ApiError:
    """A known field with a value outside what is accepted."""
    return ApiError(400, "invalid_value", message, param=param)


def missing_parameter(param: str) -> ApiError:
    """A required field that is absent."""
    return ApiError(400, "missing_required_parameter", f"you must provide {param}", param=param)


def unsupported_parameter(message: str, param: str) -> ApiError:
    """A field this server does not implement, set to something that would matter."""
    return ApiError(400, "unsupported_parameter", message, param=param)


def unsupported_value(message: str, param: str) -> ApiError:
    """An implemented field with a value that is legal elsewhere but not built here."""
    return ApiError(400, "unsupported_value", message, param=param)
