"""The workers as Ray runs them: a process each, an event loop for calls, a thread for the model.

A worker whose step fails ends its process, because nobody knows what its cache holds then; Ray starts a fresh one.
"""

from __future__ import annotations

from rorqual.disagg.cluster.decode_actor import DecodeActor
from rorqual.disagg.cluster.prefill_actor import PrefillActor

ROLES = {"prefill": PrefillActor, "decode": DecodeActor}
