"""Write a model as the file that llama.cpp reads.

python -P -m labkit.harness.compare.gguf SOURCES MODEL SEED DTYPE OUTTYPE TARGET

The conversion is done by llama.cpp's own `convert_hf_to_gguf.py`, from the folder SOURCES. Tokens are compared by their
ids, so the file has the size of the vocabulary but no tokenizer, of which the converter knows only the published ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from labkit.models.dtypes import FLOAT_DTYPES
from labkit.weights.resolve import resolve

OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def main() -> None:
    """Write TARGET with weights of OUTTYPE, or of DTYPE if that is empty. A checkpoint lies beside it meanwhile."""
    sources, model, seed, dtype, outtype, target = sys.argv[1:]
    with TemporaryDirectory(dir=Path(target).parent) as checkpoint:
        vanilla = resolve(model, seed=int(seed)).hf_model(FLOAT_DTYPES[dtype])
        architecture = type(vanilla).__name__
        if architecture == "GPT2LMHeadModel":
            vanilla.config.n_ctx = vanilla.config.n_positions  # a name of published configs that the converter reads
        vanilla.save_pretrained(checkpoint)
        del vanilla
        sys.path.insert(0, sources)
        sys.argv[1:] = [checkpoint, "--outtype", outtype or OUTTYPES[dtype], "--outfile", target]
        _convert(architecture)


def _convert(architecture: str) -> None:
    from conversion import get_model_class  # type: ignore[import-not-found]
    from convert_hf_to_gguf import main as convert  # type: ignore[import-not-found]

    get_model_class(architecture).set_vocab = _set_vocab_size
    convert()


def _set_vocab_size(converter: Any) -> None:
    converter._set_vocab_none()
    converter.gguf_writer.add_vocab_size(converter.hparams["vocab_size"])


if __name__ == "__main__":
    main()
