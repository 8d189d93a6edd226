# SPDX-License-Identifier: Apache-2.0
"""The `messages` field: roles, contents and parts, brought to one plain form."""

from __future__ import annotations

from typing import Any

from server.errors import ApiError, invalid_value, unsupported_parameter

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text")

Message = dict[str, Any]


def parse_messages(value: object) -> list[Message]:
    """A list of {role, content} with string contents; `developer` has become `system`.

    System messages at the head are joined into one, since most templates know one; a later one stays where it
    is. `reasoning_content` of assistant turns is kept for templates that use it.
    """
    if not isinstance(value, list):
        raise invalid_value("messages must be a list of objects", "messages")
    if not value:
        raise invalid_value("messages must not be empty", "messages")
    if len(value) > MAX_MESSAGES:
        raise invalid_value(f"at most {MAX_MESSAGES} messages are accepted, got {len(value)}", "messages")
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(value)]
    if [message["role"] for message in messages[-2:]] == ["assistant", "assistant"]:
        raise invalid_value("at most one assistant message may stand at the end", "messages")
    return _join_system(messages)


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise invalid_value(f"{where} must be an object", where)
    role = item.get("role")
    if role == "function":
        raise invalid_value(f"{where}.role 'function' is out of date; use 'tool'", f"{where}.role")
    if role not in ROLES:
        raise invalid_value(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    if item.get("tool_calls") or item.get("function_call"):
        raise unsupported_parameter(f"{where}: tool calls are not supported", f"{where}.tool_calls")
    message = {"role": "system" if role == "developer" else role, "content": _content(item, role, where)}
    reasoning = item.get("reasoning_content")
    if reasoning is not None and role == "assistant":
        if not isinstance(reasoning, str):
            raise invalid_value(f"{where}.reasoning_content must be a string", f"{where}.reasoning_content")
        message["reasoning_content"] = reasoning
    return message


def _content(item: Message, role: str, where: str) -> str:
    param = f"{where}.content"
    content = item.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list):
        return "".join(_part(part, role, f"{param}[{index}]") for index, part in enumerate(content))
    raise invalid_value(f"{param} must be a string or a list of parts", param)


def _part(part: object, role: str, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise invalid_value(f"{where} must be an object with a type", where)
    if kind in _TEXT_PARTS:
        text = part.get("text")
    elif kind == "refusal" and role == "assistant":
        text = part.get("refusal")
    else:
        message = f"{where}: parts of type {kind[:40]!r} are not supported by this model"
        raise ApiError(400, "unsupported_value", message, param=where)
    if not isinstance(text, str):
        raise invalid_value(f"{where}.text must be a string", where)
    return text


def _join_system(messages: list[Message]) -> list[Message]:
    head = 0
    while head < len(messages) and messages[head]["role"] == "system":
        head += 1
    if head < 2:
        return messages
    joined = "\n\n".join(message["content"] for message in messages[:head])
    return [{"role": "system", "content": joined}, *messages[head:]]
