"""Chat with a model: answers that arrive as they are generated, and conversations that keep their KV cache."""

from typing import TYPE_CHECKING

from labkit.system.lazy import lazy_parts

if TYPE_CHECKING:
    from labkit.conversation.answer import Answer, speak
    from labkit.conversation.conversation import ContextFullError, Conversation

__all__, __getattr__, __dir__ = lazy_parts(__name__)
