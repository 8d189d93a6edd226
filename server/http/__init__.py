# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 around h11: a parser without sockets and an asyncio protocol around it."""
