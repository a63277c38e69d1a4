"""What a cache holds, kept where a call fails: the same call again then begins where the first one did."""

from __future__ import annotations

from labkit.engine.memory.kv_cache import KVCache


class KeptOnError:
    """Around a call that adds tokens to a cache. If it fails, the cache has the tokens, the padding and the positions
    from before. Rows must not have been reordered within.

    visible: the new tokens bring no mask, so that only their number has to be undone.
    """

    __slots__ = ("_cache", "_first", "_holes", "_length", "_mask")

    def __init__(self, cache: KVCache, *, visible: bool = False) -> None:
        self._cache, self._length, self._holes = cache, cache.length, cache.holes
        self._first = self._mask = None
        if not visible and cache.first is not None:
            self._first = cache.first.clone()
            self._mask = None if cache.mask is None else cache.mask[:, : cache.length].clone()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            return
        cache, length = self._cache, self._length
        cache.crop(length - cache.length)
        if self._first is not None or not length:
            cache.restore_padding(self._first, self._mask, self._holes)
