"""Chat with a model: answers that arrive as they are generated, and conversations that keep their KV cache."""

from typing import TYPE_CHECKING

from labkit.system.lazy import lazy_parts

if TYPE_CHECKING:
    from labkit.conversation.answer import Answer, speak
    from labkit.conversation.conversation import ContextFullError, Conversation

__all__ = ["Answer", "ContextFullError", "Conversation", "speak"]

_HOME = {
    "Answer": "labkit.conversation.answer",
    "ContextFullError": "labkit.conversation.conversation",
    "Conversation": "labkit.conversation.conversation",
    "speak": "labkit.conversation.answer",
}

__getattr__, __dir__ = lazy_parts(__name__, _HOME)
