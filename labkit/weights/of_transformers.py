"""The weights of a model that has no policy row: transformers loads them as a whole, and labkit reads none of them."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from labkit.models.shards import Cut
from labkit.system.errors import UserError, first_line
from labkit.weights.protocol import identity_of_files


class OfTransformers:
    """The weights in a folder. Only `model` loads them; `names` and `get` raise UserError."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self.folder = folder
        self.identity = identity_of_files(files)

    def model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The vanilla model, in evaluation mode. Raises UserError where transformers cannot load it, or where weights
        are missing.
        """
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # the code of an architecture can raise errors of any kind
            raise UserError(f"transformers cannot load the model in {self.folder} ({first_line(error)})") from error
        if missing := sorted(loaded["missing_keys"]):
            raise UserError(
                f"{self.folder} lacks {len(missing)} tensors of {type(model).__name__}, {missing[0]} for one; "
                "download it again"
            )
        return model.eval()

    def names(self) -> NoReturn:
        raise self._unread()

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> NoReturn:
        raise self._unread()

    def _unread(self) -> UserError:
        return UserError(f"labkit reads no weights of the architecture in {self.folder}: transformers runs it")
